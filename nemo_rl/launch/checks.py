"""List the checks before a run starts, the cheapest first, for a run, `--dry-run` and `nemo_rl doctor`.

    a run       makes those of the moments FIRST and LIBRARIES (`make_checks`); `setup` of its algorithm makes the
                others, by the same functions, with the tokenizer, the data and the folders that it opens
    --dry-run   makes all that read neither tokenizers nor data, and that of the data if it is in local files; what
                checks `of_machine` find is shown and does not count, because the run may be for other machines
    doctor      makes all, each with a deadline; a failed check skips those that need it

Invariant: a check starts nothing and writes nothing, and it raises what the run would raise.
"""

import importlib
import logging
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.algorithms.setup.packages import check_packages
from nemo_rl.algorithms.setup.preflight import (
    check_agent_endpoint,
    check_backends,
    check_environments,
    check_reachable_models,
)
from nemo_rl.config import (
    EvalMasterConfig,
    MasterConfig,
    RolloutMasterConfig,
    RunConfig,
    SupervisedMasterConfig,
    check_device,
    count_gpus,
)
from nemo_rl.config.base.names import is_own_class
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.config.rules.trackers import check_trackers
from nemo_rl.distributed.cluster.address import require_cluster
from nemo_rl.distributed.cluster.start_checks import ray_folder, require_startable_ray
from nemo_rl.host.capacity import free_bytes, readable_bytes
from nemo_rl.utils.addresses import cluster_address
from nemo_rl.utils.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.algorithms.recipe import Recipe


@contextmanager
def logs_of_library() -> Iterator[list[logging.LogRecord]]:
    """Collect the library's log lines in a block, and hide them from the console and from outer collections."""
    library = logging.getLogger("nemo_rl")
    records: list[logging.LogRecord] = []
    before = library.handlers, library.propagate
    library.handlers, library.propagate = [_Collector(records)], False
    try:
        yield records
    finally:
        library.handlers, library.propagate = before


class _Collector(logging.Handler):
    """Handler that stores records."""

    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        """Store one record."""
        self._records.append(record)


def hide_warnings() -> None:
    """Hide torchdata's warning about a deprecated function that it calls itself, which users cannot change."""
    warnings.filterwarnings("ignore", message=".*set_vital.*")


def recipe_of(config: MasterConfig, *, with_data: bool = True) -> "Recipe":
    """Build the recipe of a configuration's run without starting anything.

    Args:
        config: a checked configuration.
        with_data: load the data too; otherwise `recipe.data` must not be used.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used.
    """
    from nemo_rl.algorithms.setup.user_parts import NOTHING, UserParts

    @dataclass(frozen=True)
    class WithoutData(UserParts):
        def data(self, config: MasterConfig, load: Callable[[], Any], *, sampled: bool = False) -> Any:
            return None

    name = next(name for name, schema in ALGORITHMS.items() if isinstance(config, schema))
    made: Recipe = importlib.import_module(f"nemo_rl.algorithms.{name}").recipe(
        config, NOTHING if with_data else WithoutData()
    )
    return made


class Moment(Enum):
    """The time at which a run makes a check."""

    FIRST = auto()
    """Before large libraries are imported."""
    LIBRARIES = auto()
    """As soon as torch may be imported."""
    SETUP = auto()
    """During `setup` of the algorithm, with the parts that it builds."""


@dataclass(frozen=True)
class Request:
    """Configuration and devices of the checked run."""

    config: RunConfig
    """Checked configuration."""
    gpu_bytes: float | None = None
    """Measured memory of the smallest GPU, or None for that of this machine's GPUs."""
    host_bytes: float | None = None
    """Measured memory of the smallest machine, or None for that of this machine."""


@dataclass(frozen=True)
class Passed:
    """Result of a check that raised no error."""

    found: str
    """Text of the finding."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Measured values by name with unit."""


@dataclass(frozen=True)
class RunCheck:
    """One check of a run."""

    name: str
    """Name in reports."""
    look: Callable[[Request], Passed]
    """Function that makes the check. It raises the run's own error."""
    moment: Moment = Moment.SETUP
    """Time at which a run makes the check."""
    of_machine: bool = False
    """Whether the result depends on the machine that makes the check."""
    reads_data: bool = False
    """Whether the check reads tokenizers or data, which may have to be downloaded."""
    skipped: Callable[[RunConfig], str] = lambda config: ""
    """Function that returns why the check does not apply to a configuration, or an empty text if it applies."""
    advice: str = ""
    """Advice on an error of the check, in addition to the advice in the error's message."""
    deadline_s: float = 60.0
    """Time limit of the check in seconds in the doctor."""
    needs: tuple[str, ...] = ()
    """Names of checks that must not have failed."""


