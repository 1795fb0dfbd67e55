"""Define the keys of environments with agents, and of the endpoint that they call.

In `env.agent`, a program plays each sample. In `env.nemo_gym`, agents of NeMo Gym do.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.section import Section
from nemo_rl.config.base.value_types import (
    Amount,
    Count,
    CountOrZero,
    Gibibytes,
    Host,
    HttpAddress,
    Mebibytes,
    Port,
    ProgramMebibytes,
    Seconds,
    Workers,
)
from nemo_rl.config.schema.algorithms.reward_penalties import EffortLevelConfig
from nemo_rl.config.schema.kits import GraderConfig, SandboxKeys

_BELONGS_TO = {"kwargs": "program", "environment": "command", "readable": "command"}


DEFAULT_INVALID_TOOL_CALL_PATTERNS = ["<tool_call>", "</tool_call>", "<function_call>", "</function_call>"]
"""Texts that remain in an answer if one of its tool calls could not be parsed."""


PLUGIN_KEYS = ("tool_parser_plugin", "reasoning_parser_plugin")
"""Keys of `AgentKeys` that name files."""


class AgentKeys(Section):
    """Keys of every agent environment: sampling of its programs, and what is trained."""

    tool_parser: str | None = None
    """vLLM's parser that finds tool calls in an answer; null: a parser for the format that the chat template writes."""
    reasoning_parser: str | None = None
    """vLLM's parser that separates the reasoning from an answer; null: the reasoning is not separated."""
    tool_parser_plugin: str | None = None
    """Python file that registers a tool parser with vLLM; null: none."""
    reasoning_parser_plugin: str | None = None
    """Python file that registers a reasoning parser with vLLM; null: none."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template for the requests of the program. These override
    policy.tokenizer.chat_template_kwargs, and the variables of a request override both. null: none."""
    invalid_tool_call_patterns: list[str] = Field(default_factory=DEFAULT_INVALID_TOOL_CALL_PATTERNS.copy)
    """Texts that show an unparsed tool call, if an answer contains them besides its parsed calls; see
    grpo.invalid_tool_call_advantage."""
    max_calls: Count = 64
    """Number of model calls that one program may make; further calls are refused."""
    sampling: Literal["run", "request"] = "run"
    """Source of temperature and top_p: the run, or each request."""
    credit: Literal["all", "last"] = "all"
    """Conversations of a program that its reward trains: all of them, or only the one that ended last."""
    history: Literal["keep", "template"] = "keep"
    """Treatment of earlier answers in a conversation: keep the sampled tokens, or render the answers again with the
    chat template."""


class AgentEndpointConfig(Section):
    """The endpoint that programs of agent environments call. It runs where rollouts are played."""

    host: Host = "127.0.0.1"
    """Address to listen on. Programs on other machines need "0.0.0.0". Every request needs the key of a sample."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0: a free port. With cluster.rollout_runners it must be 0."""
    public_host: Host | None = None
    """Host in the addresses that programs get; null: host, or the address of the machine for "0.0.0.0"."""
    max_request_mb: Annotated[float, Field(gt=0, le=64)] = 1.0
    """Largest body of a request, in MiB; a larger request is answered with status 413."""
    max_concurrent_calls: Count = 64
    """Largest number of concurrent requests of one sample's program; further requests get status 429."""
    max_requests_per_minute: Count | None = None
    """Most requests of one sample's program within a minute; further ones get status 429; null: no limit."""


