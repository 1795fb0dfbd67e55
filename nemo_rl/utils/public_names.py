"""Names that modules offer to programs without importing them first, and names of features that are not built yet.

A name is imported from its home when it is first used, so a public path may lead to any layer and costs nothing until
then. Invariant: a public name of NeMo RL either works or says to which feature it belongs (`NOT_BUILT`).
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from typing import Any

from nemo_rl.utils.errors import NotBuiltError

_GYM = ("NeMo-Gym", ())
_SINGLE_CONTROLLER = ("the single controller (async)", ())

NOT_BUILT: dict[str, tuple[str, tuple[str, ...]]] = {
    "nemo_rl.algorithms.async_utils": ("async GRPO", ()),
    "nemo_rl.algorithms.grpo": ("async GRPO", ("async_grpo_train", "AsyncGRPOConfig")),
    "nemo_rl.algorithms.grpo_sync": ("the data plane", ()),
    "nemo_rl.algorithms.ppo": ("PPO", ()),
    "nemo_rl.algorithms.single_controller": _SINGLE_CONTROLLER,
    "nemo_rl.algorithms.single_controller_utils": _SINGLE_CONTROLLER,
    "nemo_rl.algorithms.xtoken_off_policy_distillation": ("cross-tokenizer distillation", ()),
    "nemo_rl.data.datasets.eval_datasets": ("multimodal data (VLM)", ("_is_multimodal_dataset", "MULTIMODAL_DATASETS")),
    "nemo_rl.data.multimodal_utils": ("multimodal data (VLM)", ()),
    "nemo_rl.environments.code_environment": ("the code environment", ()),
    "nemo_rl.environments.code_jaccard_environment": ("the code environment", ()),
    "nemo_rl.environments.games": ("the sliding puzzle", ()),
    "nemo_rl.environments.nemo_gym": _GYM,
    "nemo_rl.environments.reward_model_environment": ("the reward-model environment", ()),
    "nemo_rl.experience.rollouts": (_GYM[0], ("run_nemo_gym_rollout_sync", "run_async_nemo_gym_rollout")),
    "nemo_rl.models.generation.vllm.config": ("multimodal generation (VLM)", ()),
    "nemo_rl.models.megatron.community_import": ("conversion by Megatron Bridge", ()),
    "nemo_rl.models.policy.tq_policy": ("the data plane", ()),
    "nemo_rl.models.policy.utils": ("extension of policy workers", ()),
    "nemo_rl.models.policy.workers.dtensor_policy_worker_v2": ("extension of policy workers", ()),
    "nemo_rl.utils.checkpoint_engines": ("checkpoint engines", ()),
}
"""Module -> feature and those of its names that belong to it; no names: the whole module does."""


def public_names(module: str, homes: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """A module's `__getattr__`.

    Args:
        module: its `__name__`.
        homes: module that defines a name.

    Raises:
        AttributeError: there is no such name (when the result is called).
        NotBuiltError: it belongs to a feature that is not built yet (likewise).
    """
    known = homes or {}

    def find(name: str) -> Any:
        if name in known:
            value = getattr(importlib.import_module(known[name]), name)
            setattr(sys.modules[module], name, value)
            return value
        feature, names = NOT_BUILT.get(module, ("", ()))
        if name in names:
            raise NotBuiltError(f"{module}.{name} belongs to {feature}, which is not built yet.")
        offered = f"; it has {', '.join(known)}" if known else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{offered}")

    return find


class _NotBuiltFinder(MetaPathFinder):
    """Asked last for modules that nobody found: says what a module of NeMo RL belongs to."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        feature, names = NOT_BUILT.get(fullname, ("", ()))
        if feature and not names:
            raise NotBuiltError(f"{fullname} belongs to {feature}, which is not built yet.", name=fullname)


def explain_missing_modules() -> None:
    """Let imports of modules in `NOT_BUILT` say so; once in a process."""
    if not any(isinstance(finder, _NotBuiltFinder) for finder in sys.meta_path):
        sys.meta_path.append(_NotBuiltFinder())
