"""Keep the import paths of NeMo RL for names and modules that have another place here or are not built yet.

A name is imported from its module when it is first used, so a public path may lead to any layer, and its import costs
nothing until then. `MOVED` names modules that have another path here; both paths lead to the same module. Invariant: a
public name of NeMo RL either works, or raises an error that names its feature (`NOT_BUILT`) or its replacement
(`ELSEWHERE`, `OTHER_NAMES`).
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from nemo_rl.utils.errors import NotBuiltError

_SINGLE_CONTROLLER = ("the single controller (async)", ())
_VISION = "multimodal data (VLM)"

NOT_BUILT: dict[str, tuple[str, tuple[str, ...]]] = {
    "nemo_rl.algorithms.grpo_sync": ("the data plane", ()),
    "nemo_rl.algorithms.single_controller": _SINGLE_CONTROLLER,
    "nemo_rl.algorithms.single_controller_utils": _SINGLE_CONTROLLER,
    "nemo_rl.data.dataloader": ("one data loader per data set", ()),
    "nemo_rl.data.datasets.eval_datasets": (_VISION, ("_is_multimodal_dataset", "MULTIMODAL_DATASETS")),
    "nemo_rl.data.multimodal_utils": (_VISION, ()),
    "nemo_rl.data_plane": ("the data plane", ()),
    "nemo_rl.environments.rewards": (_VISION, ()),
    "nemo_rl.experience.rollouts": (
        "rollouts of NeMo-Gym besides env.nemo_gym",
        ("run_nemo_gym_rollout_sync", "run_async_nemo_gym_rollout"),
    ),
    "nemo_rl.models.generation.dynamo": ("the generation backend dynamo", ()),
    "nemo_rl.models.generation.sglang": ("the class of SGLang's engines", ("SGLangGeneration",)),
    "nemo_rl.models.generation.sglang.sglang_generation": ("the class of SGLang's engines", ()),
    "nemo_rl.models.generation.trtllm": ("the generation backend trtllm", ()),
    "nemo_rl.models.generation.vllm.config": ("multimodal generation (VLM)", ()),
    "nemo_rl.models.megatron.community_import": ("conversion by Megatron Bridge", ()),
    "nemo_rl.models.policy.tq_policy": ("the data plane", ()),
    "nemo_rl.models.policy.utils": ("extension of policy workers", ()),
    "nemo_rl.models.policy.workers.dtensor_policy_worker_v2": ("extension of policy workers", ()),
    "nemo_rl.utils.checkpoint_engines": ("checkpoint engines", ()),
    "nemo_rl.utils.memory_tracker": ("the record of host memory by stage", ()),
    "nemo_rl.utils.nsys": ("profiling with Nsight Systems", ()),
}
"""Feature that a module of NeMo RL belongs to, and the module's names that belong to it. No names mean all names."""

ELSEWHERE: dict[str, str] = {
    "nemo_rl.models.value": "a critic is a Policy (nemo_rl.models.policy.lm_policy) with reward_model_cfg.enabled, "
    "which has get_values",
    "nemo_rl.algorithms.async_utils": "grpo.overlap.mode=ahead, or grpo.async_grpo.enabled=true, samples while the "
    "policy trains; nemo_rl.algorithms.rollout.ahead does it",
    "nemo_rl.algorithms.interfaces": "import LossFunction and LossType from nemo_rl.algorithms.loss.interfaces",
    "nemo_rl.algorithms.logits_sampling_utils": "nemo_rl.distributed.parallel_logprobs has apply_top_k_top_p",
    "nemo_rl.algorithms.loss.utils": "a loss receives its input prepared, in the form that its input_type names "
    "(nemo_rl.algorithms.loss.interfaces)",
    "nemo_rl.algorithms.loss.wrapper": "packed rows are unpacked before a loss gets them, so no wrapper is needed",
    "nemo_rl.algorithms.loss_functions": "import losses from nemo_rl.algorithms.loss; they are called with "
    "log-probabilities, as in NeMo RL from 0.6 on",
    "nemo_rl.algorithms.x_token": "nemo_rl.losses.cross_tokenizer compares models with different tokenizers",
    "nemo_rl.algorithms.xtoken_off_policy_distillation": "nemo_rl.algorithms.sft distils on written texts if the "
    "configuration has the section teacher",
    "nemo_rl.data.chat_templates": "set the template itself, or a .jinja file, as policy.tokenizer.chat_template",
    "nemo_rl.distributed.model_utils": "nemo_rl.distributed.parallel_logprobs has log-probabilities of divided logits",
    "nemo_rl.distributed.worker_group_utils": "options of workers are configuration keys (cluster, env_vars)",
    "nemo_rl.environments.dapo_math_verifier": "use env.math.math_verify_impl: dapo_math_verify, or "
    "nemo_rl.environments.grading.dapo",
    "nemo_rl.evals.answer_parsing": "use env.math.verifier_type: multilingual_multichoice, or "
    "nemo_rl.environments.grading.multichoice",
    "nemo_rl.experience.metric_utils": "metrics of rollouts are computed in nemo_rl.experience.metrics",
    "nemo_rl.models.generation.vllm.patches": "vLLM's files are not patched; the library's changes are in "
    "nemo_rl.models.generation.vllm, and options go through policy.generation.vllm_kwargs",
    "nemo_rl.models.generation.vllm.vllm_generation": "import VllmGeneration from nemo_rl.models.generation.vllm",
    "nemo_rl.models.huggingface.common": "packing is in nemo_rl.data.packing, attention over packed rows in "
    "nemo_rl.models.attention",
    "nemo_rl.utils.flops_tracker": "nemo_rl.models.huggingface.sizes counts operations (model_flops) and has the peaks "
    "of devices",
    "nemo_rl.utils.nvml": "use nemo_rl.host.machine_load, or torch.cuda",
    "nemo_rl.weight_sync.factory": "refit_policy_generation (nemo_rl.algorithms.grpo) moves weights, "
    "configured by policy.generation.weight_sync",
}
"""Module of NeMo RL that has another name here -> its replacement."""

