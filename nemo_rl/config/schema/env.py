"""Keys of `env`: one entry for each environment of a run, by name.

Invariant: built-in environments have a schema; any other name belongs to a user's environment, which gets its mapping
unchanged. If that mapping has `function`, the environment is one of reward functions, unless the name is registered.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypedDict

from pydantic import ConfigDict, Field

from nemo_rl.config.base.section import Section
from nemo_rl.config.base.structure import NamedSections
from nemo_rl.config.base.value_types import Amount, Count, Gibibytes, Number, Seconds, Workers
from nemo_rl.config.schema.agents import NEMO_GYM, AgentEnvironmentConfig, NemoGymConfig
from nemo_rl.config.schema.judges import LLMJudgeConfig, RewardModelEnvironmentConfig
from nemo_rl.config.schema.kits import (
    BlackjackConfig,
    GameSection,
    GymnasiumConfig,
    RAGEnvironmentConfig,
    ReasoningGymConfig,
    SandboxKeys,
    SlidingPuzzleEnvironmentConfig,
    TextArenaConfig,
    ToolEnvironmentConfig,
    VerifiersConfig,
)


class EnvironmentSection(Section):
    """Keys that the library reads for every environment, also for environments without a schema."""

    step_timeout_s: Seconds | None = None
    """Time limit in seconds for the environment to answer one sample; null: cluster.timeouts.environment_s."""
    max_memory_gb: Gibibytes | None = None
    """Gibibytes that an actor of the environment may use, with the processes that it started; an actor that uses more
    is ended and started again. null: no limit."""
    max_open_episodes: Count | None = None
    """Episodes of this environment that are played at the same time; null: all."""


class MathEnvironmentConfig(EnvironmentSection):
    """Comparison of the model's final answer with the known one."""

    num_workers: Workers = 8
    """Processes that check answers."""
    stop_strings: list[str] | None = None
    """Texts that end the answers this environment grades, besides policy.generation.stop_strings."""
    verifier_type: Literal["math", "english_multichoice", "multilingual_multichoice"] | None = "math"
    """Kind of comparison: as mathematics or as a choice letter."""
    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] | None = "hf_math_verify"
    """Rule for mathematics: math-verify, or DAPO's strict match."""
    timeout_s: Seconds = 10.0
    """Time limit in seconds for one answer; an answer that takes longer counts as a reward error."""


class RewardFunctionsConfig(EnvironmentSection):
    """Functions of the user that reward an answer: `reward(answer, row)`, or `reward(answers, rows)` with lists."""

    function: str | dict[str, str] | None = None
    """Dotted path of a function, or several by name, whose numbers are added; null: a program passes them."""
    weights: dict[str, Number] = Field(default_factory=dict)
    """Weight of each named function; 1 for those that are left out."""
    num_workers: Workers = 1
    """Processes that call the functions."""
    stop_strings: list[str] | None = None
    """Texts that end the answers this environment rewards, besides policy.generation.stop_strings."""


class CodeEnvironmentConfig(SandboxKeys):
    """Programs of the model, run in a sandbox and graded with tests."""

    num_workers: Workers = 8
    """Samples whose programs run at the same time."""
    terminate_on_evaluation: bool = True
    """End an episode with its first program; false: `<code>` blocks are answered with their output, and a turn without
    one ends the episode."""
    stop_strings: list[str] | None = Field(default_factory=lambda: ["</code>"])
    """Texts that end the turns of this environment, besides policy.generation.stop_strings."""
    reward: Literal["share", "all"] = "share"
    """Reward of a program: the share of the tests that it passes, or 1 only for all of them."""
    wall_time_s: Seconds = 10.0
    """Time limit in seconds: for each input, or together for all calls of the tests or all blocks of an episode."""
    cpu_time_s: Seconds = 10.0
    """Limit of processor time in seconds, for the same units as wall_time_s."""
    observation_chars: Amount = 4000
    """Longest output in an observation, in characters; the middle of a longer output is left out."""


class CodeJaccardEnvironmentConfig(Section):
    """Similarity of the model's text with a reference program, without running anything."""

    ignored: ClassVar[dict[str, str]] = {"num_workers": "the comparison is too fast to need processes"}

    stop_strings: list[str] | None = None
    """Texts that end the answers this environment grades, besides policy.generation.stop_strings."""


def stop_strings_of(environments: Mapping[str, Any], name: str | None) -> list[str] | None:
    """Return the stop strings of an environment that has a schema."""
    section = environments.get(name or "")
    graded = MathEnvironmentConfig | RewardFunctionsConfig | CodeEnvironmentConfig | CodeJaccardEnvironmentConfig
    with_turns = ToolEnvironmentConfig | RAGEnvironmentConfig | GameSection | VerifiersConfig
    if isinstance(section, graded | with_turns):
        return section.stop_strings
    return section.get("stop_strings") if section and calls_functions(name or "", section) else None


def calls_functions(name: str, section: Any) -> bool:
    """Return whether a section names reward functions: `reward`, or one of any name that is no path of a class."""
    own = isinstance(section, Mapping) and "function" in section and "." not in name
    return own or isinstance(section, RewardFunctionsConfig)


def keeps_rows(environments: Mapping[str, Any], name: str | None) -> bool:
    """Return whether an environment gets the whole row of the data set with each sample."""
    return calls_functions(name or "", environments.get(name or ""))


def output_bytes_of(environments: Mapping[str, Any], name: str | None) -> int | None:
    """Return how many bytes a program of an environment may write, or None if the environment grades no programs."""
    section = environments.get(name or "")
    return section.output_bytes if isinstance(section, CodeEnvironmentConfig) else None


class BuiltInEnvironments(TypedDict, total=False):
    """Environments with a schema."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    math: MathEnvironmentConfig
    reward: RewardFunctionsConfig
    code: CodeEnvironmentConfig
    code_jaccard: CodeJaccardEnvironmentConfig
    sliding_puzzle_game: SlidingPuzzleEnvironmentConfig
    blackjack: BlackjackConfig
    gymnasium: GymnasiumConfig
    textarena: TextArenaConfig
    reasoning_gym: ReasoningGymConfig
    verifiers: VerifiersConfig
    reward_model: RewardModelEnvironmentConfig
    llm_judge: LLMJudgeConfig
    tools: ToolEnvironmentConfig
    rag: RAGEnvironmentConfig
    agent: AgentEnvironmentConfig
    nemo_gym: NemoGymConfig


_SWITCHES = tuple(
    (key, NEMO_GYM) for key in ("should_use_nemo_gym", "should_mask_flagged_samples", "should_log_nemo_gym_responses")
)

EnvironmentMap = Annotated[dict[str, Any], NamedSections(BuiltInEnvironments, _SWITCHES)]
