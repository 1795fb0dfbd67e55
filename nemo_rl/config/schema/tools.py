"""Keys of `env.tools` and `env.rag`: tools that a model calls between its turns, and documents that it retrieves."""

from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_rl.config.base.availability import OnlyWith
from nemo_rl.config.base.numbers import Amount, Count, FactorOrZero, Mebibytes, Seconds, Tokens, Workers
from nemo_rl.config.base.part_names import PartName
from nemo_rl.config.base.section import Section, derived
from nemo_rl.config.schema.named_part import NamedPartConfig
from nemo_rl.config.schema.sandbox import SandboxKeys

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
    """With isolate: memory that the process may have above what it has after its imports."""
    timeout_s: Seconds | None = None
    """Deadline of one call; null: that of the environment."""


class PythonToolConfig(SandboxKeys):
    """Arguments (`kwargs`) of the tool python; timeout_s of its entry is the limit of a program's wall time."""

    stateful: bool = False
    """Whether a program sees the variables of the episode's earlier ones, which then run again before it."""
    num_workers: Workers = 8
    """Programs that run at the same time; further calls wait, which does not count against their limits."""
    cpu_time_s: Seconds | None = None
    """Processor seconds of a program; null: as many as it has seconds of wall time."""


class GraderConfig(NamedPartConfig):
    """The environment that grades the final answer."""

    name: str = "math"
    """Name of an environment, or the dotted path of its class."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its section, as it would be below env."""


class ToolTokenizerConfig(Section):
    """The tokenizer whose chat template writes the tools and their calls."""

    name: str | None = derived("${policy.tokenizer.name}")
    """Hub id or folder; null where there is no policy, and then it has to be given."""
    chat_template: str | None = derived("${policy.tokenizer.chat_template}")
    """As policy.tokenizer.chat_template."""
    chat_template_kwargs: dict[str, Any] | None = derived("${policy.tokenizer.chat_template_kwargs}")
    """As policy.tokenizer.chat_template_kwargs."""


class ToolEnvironmentConfig(Section):
    """Tools that the model calls; an answer without a call is its last, and is graded."""

    tools: list[ToolConfig] = Field(default_factory=list)
    """The tools, which are offered in every prompt in addition to those of its row."""
    tool_parser: str | None = None
    """Parser of vLLM that finds calls in a response; null: one that reads what the chat template writes."""
    timeout_s: Seconds = 30.0
    """Deadline of one call; the model then reads that the tool gave no answer."""
    max_output_bytes: Amount = 8192
    """Longest answer of a tool in bytes of UTF-8; more is cut, and the model reads how much."""
    max_output_tokens: Tokens | None = None
    """Longest answer of a tool in tokens; null: as max_output_bytes allows."""
    max_calls_per_turn: Count = 16
    """Calls of one response that are made, at the same time; the others are invalid."""
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
    """Documents for each query."""
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
