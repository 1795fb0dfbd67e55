"""Define the keys of `env`, with one entry per environment of a run, by name.

Invariant: built-in environments have a schema. Any other name belongs to a user's environment, which gets its mapping
unchanged. If that mapping has `function`, the environment consists of reward functions, unless the name is registered.
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
    GraderConfig,
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
    """Keys that the library reads for every environment, including those without a schema."""

    step_timeout_s: Seconds | None = None
    """Time limit in seconds for the environment to answer one sample; null: cluster.timeouts.environment_s."""
    max_memory_gb: Gibibytes | None = None
    """Gibibytes that an actor of the environment may use, including the processes that it started. An actor that uses
    more is restarted. null: no limit."""
    max_open_episodes: Count | None = None
    """Number of episodes of this environment that are played at the same time; null: all."""


class MathEnvironmentConfig(EnvironmentSection):
    """Comparison of the model's final answer with the known one."""

    num_workers: Workers = 8
    """Number of processes that check answers."""
    stop_strings: list[str] | None = None
    """Texts that end the answers that this environment grades, besides policy.generation.stop_strings."""
    verifier_type: Literal["math", "english_multichoice", "multilingual_multichoice"] | None = "math"
    """Kind of comparison: as mathematics, or as the letter of a choice."""
    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] | None = "hf_math_verify"
    """Rule for mathematics: math-verify, or DAPO's strict comparison."""
    timeout_s: Seconds = 10.0
    """Time limit in seconds for one answer. An answer that takes longer is a reward error."""


class RewardFunctionsConfig(EnvironmentSection):
    """User-defined functions that reward answers: `reward(answer, row)`, or `reward(answers, rows)` with lists."""

    function: str | dict[str, str] | None = None
    """Dotted path of a function, or of several by name, whose results are added; null: a program passes them."""
    weights: dict[str, Number] = Field(default_factory=dict)
    """Weight of each named function. Omitted functions have the weight 1."""
    num_workers: Workers = 1
    """Number of processes that call the functions."""
    stop_strings: list[str] | None = None
    """Texts that end the answers that this environment rewards, besides policy.generation.stop_strings."""


class CodeEnvironmentConfig(SandboxKeys):
    """Programs written by the model, run in a sandbox and graded with tests."""

    num_workers: Workers = 8
    """Number of samples whose programs run at the same time."""
    terminate_on_evaluation: bool = True
    """End an episode with its first program; false: the output of `<code>` blocks is returned to the model, and a turn
    without a block ends the episode."""
    stop_strings: list[str] | None = Field(default_factory=lambda: ["</code>"])
    """Texts that end the turns of this environment, besides policy.generation.stop_strings."""
    reward: Literal["share", "all"] = "share"
    """Reward of a program: the share of tests that it passes, or 1 only if it passes all."""
    wall_time_s: Seconds = 10.0
    """Time limit in seconds: for each input, or for all calls of the tests or all blocks of an episode together."""
    cpu_time_s: Seconds = 10.0
    """Limit of processor time in seconds, for the same units as wall_time_s."""
    observation_chars: Amount = 4000
    """Largest number of characters of output in an observation. The middle of a longer output is left out."""


class CodeJaccardEnvironmentConfig(Section):
    """Similarity of the model's text to a reference program. Nothing is run."""

    ignored: ClassVar[dict[str, str]] = {"num_workers": "the comparison is too fast to need processes"}

    stop_strings: list[str] | None = None
    """Texts that end the answers that this environment grades, besides policy.generation.stop_strings."""


def stop_strings_of(environments: Mapping[str, Any], name: str | None) -> list[str] | None:
    """Return the stop strings of an environment that has a schema."""
    section = environments.get(name or "")
    graded = MathEnvironmentConfig | RewardFunctionsConfig | CodeEnvironmentConfig | CodeJaccardEnvironmentConfig
    with_turns = ToolEnvironmentConfig | RAGEnvironmentConfig | GameSection | VerifiersConfig
    if isinstance(section, graded | with_turns):
        return section.stop_strings
    return section.get("stop_strings") if section and calls_functions(name or "", section) else None


def calls_functions(name: str, section: Any) -> bool:
    """Return whether a section names reward functions: `reward`, or any name that is not the path of a class."""
    own = isinstance(section, Mapping) and "function" in section and "." not in name
    return own or isinstance(section, RewardFunctionsConfig)


def keeps_rows(environments: Mapping[str, Any], name: str | None) -> bool:
    """Return whether an environment, or its grader, gets the whole row of the data set with each sample."""
    section = environments.get(name or "")
    grader = getattr(section, "grader", None)
    of_grader = isinstance(grader, GraderConfig) and calls_functions(grader.name, grader.kwargs)
    return of_grader or calls_functions(name or "", section)


def output_bytes_of(environments: Mapping[str, Any], name: str | None) -> int | None:
    """Return the number of bytes that a program of an environment may write. None if it does not grade programs."""
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