class AgentEnvironmentConfig(AgentKeys, SandboxKeys):
    """A program that is started for each sample, calls the model as often as necessary, and returns the reward."""

    place: ClassVar[str] = "env.agent"

    program: str | None = None
    """Dotted path of a function, a coroutine function, or a class whose objects are called, which gets an AgentTask."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """With program: further arguments of the function, or arguments of the class."""
    command: list[str] | None = None
    """Program and arguments of a process that is started for each sample."""
    environment: dict[str, str] = Field(default_factory=dict)
    """With command: environment variables besides those that the library sets."""
    service: HttpAddress | None = None
    """Address to which each task is posted as JSON, and which answers with the reward."""
    timeout_s: Seconds = 300.0
    """Time limit of a program in seconds. A program that takes longer is ended, and its sample gets an error. A
    function on a thread cannot be ended, but its result is ignored."""
    step_timeout_s: Seconds = 600.0
    """Time limit in seconds of a program and its grading together."""
    max_open_episodes: Count = 64
    """Programs that run at the same time; further programs wait, and the wait does not count against their deadline."""
    num_workers: Workers = 1
    """Number of processes among which the programs are divided. More processes help if functions compute much."""
    max_memory_gb: Gibibytes | None = None
    """Gibibytes that each process of the environment may use, with the processes that it started; null: no limit."""
    row_fields: list[str] | None = None
    """Fields of the row that the program gets, such as ground_truth; null: all with program and service, none with
    command."""
    grader: GraderConfig | None = None
    """The environment that grades the program's answer; null: the program returns the reward."""
    sandbox: Literal["auto", "bubblewrap", "landlock", "none"] = "auto"  # type: ignore[assignment]  # one more choice
    """With command: sandbox of the process, which can reach only the endpoint. auto: the first mechanism that works on
    the machine; none: no sandbox, so the command has all rights of the run."""
    readable: list[str] = Field(default_factory=list)
    """With command in a sandbox: files and folders that the command may read, besides itself and the run's Python."""
    memory_mb: ProgramMebibytes = 4096
    """With command in a sandbox: memory in MiB."""
    max_processes: Workers = 64
    """With command in a sandbox: largest number of processes and threads."""
    file_mb: Mebibytes = 64
    """With command in a sandbox: largest size of each file that the command writes, in MiB."""
    scratch_mb: Mebibytes = 256
    """With command in a sandbox: largest total size of the files that the command writes, in MiB."""
    output_bytes: Amount = 1048576
    """With command: number of bytes of output after which the process is ended."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        ways = [key for key in ("program", "command", "service") if getattr(self, key)]
        if len(ways) != 1:
            given = ", ".join(ways) or "none of them"
            raise PydanticCustomError(
                "agent", "give exactly one of program, command and service; there is {given}", {"given": given}
            )
        for key, owner in _BELONGS_TO.items():
            if getattr(self, key) and owner not in ways:
                raise PydanticCustomError("agent", "{key} belongs to {owner}; remove it", {"key": key, "owner": owner})
        if self.timeout_s >= self.step_timeout_s:
            raise PydanticCustomError(
                "agent",
                "timeout_s={timeout} must be less than step_timeout_s={step}, which also covers the grading; raise it",
                {"timeout": f"{self.timeout_s:g}", "step": f"{self.step_timeout_s:g}"},
            )
        return self


NEMO_GYM = "nemo_gym"
"""Name of the environment with agents of NeMo Gym."""
RESULTS_FILE = "results.jsonl"
"""File in log_dir for the results of rollouts."""


class HeadServerConfig(Section):
    """NeMo Gym's head server, which stores the addresses of all other servers."""

    host: Host = "127.0.0.1"
    """Host of the head server."""
    port: Port = 11000
    """Port of the head server."""


