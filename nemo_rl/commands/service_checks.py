"""List the checks before a service starts, the cheapest first, for `serve`, `serve --dry-run` and `nemo_rl doctor`.

    serve        makes all except that of the memory, before any process starts
    --dry-run    makes all and shows what they found
    doctor       makes all, each with a deadline

Invariant: as those of a run (`launch.checks`), a check starts nothing, and it raises what the start would raise.
"""

from pathlib import Path

from nemo_rl.algorithms.setup.memory_forecast import forecast_memory, memory_of_a_rank
from nemo_rl.config import RunConfig
from nemo_rl.config.rules.models import trust_models
from nemo_rl.config.runs.service import ServiceMasterConfig
from nemo_rl.launch.checks import CHECKS, Passed, Request, RunCheck, writable_folder
from nemo_rl.models.capacity.hub_configs import with_local_configs
from nemo_rl.serving.models import check_served
from nemo_rl.serving.state import LOCK_S
from nemo_rl.serving.store.base import check_folder, check_unused
from nemo_rl.serving.store.keys import KeyBook
from nemo_rl.utils.addresses import http_address, listener_of
from nemo_rl.utils.errors import ResourceInsufficientError

_OF_RUNS = ("devices", "packages", "ray", "model")
"""Checks of runs that services share."""
MEMORY = "memory"


def check_before_start(config: ServiceMasterConfig) -> None:
    """Make the checks of a start.

    Raises:
        ConfigError: the service cannot start. The message names the key.
        CheckpointError: a file of the service's folder is damaged.
    """
    trust_models(config.model_keys())
    check_unused(Path(config.service.state_dir), wait_s=LOCK_S)
    for check in SERVICE_CHECKS:
        if check.name != MEMORY and not check.skipped(config):
            check.look(Request(config))


def check_users(request: Request) -> Passed:
    """Read the keys of the users."""
    file = _of_service(request.config).service.keys_file
    if file is None:
        return Passed("every key that begins with tml-")
    names = KeyBook(Path(file)).names
    return Passed(f"{len(names)} of {file}: {', '.join(names)}")


def check_folders(request: Request) -> Passed:
    """Check that the folders can be written, and that the files in them fit the base and its adapters."""
    config = _of_service(request.config)
    service = config.service
    if service.log_dir is not None:
        writable_folder(service.log_dir, "service.log_dir")
    folder = writable_folder(service.state_dir, "service.state_dir")
    check_folder(folder, config.policy, service.max_rank)
    return Passed(str(folder))


def check_adapters(request: Request) -> Passed:
    """Check that the ranks and the engine compute adapters of the base model."""
    local = with_local_configs(request.config)
    check_served(local.policy, local.cluster, _of_service(request.config).service.fused_models)
    return Passed(f"the ranks train them, and the engine {local.policy.sampling.backend} samples with them")


def check_service_memory(request: Request) -> Passed:
    """Compare the memory of the base with as many adapters and samplers as are allowed with that of a device."""
    config = request.config
    available = memory_of_a_rank(config.cluster, request.gpu_bytes, request.host_bytes)
    if available is None:
        return Passed("the memory of the devices is not known here; set cluster.gpu_memory_gb to compare with it")
    forecast = forecast_memory(with_local_configs(config), available)
    if forecast.shortfalls:
        raise ResourceInsufficientError(
            f"{' '.join(forecast.shortfalls)} Fewer adapters need less (service.max_resident_models, "
            "service.max_resident_samplers, service.max_rank)."
        )
    told = [f"{group}: {plan.peak / 2**30:.3g} GiB at most" for group, plan in forecast.groups.items()]
    return Passed(f"{'; '.join(told)}; there are {available / 2**30:.3g} GiB", {"bytes_for_a_rank": available})


def check_address(request: Request) -> Passed:
    """Check that the port is free."""
    service = _of_service(request.config).service
    listener_of("service", service.host, service.port).close()
    return Passed(f"{http_address(service.host.strip('[]'), service.port)} is free")


def _of_service(config: RunConfig) -> ServiceMasterConfig:
    assert isinstance(config, ServiceMasterConfig), "these are the checks of a service"
    return config


SERVICE_CHECKS: tuple[RunCheck, ...] = (
    *(check for check in CHECKS if check.name in _OF_RUNS),
    RunCheck("users", check_users),
    RunCheck("folder", check_folders, of_machine=True, needs=("model",)),
    RunCheck("adapters", check_adapters, needs=("model",), deadline_s=120.0),
    RunCheck(
        MEMORY,
        check_service_memory,
        of_machine=True,
        advice="Change the keys that the message names; `nemo_rl serve --dry-run` shows the parts.",
        needs=("model", "adapters"),
        deadline_s=120.0,
    ),
    RunCheck(
        "address",
        check_address,
        of_machine=True,
        advice="End the program that uses the port, or set service.port.",
    ),
)
"""All checks of a service, in their order."""
