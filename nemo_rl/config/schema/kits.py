"""Define the keys of the environments of `nemo_rl.kits`: games, other libraries, tools, the sandbox."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.availability import OnlyWith
from nemo_rl.config.base.names import PartName
from nemo_rl.config.base.section import Section, derived
from nemo_rl.config.base.value_types import (
    Amount,
    Count,
    Factor,
    FactorOrZero,
    Mebibytes,
    ProgramMebibytes,
    Seconds,
    Tokens,
    Workers,
)
from nemo_rl.config.schema.named_part import NamedPartConfig


class GameSection(Section):
    """An environment in which each turn of the model is one action, ended by `</action>`."""

    stop_strings: ClassVar[list[str]] = ["</action>"]


class SlidingPuzzleBoard(Section):
    """Boards of the sliding puzzle."""

    size: Annotated[int, Field(ge=2, le=9)] = 5
    """Number of rows and of columns."""
    shuffle_moves: Count = 10
    """Number of random moves from the solved board. No move undoes the previous one."""
    min_shuffle_moves: Count | None = None
    """Fewest random moves; the number is drawn between this and shuffle_moves. null: always shuffle_moves."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.min_shuffle_moves is not None and self.min_shuffle_moves > self.shuffle_moves:
            raise PydanticCustomError(
                "range", f"min_shuffle_moves={self.min_shuffle_moves} is above shuffle_moves={self.shuffle_moves}"
            )
        return self


class SlidingPuzzleConfig(Section):
    """The sliding puzzle."""

    game_config: SlidingPuzzleBoard = Field(default_factory=SlidingPuzzleBoard.build)
    """The board."""
    max_moves: Count = 30
    """Number of actions, including invalid ones, after which an episode ends as failed."""


class SlidingPuzzleEnvironmentConfig(GameSection):
    """The environment sliding_puzzle_game."""

    cfg: SlidingPuzzleConfig = Field(default_factory=SlidingPuzzleConfig.build)
    """The board, and the limit of moves."""


class BlackjackConfig(GameSection):
    """Blackjack against a dealer with fixed rules."""

    max_moves: Count = 12
    """Number of actions, including invalid ones, after which an episode ends as lost."""


class GymnasiumConfig(GameSection):
    """An environment of Gymnasium with discrete actions (extra gymnasium)."""

    id: str
    """Name under which the environment is registered, such as FrozenLake-v1."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for gymnasium.make."""
    action_names: list[str] | None = None
    """Words for the actions, in order; null: their numbers."""
    rendered: bool = False
    """Show the environment's text rendering (render_mode ansi) instead of the observation."""
    instructions: str | None = None
    """First lines of the prompt; null: the name of the environment."""
    max_moves: Count | None = None
    """Number of actions after which an episode ends; null: only the environment ends it."""


class TextArenaConfig(GameSection):
    """A game of TextArena for one player (extra textarena)."""

    id: str
    """Name under which the game is registered, such as TowerOfHanoi-v0."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for textarena.make."""
    max_moves: Count | None = None
    """Number of actions after which an episode ends; null: only the game ends it."""


class ReasoningGymConfig(GameSection):
    """A generated task of Reasoning Gym (extra reasoning-gym)."""

    stop_strings: ClassVar[list[str]] = ["</answer>"]

    dataset: str
    """Name of the task, such as chain_sum."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task."""


class VerifiersConfig(Section):
    """An environment of the package verifiers, version 0.1 (extra verifiers)."""

    id: str
    """Module with a function load_environment, or the name of an installed environment."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for load_environment."""
    stop_strings: list[str] | None = None
    """Texts that end the turns, besides policy.generation.stop_strings."""


class SandboxKeys(Section):
    """Base of the sections of environments that run programs in a sandbox."""

    sandbox: Literal["auto", "bubblewrap", "landlock"] = "auto"
    """Sandbox mechanism for programs; auto: the first that works on the machine. If none works, the run is refused."""
    memory_mb: ProgramMebibytes = 512
    """Memory of a program in MiB."""
    max_processes: Workers = 16
    """Number of processes and threads that a program may have."""
    file_mb: Mebibytes = 16
    """Largest size of each file that a program writes, in MiB."""
    scratch_mb: Mebibytes = 64
    """Largest total size of a program's files, in MiB."""
    output_bytes: Amount = 262144
    """Number of bytes of output after which a program is ended."""


ToolName = Annotated[str, PartName(("calculator", "python", "retriever", "mcp"))]


