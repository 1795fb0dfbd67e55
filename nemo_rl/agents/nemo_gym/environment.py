"""The environment `nemo_gym`, whose programs are rollouts of NeMo Gym's agents."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from nemo_rl.agents.nemo_gym.command import find_program
from nemo_rl.agents.nemo_gym.program import GymProgram
from nemo_rl.agents.programs.environment import ProgramEnvironment, check_parsers
from nemo_rl.config.schema.agents import NemoGymConfig

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import TokenizerType


class NemoGym(ProgramEnvironment):
    """Agents and resources servers of NeMo Gym.

    One actor has it, because the servers are started once.

    Args:
        cfg: the `env.nemo_gym` section (or its dict).

    Raises:
        ConfigError: the program that starts the servers does not exist here.
    """

    config_class: ClassVar[type | None] = NemoGymConfig

    def __init__(self, cfg: NemoGymConfig | Mapping[str, Any]) -> None:
        section = NemoGymConfig.of(cfg)
        super().__init__(GymProgram(section), section.timeout_s)

    @classmethod
    def check_section(cls, section: Mapping[str, Any], place: str, tokenizer: "TokenizerType | None" = None) -> None:
        """See `EnvironmentInterface.check_section`: find the command that starts the servers, and the parsers."""
        cfg = NemoGymConfig.of(section)
        if cfg.config_paths:
            find_program(cfg)
        if tokenizer is not None:
            check_parsers(cfg, place, tokenizer)
