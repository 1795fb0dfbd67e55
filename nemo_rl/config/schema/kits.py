"""Keys of the environments of `nemo_rl.kits`: games, environments of other libraries, tools, the sandbox."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.availability import OnlyWith
from nemo_rl.config.base.names import PartName
from nemo_rl.config.base.section import Section, derived
from nemo_rl.config.base.value_types import (
    Amount,
    Count,
    FactorOrZero,
    Mebibytes,
    ProgramMebibytes,
    Seconds,
    Tokens,
    Workers,
)
from nemo_rl.config.schema.named_part import NamedPartConfig


class GameSection(Section):
    """An environment in which each turn of the model is one action, which ends with `</action>`."""

    stop_strings: ClassVar[list[str]] = ["</action>"]


class SlidingPuzzleBoard(Section):
    """Boards of the sliding puzzle."""

    size: Annotated[int, Field(ge=2, le=9)] = 5
    """Rows and columns."""
    shuffle_moves: Count = 10
    """Random moves from the solved board, none of which undoes the previous one."""
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
    """Actions after which an episode ends as failed; an invalid action counts too."""


class SlidingPuzzleEnvironmentConfig(GameSection):
    """The environment sliding_puzzle_game."""

    cfg: SlidingPuzzleConfig = Field(default_factory=SlidingPuzzleConfig.build)
    """The board and the moves."""


class BlackjackConfig(GameSection):
    """Blackjack against a dealer with fixed rules."""

    max_moves: Count = 12
    """Actions after which an episode ends as lost; an invalid action counts too."""


class GymnasiumConfig(GameSection):
    """An environment of Gymnasium with discrete actions (extra gymnasium)."""

    id: str
    """Name under which the environment is registered, such as FrozenLake-v1."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for gymnasium.make."""
    action_names: list[str] | None = None
    """Words for the actions, in their order; null: their numbers."""
    rendered: bool = False
    """Show the environment as its text rendering (render_mode ansi) instead of the observation."""
    instructions: str | None = None
    """First lines of the prompt; null: the name."""
    max_moves: Count | None = None
    """Actions after which an episode ends; null: only the environment ends it."""


class TextArenaConfig(GameSection):
    """A game of TextArena for one player (extra textarena)."""

    id: str
    """Name under which the game is registered, such as TowerOfHanoi-v0."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for textarena.make."""
    max_moves: Count | None = None
    """Actions after which an episode ends; null: only the game ends it."""


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
    """Base of sections whose programs run in a sandbox."""

    sandbox: Literal["auto", "bubblewrap", "landlock"] = "auto"
    """Sandbox mechanism for programs; auto: the first that works on the machine. If none works, the run is refused."""
    memory_mb: ProgramMebibytes = 512
    """Memory of a program in MiB."""
    max_processes: Workers = 16
    """Processes and threads of a program."""
    file_mb: Mebibytes = 16
    """Size of each file that a program writes, in MiB."""
    scratch_mb: Mebibytes = 64
    """Size of all files of a program together, in MiB."""
    output_bytes: Amount = 262144
    """Bytes of output after which a program is ended."""


ToolName = Annotated[str, PartName(("calculator", "python", "retriever", "mcp"))]


class ToolConfig(NamedPartConfig):
    """One tool, or several that belong together."""

    name: ToolName
    """calculator; python, programs in a sandbox; retriever; mcp, the tools of the server that command starts; or the
    dotted path of a function, or of a class derived from EpisodeTools."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class, keys of the sandbox with python, or the server's environment variables with mcp."""
    command: list[str] | None = None
    """With mcp: program and arguments that start the server."""
    shared: bool = False
    """Use one object, or one server, for all episodes; false: each episode has its own."""
    isolate: bool = False
    """Run each episode's object in a process of its own, which is killed at a deadline and at the episode's end."""
    memory_limit_mb: Annotated[Mebibytes, OnlyWith("isolate")] = 1024
    """With isolate: most memory of the process beyond what it has after its imports."""
    timeout_s: Seconds | None = None
    """Deadline of one call; null: that of the environment."""


class PythonToolConfig(SandboxKeys):
    """Arguments (`kwargs`) of the tool python. timeout_s of the tool limits the wall time of a program."""

    stateful: bool = False
    """Whether a program sees the variables of the episode's earlier programs, which then run again before it."""
    num_workers: Workers = 8
    """Programs that run at the same time; further calls wait, which does not count against their limits."""
    cpu_time_s: Seconds | None = None
    """Processor seconds of a program; null: as many as it has seconds of wall time."""


class GraderConfig(NamedPartConfig):
    """The environment that grades the final answer."""

    name: str = "math"
    """Name of an environment, or the dotted path of its class."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Configuration of the environment, as it would be written below env."""


class ToolTokenizerConfig(Section):
    """The tokenizer whose chat template writes the tools and their calls."""

    name: str | None = derived("${policy.tokenizer.name}")
    """Hub id or folder; null where there is no policy, and then it has to be given."""
    chat_template: str | None = derived("${policy.tokenizer.chat_template}")
    """As policy.tokenizer.chat_template."""
    chat_template_kwargs: dict[str, Any] | None = derived("${policy.tokenizer.chat_template_kwargs}")
    """As policy.tokenizer.chat_template_kwargs."""


class ToolEnvironmentConfig(Section):
    """Tools that the model calls until it gives an answer without a call, which is graded."""

    tools: list[ToolConfig] = Field(default_factory=list)
    """The tools, which are offered in every prompt in addition to those of its row."""
    tool_parser: str | None = None
    """Parser of vLLM that finds calls in a response; null: a parser for the format that the chat template writes."""
    timeout_s: Seconds = 30.0
    """Time limit of one call in seconds; after that the model reads that the tool gave no answer."""
    max_output_bytes: Amount = 8192
    """Longest answer of a tool in bytes of UTF-8; more is cut, and the model reads how much."""
    max_output_tokens: Tokens | None = None
    """Longest answer of a tool in tokens; null: as max_output_bytes allows."""
    max_calls_per_turn: Count = 16
    """Most calls of one response that are made, all at the same time; further calls are invalid."""
    grader: GraderConfig = Field(default_factory=GraderConfig)
    """The environment that grades the final answer."""
    stop_strings: list[str] | None = None
    """Texts that end the responses, besides policy.generation.stop_strings."""
    tokenizer: ToolTokenizerConfig = Field(default_factory=ToolTokenizerConfig)
    """The tokenizer of the policy."""


class RAGEnvironmentConfig(Section):
    """Retrieval of documents: the model writes a query between <retrieve> and </retrieve>."""

    dataset_name: str
    """Documents: a hub id, a folder or a file (JSON lines, CSV, parquet)."""
    dataset_split: str = "train"
    """Split of a data set of the hub or of a saved folder."""
    text_column: str = "text"
    """Column with the text of a document."""
    num_results: Count = 10
    """Number of documents for each query."""
    k1: FactorOrZero = 1.5
    """BM25: how fast repeated words saturate."""
    b: Annotated[float, Field(ge=0, le=1)] = 0.75
    """BM25: how much long documents are penalised, 0 to 1."""
    device: Literal["cpu"] = "cpu"
    """Device of the index; it is computed with numpy."""
    stop_strings: list[str] | None = Field(default_factory=lambda: ["</retrieve>"])
    """Texts that end the responses, besides policy.generation.stop_strings."""
    grader: GraderConfig | None = None
    """The environment that grades the answer of the last turn; null: the reward is 0."""