class ToolConfig(NamedPartConfig):
    """One tool, or several that belong together."""

    name: ToolName
    """calculator; python: programs in a sandbox; retriever; mcp: the tools of the server that command starts; or the
    dotted path of a function or of a class derived from EpisodeTools."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class; with python, keys of the sandbox; with mcp, environment variables of the server."""
    command: list[str] | None = None
    """With mcp: program and arguments that start the server."""
    shared: bool = False
    """Use one object or server for all episodes; false: each episode has its own."""
    isolate: bool = False
    """Run each episode's object in a separate process, which is killed at a deadline and at the episode's end."""
    memory_limit_mb: Annotated[Mebibytes, OnlyWith("isolate")] = 1024
    """With isolate: memory that the process may use in addition to that after its imports."""
    timeout_s: Seconds | None = None
    """Time limit of one call; null: that of the environment."""


class PythonToolConfig(SandboxKeys):
    """Arguments (`kwargs`) of the tool python. The tool's timeout_s limits the wall time of a program."""

    stateful: bool = False
    """Whether a program gets the variables of the episode's earlier programs, which are then run again before it."""
    num_workers: Workers = 8
    """Programs that run at the same time; further calls wait, which does not count against their limits."""
    cpu_time_s: Seconds | None = None
    """Processor seconds of a program; null: the same number as its seconds of wall time."""


class GraderConfig(NamedPartConfig):
    """The environment that grades the final answer."""

    name: str = "math"
    """Name of an environment, or the dotted path of its class."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Configuration of the environment, with the keys that it has below env."""


class ToolTokenizerConfig(Section):
    """The tokenizer whose chat template writes the tools and their calls."""

    name: str | None = derived("${policy.tokenizer.name}")
    """Hub id or folder; in an evaluation the default is tokenizer.name. Required without a model."""
    chat_template: str | None = derived("${policy.tokenizer.chat_template}")
    """Same as policy.tokenizer.chat_template."""
    chat_template_kwargs: dict[str, Any] | None = derived("${policy.tokenizer.chat_template_kwargs}")
    """Same as policy.tokenizer.chat_template_kwargs."""
    use_processor: bool | None = derived("${policy.tokenizer.use_processor}")
    """Same as policy.tokenizer.use_processor: whether the model reads images of tools."""


class ToolImagesConfig(Section):
    """Limits on the images that tools return."""

    allow_urls: bool | None = derived("${data.images.allow_urls}")
    """Download images of which a tool returns the http or https address."""
    max_megapixels: Factor | None = derived("${data.images.max_megapixels}")
    """Largest number of millions of pixels of an image."""
    max_megabytes: Factor | None = derived("${data.images.max_megabytes}")
    """Largest size of the image files of one call in millions of bytes."""


class ToolEnvironmentConfig(Section):
    """Tools that the model calls until it writes an answer without a call, which is graded."""

    tools: list[ToolConfig] = Field(default_factory=list)
    """The tools. Every prompt offers them in addition to the tools of its row."""
    tool_parser: str | None = None
    """vLLM's parser that finds calls in a response; null: a parser for the format that the chat template writes."""
    timeout_s: Seconds = 30.0
    """Time limit of one call in seconds. After that, the model is told that the tool gave no answer."""
    max_output_bytes: Amount = 8192
    """Largest answer of a tool in bytes of UTF-8. A longer answer is cut, and the model is told by how much."""
    max_output_tokens: Tokens | None = None
    """Largest answer of a tool in tokens; null: only max_output_bytes limits it."""
    max_calls_per_turn: Count = 16
    """Largest number of calls of one response. They run at the same time, and further calls are invalid."""
    grader: GraderConfig = Field(default_factory=GraderConfig)
    """The environment that grades the final answer."""
    stop_strings: list[str] | None = None
    """Texts that end the responses, besides policy.generation.stop_strings."""
    tokenizer: ToolTokenizerConfig = Field(default_factory=ToolTokenizerConfig)
    """The tokenizer of the policy."""
    images: ToolImagesConfig = Field(default_factory=ToolImagesConfig)
    """Limits on images. A tool's image beyond them is an error that the model reads."""


class RAGEnvironmentConfig(Section):
    """Retrieval of documents: the model writes a query between <retrieve> and </retrieve>."""

    dataset_name: str
    """Documents: a hub id, a folder or a file (JSON lines, CSV, parquet)."""
    dataset_split: str = "train"
    """Split of a hub data set or of a saved folder."""
    text_column: str = "text"
    """Column with the text of a document."""
    num_results: Count = 10
    """Number of documents for each query."""
    k1: FactorOrZero = 1.5
    """BM25: saturation of repeated words."""
    b: Annotated[float, Field(ge=0, le=1)] = 0.75
    """BM25: penalty of long documents, from 0 to 1."""
    device: Literal["cpu"] = "cpu"
    """Device of the index, which is computed with numpy."""
    stop_strings: list[str] | None = Field(default_factory=lambda: ["</retrieve>"])
    """Texts that end the responses, besides policy.generation.stop_strings."""
    grader: GraderConfig | None = None
    """The environment that grades the last turn's answer; null: the reward is 0."""
