"""Keys of `env.nemo_gym`, whose samples agents of NeMo Gym play; its servers run in processes of their own."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.section import Section
from nemo_rl.config.schema.agents import AgentKeys

Port = Annotated[int, Field(ge=1, le=65535)]
"""A TCP port."""

NEMO_GYM = "nemo_gym"
"""Name of the environment."""


class HeadServerConfig(Section):
    """The head server of NeMo Gym, which knows the addresses of all others."""

    host: str = "127.0.0.1"
    """Its host."""
    port: Port = 11000
    """Its port."""


class NemoGymConfig(AgentKeys):
    """Agents and resources servers of NeMo Gym, which play and reward each sample. Any further key is passed to its
    servers.
    """

    place: ClassVar[str] = "env.nemo_gym"
    rest: ClassVar[str] = "servers"
    later: ClassVar[dict[str, str]] = {
        "effort_levels": "NeMo RL's form of levels of effort (write the section effort_levels)",
        "num_gpu_nodes": "nodes of the run for models of NeMo Gym's servers",
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
    """Files of NeMo Gym that say which servers are started: paths here, or in NeMo Gym's folder. Empty: the servers run
    already, and head_server says where."""
    servers: dict[str, Any] = Field(default_factory=dict)
    """Configuration of servers that is added to that of config_paths; keys of this section that are not in this table
    belong to it too."""
    head_server: HeadServerConfig | None = None
    """Address of the head server: of servers that run already, or where it is started; null: a free port here."""
    command: list[str] = Field(default_factory=lambda: ["ng_run"], min_length=1)
    """Program and first arguments that start the servers."""
    uv_venv_dir: str | None = None
    """Folder of NeMo Gym's Python environments: the program of command is looked for in its bin first, and the servers
    make theirs below it; null: PATH, and NeMo Gym's own choice."""
    uv_cache_dir: str | None = None
    """Cache of uv for these environments; null: uv's own."""
    port_range_low: Port | None = None
    """Lowest port of the servers; null: NeMo Gym chooses."""
    port_range_high: Port | None = None
    """Highest port of the servers; null: NeMo Gym chooses."""
    log_dir: str = "logs/nemo_gym"
    """Folder for the output of the servers."""
    start_timeout_s: PositiveFloat = 600.0
    """Seconds until all servers answer."""
    timeout_s: PositiveFloat = 900.0
    """Seconds for one rollout; afterwards its sample has an error."""
    step_timeout_s: PositiveFloat = 1800.0
    """Seconds for a rollout together with the start of the servers, which the first one waits for."""
    max_open_episodes: PositiveInt = 256
    """Rollouts at the same time; others wait, which does not count against their deadline."""
    max_memory_gb: PositiveFloat | None = None
    """Gibibytes that the environment and its servers may use together; null: no limit."""
    thinking_tags: list[str] | None = None
    """Texts that begin and end thinking; null: those of reward_penalties.thinking_tags."""
    should_use_nemo_gym: bool | None = None
    """No effect: env_name of data entries decides. true, also written env.should_use_nemo_gym, demands that one of them
    is nemo_gym."""
    should_mask_flagged_samples: bool = True
    """Exclude samples from training whose result has flag_field, also written env.should_mask_flagged_samples."""
    flag_field: str = "mask_sample"
    """Field of a result that is true for samples that shall not train the model."""
    should_log_nemo_gym_responses: bool = False
    """Write each result with all items to results.jsonl in log_dir, also written env.should_log_nemo_gym_responses."""
    is_trajectory_collection: bool = False
    """Play the validation rows once and write the results, as should_log_nemo_gym_responses, instead of training; a key
    of examples/nemo_gym/run_grpo_nemo_gym.py."""

    @property
    def logs_results(self) -> bool:
        """True if results are written to a file."""
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
