"""Find the environment that a name stands for, and start it.

Users import these functions from `environments.utils`. Invariant: a name leads to exactly one class, and a wrong name
is refused before anything starts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from pydantic import BaseModel

from nemo_rl.config.schema.env import kind_by_keys
from nemo_rl.distributed.ray_actor_environment_registry import make_actor_runtime_env
from nemo_rl.environments.workers.loading import ENVIRONMENTS, load_env_class, own_keys, section_of, worker_keys
from nemo_rl.environments.workers.start import Environment, start_workers
from nemo_rl.utils.errors import ConfigError, SandboxError
from nemo_rl.utils.named_parts import check_own_keys

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import TokenizerType

DEFAULT_STEP_TIMEOUT_S = 600.0


class EnvRegistryEntry(TypedDict):
    """Location of the class of a named environment."""

    actor_class_fqn: str
    """Dotted path of the environment's class."""
    default_processor: NotRequired[str]
    """Name of the data processor that the environment's samples usually need."""


_MATH = "nemo_rl.environments.math_environment"
_GAMES = "nemo_rl.kits.games"
_ADAPTERS = "nemo_rl.kits.adapters"
_TOOLS = "nemo_rl.kits.tools"

ENV_REGISTRY: dict[str, EnvRegistryEntry] = {
    "math": {"actor_class_fqn": f"{_MATH}.MathEnvironment"},
    "reward": {"actor_class_fqn": "nemo_rl.environments.reward_functions.RewardEnvironment"},
    **dict.fromkeys(
        ("vlm", "clevr-cogent", "geometry3k", "refcoco"),
        EnvRegistryEntry(actor_class_fqn="nemo_rl.environments.vlm_environment.VLMEnvironment"),
    ),
    "math_default": {"actor_class_fqn": f"{_MATH}.MathEnvironment"},
    "math_multi_reward": {"actor_class_fqn": f"{_MATH}.MathMultiRewardEnvironment"},
    "code": {"actor_class_fqn": "nemo_rl.kits.code.environment.CodeEnvironment"},
    "code_jaccard": {"actor_class_fqn": "nemo_rl.kits.code.jaccard.CodeJaccardEnvironment"},
    "sliding_puzzle_game": {"actor_class_fqn": f"{_GAMES}.sliding_puzzle.SlidingPuzzleEnv"},
    "blackjack": {"actor_class_fqn": f"{_GAMES}.blackjack.BlackjackEnv"},
    "gymnasium": {"actor_class_fqn": f"{_ADAPTERS}.gymnasium.GymnasiumEnvironment"},
    "textarena": {"actor_class_fqn": f"{_ADAPTERS}.textarena.TextArenaEnvironment"},
    "reasoning_gym": {"actor_class_fqn": f"{_ADAPTERS}.reasoning_gym.ReasoningGymEnvironment"},
    "verifiers": {"actor_class_fqn": "nemo_rl.agents.verifiers.VerifiersEnvironment"},
    "reward_model": {
        "actor_class_fqn": "nemo_rl.kits.judges.reward_model.RewardModelEnvironment",
    },
    "llm_judge": {"actor_class_fqn": "nemo_rl.kits.judges.llm_judge.LLMJudgeEnvironment"},
    "rag": {"actor_class_fqn": f"{_TOOLS}.retriever.RAGEnvironment"},
    "tools": {"actor_class_fqn": f"{_TOOLS}.environment.ToolEnvironment"},
    "agent": {"actor_class_fqn": "nemo_rl.agents.programs.environment.AgentEnvironment"},
    "nemo_gym": {
        "actor_class_fqn": "nemo_rl.agents.nemo_gym.environment.NemoGym",
        "default_processor": "nemo_gym_data_processor",
    },
}


def register_env(env_name: str, actor_class_fqn: str) -> None:
    """Register an environment class under a name.

    Args:
        actor_class_fqn: Dotted path of the class; imported when the environment is created.

    Raises:
        ConfigError: The name already leads to another class.
    """
    known = ENV_REGISTRY.get(env_name)
    if known is not None and known["actor_class_fqn"] != actor_class_fqn:
        raise ConfigError(
            f"environment name {env_name!r} already leads to {known['actor_class_fqn']}, so it "
            f"cannot lead to {actor_class_fqn}; choose another name."
        )
    ENV_REGISTRY[env_name] = {"actor_class_fqn": actor_class_fqn}


def env_class_path(env_name: str, section: Mapping[str, Any] | BaseModel | None = None) -> str:
    """Return the dotted path of an environment's class, which is the name itself if the name has dots.

    Args:
        env_name: A registered name, a dotted path, or any name if the section has `function` or
            `reward_functions`.
        section: Its section of `env`.

    Raises:
        ConfigError: The name is neither registered nor dotted. The message suggests the most similar name.
    """
    known = {name: entry["actor_class_fqn"] for name, entry in ENV_REGISTRY.items()}
    if env_name not in known and section is not None:
        env_name = kind_by_keys(env_name, section_of(section)) or env_name
    return replace(ENVIRONMENTS, built_in=known).path_of(env_name)


def check_environment(
    env_name: str,
    env_config: Mapping[str, Any] | BaseModel,
    tokenizer: "TokenizerType | None" = None,
    *,
    construct: bool = True,
    name_key: str = "",
    place: str = "",
) -> None:
    """Check an environment and its section as far as that is possible without starting it.

    Args:
        env_name: Name as in `env_class_path`.
        tokenizer: Tokenizer of the policy, or None in checks that read neither tokenizers nor data.
        construct: Whether to let the class check what its constructor needs; False if another Python has its packages.
        name_key: Key that has the name, for messages. If it is empty, the name is a part of `place`.
        place: Key of the section. If it is empty, the key is `env.<name>`.

    Raises:
        ConfigError: The name or a key of the section cannot be used.
    """
    place = place or f"env.{env_name}"
    section = section_of(env_config)
    worker_keys(place.removeprefix("env."), section, DEFAULT_STEP_TIMEOUT_S)
    try:
        env_class, _ = load_env_class(env_class_path(env_name, section))
    except ConfigError as error:
        raise ConfigError(f"{name_key}={env_name!r}: {error}" if name_key else str(error)) from error
    own = own_keys(section, env_class.config_class)
    check_own_keys(env_class, place, own)
    if not construct:
        return
    try:
        env_class.check_section(own, place, tokenizer)
    except SandboxError as error:
        raise ConfigError(f"{place}: {error}") from error


def create_env(
    env_name: str,
    env_config: Mapping[str, Any] | BaseModel,
    *,
    step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
    max_restarts: int = 10,
) -> Environment:
    """Start the environment that a name stands for in its own actor, without waiting until it is ready.

    Args:
        env_name: Name as in `env_class_path`.
        env_config: Its section of the configuration; the class is constructed with it as a dict.
        step_timeout_s: Deadline of one step if the section has none (`cluster.timeouts.environment_s`).
        max_restarts: Largest number of restarts of the actor (`cluster.max_actor_restarts`).

    Returns:
        The client for rollouts. Ray must be initialised.

    Raises:
        ConfigError: The name is unknown, or its class cannot be imported or is not an environment.
    """
    cfg = section_of(env_config)
    path = env_class_path(env_name, cfg)
    return start_workers(
        env_name,
        path,
        cfg,
        worker_keys(env_name, cfg, step_timeout_s),
        max_restarts=max_restarts,
        runtime_env=make_actor_runtime_env(path),
    )
