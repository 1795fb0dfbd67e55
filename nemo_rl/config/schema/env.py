"""Define the keys of `env`, with one entry per environment of a run, by name.

Invariant: built-in environments have a schema. Any other name belongs to a user's environment, which gets its mapping
unchanged. If that mapping has `function` or `reward_functions`, the environment is the built-in one that has this key,
unless the name is registered.
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


class ImageRewardConfig(Section):
    """One of the rewards of an answer about images."""

    name: Literal["format", "exact_alnum", "math_expr", "bbox_giou", "geo3k"]
    """format: blocks of thinking and answer; exact_alnum: letters and digits of the answer; math_expr: the answer as
    mathematics; bbox_giou: overlap of two boxes; geo3k: the last \\boxed{} as mathematics."""
    weight: Number = 1.0
    """Weight of the reward. The weights of a list are divided by their sum."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reward: think_tag and answer_tag (format), answer_tag (exact_alnum), tag (math_expr),
    giou_penalty_thres and answer_tag (bbox_giou), format_score (geo3k)."""


class VLMEnvironmentConfig(EnvironmentSection):
    """Questions about images, rewarded by a weighted sum of functions."""

    num_workers: Workers = 8
    """Number of processes that compare answers as mathematics. They start when there is something to compare."""
    stop_strings: list[str] | None = None
    """Texts that end the answers that this environment rewards, besides policy.generation.stop_strings."""
    reward_functions: list[ImageRewardConfig] = Field(default_factory=list)
    """Rewards that are added with their weights. Required."""
    timeout_s: Seconds = 10.0
    """Time limit in seconds for one comparison. An answer that takes longer is a reward error."""


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
    rewarded = MathEnvironmentConfig | RewardFunctionsConfig | VLMEnvironmentConfig
    graded = CodeEnvironmentConfig | CodeJaccardEnvironmentConfig
    with_turns = ToolEnvironmentConfig | RAGEnvironmentConfig | GameSection | VerifiersConfig
    if isinstance(section, rewarded | graded | with_turns):
        return section.stop_strings
    return section.get("stop_strings") if section and kind_by_keys(name or "", section) else None


_KINDS: dict[str, tuple[str, type[EnvironmentSection]]] = {
    "function": ("reward", RewardFunctionsConfig),
    "reward_functions": ("vlm", VLMEnvironmentConfig),
}
"""Built-in environments that a section under any name can mean, with their schema, by the key that says so."""


def kind_by_keys(name: str, section: Any) -> str | None:
    """Return the built-in environment that a section means by its keys. None if its name or its type says more."""
    if "." in name or not isinstance(section, Mapping):
        return None
    return next((kind for key, (kind, _) in _KINDS.items() if key in section), None)


def may_have_key(name: str, key: str, section: Any) -> bool:
    """Return whether a section under a free name means a built-in environment, or will mean it, that has this key."""
    kind = kind_by_keys(name, section)
    return key in _KINDS or any(kind == of and key in schema.model_fields for of, schema in _KINDS.values())


def calls_functions(name: str, section: Any) -> bool:
    """Return whether a section names reward functions: `reward`, or any name that is not the path of a class."""
    return kind_by_keys(name, section) == "reward" or isinstance(section, RewardFunctionsConfig)


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
    vlm: VLMEnvironmentConfig
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
