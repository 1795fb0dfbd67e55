"""Define the interface of the player of agent environments, which `nemo_rl.agents` implements.

Rollouts without agents do not import `nemo_rl.agents`.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, cast

from transformers import PreTrainedTokenizerBase

from nemo_rl.config.schema.agents import AgentEndpointConfig
from nemo_rl.data.interfaces import Message
from nemo_rl.data.messages.content import TextRules
from nemo_rl.environments.interfaces import StepResult
from nemo_rl.experience.trajectory import RolloutLimits, Trajectory
from nemo_rl.models.generation.interfaces import GenerationInterface, SamplingParams
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.imports import import_dotted

AGENT_PLAYER = "nemo_rl.agents.endpoint.player.AgentPlayer"


class PlayedProgram(Protocol):
    """Result of a finished program."""

    @property
    def step(self) -> StepResult:
        """Step result of the environment."""

    @property
    def spread_reward(self) -> Callable[[], None]:
        """Function that divides the reward over the response turns. It is called when the reward is known."""


class ProgramPlayer(Protocol):
    """Play samples whose environment runs a program that calls the model itself."""

    async def play(
        self,
        sample: Trajectory,
        section: Mapping[str, Any],
        step_of: Callable[[list[Message], Any], Awaitable[StepResult]],
        sampling: SamplingParams,
        seed_of: Callable[..., int],
        *,
        trains: bool = True,
    ) -> PlayedProgram:
        """Run the program of a sample to its end, and write the program's answers into the sample.

        Args:
            sample: The sample, which contains only its prompt.
            section: Keys of the sample's environment.
            step_of: Function that calls `step` of the sample's environment.
            seed_of: Function that returns the seeds of answers.
            trains: Whether the policy is trained on the sample.

        Raises:
            Exception: An engine cannot answer any more, or the environment cannot be kept running.
        """


def make_program_player(
    generation: GenerationInterface,
    tokenizer: PreTrainedTokenizerBase,
    limits: RolloutLimits,
    text_rules: TextRules,
    endpoint: AgentEndpointConfig,
) -> ProgramPlayer:
    """Import and construct the player of agent environments. Its endpoint starts with the first sample.

    Raises:
        ConfigError: a package of the extra `agents` is not installed.
    """
    advice = "Install the extra `agents`; `cpu` and `vllm` bring it."
    player = import_dotted(AGENT_PLAYER, ConfigError, "The player of agent environments", advice)
    return cast(ProgramPlayer, player(generation, tokenizer, limits, text_rules, endpoint))