_DYNAMIC_SAMPLING = (
    "{section}.use_dynamic_sampling=true draws prompts until enough of them have differing rewards; the source of "
    "groups that does it is nemo_rl.algorithms.rollout.source.DynamicSampling"
)

OTHER_NAMES: dict[str, dict[str, str]] = {
    f"nemo_rl.algorithms.{section}": {"dynamic_sampling": _DYNAMIC_SAMPLING.format(section=section)}
    for section in ("grpo", "ppo")
}
"""Replacements for names of NeMo RL that have no function of the same name here, by module and name."""

MOVED: dict[str, str] = {
    "nemo_rl.environments.code_environment": "nemo_rl.kits.code.environment",
    "nemo_rl.environments.code_jaccard_environment": "nemo_rl.kits.code.jaccard",
    "nemo_rl.environments.games": "nemo_rl.kits.games",
    "nemo_rl.environments.nemo_gym": "nemo_rl.agents.nemo_gym",
    "nemo_rl.environments.reward_model_environment": "nemo_rl.kits.judges.reward_model",
    "nemo_rl.environments.tools": "nemo_rl.kits.tools",
}
"""Path of a module or a package in NeMo RL -> its path here. Modules of a package move with the package."""

_ENGINES_OF_CHECKPOINTS = "checkpoint_engine"
"""Part of the names of modules for checkpoint engines in all packages."""


def public_names(module: str, homes: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Make a module's `__getattr__`.

    Args:
        homes: name -> module that defines it.

    Raises:
        AttributeError: there is no such name (raised by the returned function).
        NotBuiltError: the name belongs to a feature that is not built yet, or is another one here (raised by the
            returned function).
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
        if name in OTHER_NAMES.get(module, {}):
            raise NotBuiltError(f"there is no {module}.{name} here: {OTHER_NAMES[module][name]}.")
        offered = f"; it has {', '.join(known)}" if known else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{offered}")

    return find


class _MovedModule(Loader):
    """Load the module at the path here, for a path of NeMo RL in `MOVED`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._path)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has set the other path's spec


class _MovedFinder(MetaPathFinder):
    """Find modules of `MOVED`.

    It comes first, because other finders would search a moved package for its modules and load them a second time.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith("nemo_rl."):
            return None  # the import system asks for every module
        for old, new in MOVED.items():
            if fullname == old or fullname.startswith(f"{old}."):
                return ModuleSpec(fullname, _MovedModule(new + fullname.removeprefix(old)))
        return None


class _NotBuiltFinder(MetaPathFinder):
    """Last finder of modules. It raises an error that names the feature of a missing module of NeMo RL."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        feature, names = NOT_BUILT.get(fullname, ("", ()))
        if fullname in ELSEWHERE:
            raise NotBuiltError(f"there is no {fullname} here: {ELSEWHERE[fullname]}.", name=fullname)
        if fullname.startswith("nemo_rl.") and _ENGINES_OF_CHECKPOINTS in fullname.rpartition(".")[2]:
            feature, names = "checkpoint engines (create_checkpoint_engine)", ()
        if feature and not names:
            raise NotBuiltError(
                f"{fullname} belongs to {feature}, which is not built yet.{_way(feature)}", name=fullname
            )


def _way(feature: str) -> str:
    """Return advice for a missing feature if another one replaces it, or else an empty text."""
    if feature.startswith("the generation backend"):
        return " Set policy.generation.backend to vllm, hf, megatron or the dotted path of a class."
    if feature.startswith("checkpoint engines"):
        return " policy.generation.weight_sync chooses how weights reach the engines."
    return ""


def install_finders() -> None:
    """Find modules of `MOVED`, and explain failed imports of `NOT_BUILT` and `ELSEWHERE`, once per process."""
    if not any(isinstance(finder, _NotBuiltFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedFinder())
        sys.meta_path.append(_NotBuiltFinder())