def make_checks(config: RunConfig, moment: Moment, without: Collection[str] = ()) -> None:
    """Make the checks of one moment of a run, except the checks in `without`, whose parts a program passes.

    Raises:
        ConfigError: the run cannot start; raised by the first check that fails.
    """
    for check in CHECKS:
        if check.moment is moment and check.name not in without and not check.skipped(config):
            check.look(Request(config))


def check_devices(request: Request) -> Passed:
    """Compare the requested GPUs with the GPUs of this machine."""
    cluster = request.config.cluster
    check_device(request.config, count_gpus())
    ranks = cluster.policy_ranks_per_node
    return Passed(f"cluster.device={cluster.device}, {ranks} rank{'s' if ranks > 1 else ''} on each node")


def check_installed_packages(request: Request) -> Passed:
    """Check that the packages of engines and training backends are installed."""
    check_packages(request.config)
    return Passed("those of the engines and training backends are installed")


def check_ray(request: Request) -> Passed:
    """Check that the cluster answers, or that Ray can start on this machine."""
    if cluster_address() is None:
        require_startable_ray()
        return Passed(f"it can start in {ray_folder()}")
    require_cluster()
    return Passed(f"the cluster at {cluster_address()} answers")


def check_logs(request: Request) -> Passed:
    """Check that the trackers can report and the log folder can be written."""
    config = request.config
    assert isinstance(config, MasterConfig), "an evaluation has no logger"
    check_trackers(config.logger)
    return Passed(f"logs go to {writable_folder(config.logger.log_dir, 'logger.log_dir')}")


def check_model_names(request: Request) -> Passed:
    """Check that models and tokenizers exist in a folder, in the hub's cache, or on the hub."""
    check_reachable_models(request.config)
    return Passed(", ".join(dict.fromkeys(model.model_name for _, _, model in request.config.model_keys())))


def check_rewards(request: Request) -> Passed:
    """Import the environments that the data uses, and check their sections."""
    check_environments(request.config)
    return Passed(", ".join(sorted({str(name) for _, name in request.config.env_entries()})))


def check_endpoint(request: Request) -> Passed:
    """Check that programs of agents can call the model on this machine."""
    return Passed(check_agent_endpoint(request.config))


def check_mesh(request: Request) -> Passed:
    """Check that each training backend can divide its model over its ranks."""
    check_backends(request.config.models, request.config.model_cluster)
    return Passed("each model fits its ranks")


def check_engine(request: Request) -> Passed:
    """Check that the engine exists, takes its arguments and can serve the model."""
    from nemo_rl.models.generation.factory import check_engine_model

    policy = request.config.policy
    check_engine_model(policy, request.config.cluster)
    return Passed(f"{policy.sampling.backend} serves the model")


def check_parts(request: Request) -> Passed:
    """Import the loss, the advantage estimator and the rollout source, and check their arguments.

    User-defined losses and estimators are constructed; a source is not, because it needs the run's engines.
    """
    from nemo_rl.algorithms.credit.advantages import ESTIMATORS
    from nemo_rl.algorithms.rollout.source import SOURCES
    from nemo_rl.losses.loss_function import LOSSES

    parts = request.config.named_parts
    registries = {"loss_fn": LOSSES, "adv_estimator": ESTIMATORS}
    for key, part in parts.items():
        if not is_own_class(part.name):
            continue
        registry = registries.get(key.rpartition(".")[2])
        if registry is None:
            SOURCES.check_arguments(part.name, key, part.kwargs, num_given=1)
        else:
            registry.make(part.name, key, part.kwargs)
    return Passed(", ".join(f"{key} {part.name}" for key, part in parts.items()))


def check_memory(request: Request) -> Passed:
    """Compare the predicted memory of each model's ranks with the memory of the GPUs or machines.

    The check fails if the run would refuse to start; a configuration that probably does not fit is a warning.
    """
    from nemo_rl.algorithms.setup.memory_forecast import (
        log_memory,
        memory_of_a_rank,
        rows_per_sample,
        warn_of_shortfalls,
    )

    config = request.config
    assert isinstance(config, MasterConfig), "an evaluation trains nothing"
    with logs_of_library():  # the data check repeats the tokenizer's warnings
        roles = recipe_of(config, with_data=False).roles
    available = memory_of_a_rank(config.cluster, request.gpu_bytes, request.host_bytes)
    told = log_memory(config.model_cluster, roles, available, rows_per_sample(config))
    if config.cluster.uses_gpu and available is not None:
        warn_of_shortfalls(config, available, request.gpu_bytes, request.host_bytes)
    size = f"{available / 2**30:.3g} GiB" if available else "unknown"
    return Passed(f"{told}; there are {size} for a rank", {"bytes_for_a_rank": available} if available else {})