class NemoGymConfig(AgentKeys):
    """Agents and resources servers of NeMo Gym, which play and reward each sample. Any further key is passed to its
    servers.
    """

    place: ClassVar[str] = "env.nemo_gym"
    rest: ClassVar[str] = "servers"
    later: ClassVar[dict[str, str]] = {
        "pad_dynamic_image_shapes": "multimodal data",
    }
    ignored: ClassVar[dict[str, str]] = {
        "rollout_max_attempts_to_avoid_lp_nan": "log-probabilities come from the tokens that the endpoint has sampled, "
        "and one that is no number ends the run",
    }

    idle: ClassVar[dict[str, str]] = {
        "should_use_nemo_gym": "the env_name of data entries decides; true demands that one is nemo_gym",
    }

    config_paths: list[str] = Field(default_factory=list)
    """Configuration files of NeMo Gym for the servers to start, as paths here or in NeMo Gym's folder. If empty, the
    servers already run at head_server."""
    servers: dict[str, Any] = Field(default_factory=dict)
    """Configuration of servers that is added to that of config_paths. Keys of env.nemo_gym that this table does not
    list are added too."""
    effort_levels: dict[str, EffortLevelConfig] | None = None
    """The keys of the section effort_levels, at another place; null: the section effort_levels is used."""
    num_gpu_nodes: CountOrZero = 0
    """On GPUs: number of machines of the cluster for the models of NeMo Gym's servers."""
    head_server: HeadServerConfig | None = None
    """Address of the head server, which runs already or is started; null: a free port of this machine."""
    command: list[str] = Field(default_factory=lambda: ["ng_run"], min_length=1)
    """Program and first arguments that start the servers."""
    uv_venv_dir: str | None = None
    """Folder of NeMo Gym's Python environments. The program of command is first looked up in its bin, and the servers
    make their environments below it. null: PATH, and a folder that NeMo Gym chooses."""
    uv_cache_dir: str | None = None
    """Cache of uv for these environments; null: uv's default."""
    port_range_low: Port | None = None
    """Lowest port of the servers; null: NeMo Gym chooses."""
    port_range_high: Port | None = None
    """Highest port of the servers; null: NeMo Gym chooses."""
    log_dir: str = "logs/nemo_gym"
    """Folder for the output of the servers."""
    start_timeout_s: Seconds = 600.0
    """Time limit in seconds until all servers answer."""
    timeout_s: Seconds = 900.0
    """Time limit of a rollout in seconds; after that, its sample gets an error."""
    step_timeout_s: Seconds = 1800.0
    """Time limit in seconds of a rollout including the start of the servers, for which the first rollout waits."""
    max_open_episodes: Count = 256
    """Number of concurrent rollouts. Further rollouts wait, and the wait does not count against their time limit."""
    max_memory_gb: Gibibytes | None = None
    """Gibibytes that the environment and its servers may use together; null: no limit."""
    thinking_tags: list[str] | None = None
    """Texts that begin and end thinking; null: those of reward_penalties.thinking_tags."""
    should_use_nemo_gym: bool | None = None
    """No effect on the run, because env_name of data entries decides. true, also written env.should_use_nemo_gym,
    requires that a data entry uses nemo_gym."""
    should_mask_flagged_samples: bool = True
    """Exclude samples whose flag_field is true from training; also written env.should_mask_flagged_samples."""
    flag_field: str = "mask_sample"
    """Field of a result that is true if its sample is excluded from training."""
    should_log_nemo_gym_responses: bool = False
    """Write each result with all items to results.jsonl in log_dir. Also written env.should_log_nemo_gym_responses."""
    is_trajectory_collection: bool = False
    """Play the validation rows once instead of training, and write the results as with should_log_nemo_gym_responses.
    This is a key of examples/nemo_gym/run_grpo_nemo_gym.py."""

    @property
    def logs_results(self) -> bool:
        """Return True if results are written to a file."""
        return self.should_log_nemo_gym_responses or self.is_trajectory_collection

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        needed = self.timeout_s + (self.start_timeout_s if self.config_paths else 0)
        if needed >= self.step_timeout_s:
            raise PydanticCustomError(
                "nemo_gym",
                "timeout_s and start_timeout_s are together {needed} s, but step_timeout_s={step} has to be more: the "
                "first rollout waits for the servers; raise it",
                {"needed": f"{needed:g}", "step": f"{self.step_timeout_s:g}"},
            )
        low, high = self.port_range_low, self.port_range_high
        if low is not None and high is not None and low > high:
            raise PydanticCustomError(
                "nemo_gym", "port_range_low={low} is above port_range_high={high}", {"low": low, "high": high}
            )
        return self
