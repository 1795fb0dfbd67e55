"""The environment `nemo_gym`, whose programs are rollouts of NeMo Gym's agents."""

from collections.abc import Mapping
from typing import Any, ClassVar

from nemo_rl.config.schema.agents import NemoGymConfig
from nemo_rl.environments.agents.environment import ProgramEnvironment
from nemo_rl.environments.nemo_gym.program import GymProgram


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