def check_checkpoints(request: Request) -> Passed:
    """Compare the free space of the checkpoint folder with the size that the training backends expect."""
    from nemo_rl.algorithms.setup.run_folders import checkpoint_sizes, require_space

    config = request.config
    assert isinstance(config, MasterConfig), "an evaluation trains nothing"
    folder = writable_folder(config.checkpointing.checkpoint_dir, "checkpointing.checkpoint_dir")
    sizes = checkpoint_sizes(config.models, config.checkpointing)
    found = f"{readable_bytes(free_bytes(folder))} free in {folder}"
    if sizes is None:
        return Passed(f"{found}; a checkpoint's size is unknown until the weights are downloaded")
    one = sum(sizes.values())
    require_space(config.checkpointing, one, len(list(folder.glob("step_*"))))
    return Passed(f"{found}, a checkpoint takes about {readable_bytes(one)}")


def check_data(request: Request) -> Passed:
    """Load tokenizer and data as the run does, render the first rows, and grade the known answers as if sampled."""
    config = request.config
    if isinstance(config, RolloutMasterConfig | SupervisedMasterConfig):
        from nemo_rl.algorithms.start import open_rows

        hide_warnings()
        recipe = recipe_of(config)
        data = recipe.data
        open_rows(config, recipe)  # refuses fewer rows than a step needs
        return Passed(f"{len(data.train)} rows to train, {len(data.validation or ())} to validate")
    from nemo_rl.evals.evaluator import check_known_answers, setup

    assert isinstance(config, EvalMasterConfig), "a run trains or evaluates"
    _, prompts, _ = setup(config)
    check_known_answers(config, prompts)
    return Passed(f"{len(prompts)} problems")


def writable_folder(path: str, key: str) -> Path:
    """Return the absolute folder if this user may create it or write into it."""
    folder = Path(path).absolute()
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return folder
    except OSError as error:
        raise ConfigError(
            f"{key}={path!r} cannot be written ({error.strerror}: {nearest}). Choose a folder that this user may write."
        ) from error


def _joins_cluster(config: RunConfig) -> str:
    return "the workers run on the cluster's nodes, see 'nodes for the run'" if cluster_address() else ""


def _trains_nothing(config: RunConfig) -> str:
    return "" if config.models else "an evaluation trains nothing"


def _saves_nothing(config: RunConfig) -> str:
    return "" if isinstance(config, MasterConfig) and config.checkpointing.enabled else "no checkpoints are written"


def _has_no_model(config: RunConfig) -> str:
    return "" if any(config.model_keys()) else "another server has the model"


def _rewards_nothing(config: RunConfig) -> str:
    return "" if any(config.env_entries()) else "nothing is rewarded"


def _samples_no_rewards(config: RunConfig) -> str:
    return _rewards_nothing(config) or ("" if config.samples else "nothing is sampled")


def _samples_nothing(config: RunConfig) -> str:
    return "" if config.samples and config.policy.generation is not None else "nothing is sampled"


CHECKS: tuple[RunCheck, ...] = (
    RunCheck(
        "devices",
        check_devices,
        Moment.FIRST,
        of_machine=True,
        skipped=_joins_cluster,
        advice="Run on a machine with GPUs, or on the CPU with an example whose name has cpu in it.",
    ),
    RunCheck("packages", check_installed_packages, Moment.FIRST, of_machine=True),
    RunCheck("ray", check_ray, Moment.FIRST, of_machine=True, needs=("cluster", "ray start")),
    RunCheck("logs", check_logs, Moment.FIRST, of_machine=True, skipped=_trains_nothing),
    RunCheck(
        "model",
        check_model_names,
        Moment.FIRST,
        of_machine=True,
        skipped=_has_no_model,
        advice="Correct the name; without a network fill the hub's cache (HF_HOME) or use a folder.",
    ),
    RunCheck("environments", check_rewards, Moment.LIBRARIES, skipped=_rewards_nothing),
    RunCheck("agent endpoint", check_endpoint, Moment.LIBRARIES, of_machine=True, skipped=_samples_no_rewards),
    RunCheck(
        "mesh",
        check_mesh,
        Moment.LIBRARIES,
        skipped=_trains_nothing,
        advice="Change the keys that the message names.",
        deadline_s=120.0,
        needs=("model",),
    ),
    RunCheck("engine", check_engine, skipped=_samples_nothing, needs=("model",)),
    RunCheck("parts", check_parts, skipped=_trains_nothing),
    RunCheck(
        "memory",
        check_memory,
        of_machine=True,
        reads_data=True,
        skipped=_trains_nothing,
        advice="Change the keys that the message names; the table shows the largest parts.",
        deadline_s=300.0,
        needs=("model",),
    ),
    RunCheck(
        "checkpoints",
        check_checkpoints,
        of_machine=True,
        skipped=_saves_nothing,
        advice="Free space, or set checkpointing.checkpoint_dir to a larger disk.",
        needs=("model",),
    ),
    RunCheck(
        "data",
        check_data,
        of_machine=True,
        reads_data=True,
        advice="Correct data.* or policy.tokenizer.*; see the guide of the algorithm.",
        deadline_s=600.0,
        needs=("model",),
    ),
)
"""All checks of a run, in their order."""
