"""Serve the newest metrics of a run to Prometheus.

Selected by `logger.prometheus`. Invariant: only this file imports prometheus_client, and a request is answered with
numbers in memory, so a slow reader never delays training.

    train/loss                  nemo_rl_train_loss
    ray/node.0.gpu.1.util       nemo_rl_ray_gpu_util{node="0",gpu="1"}
    generation/engine.2.x       nemo_rl_generation_engine_x{engine="2"}
"""

import errno
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any, override

from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from nemo_rl.config import PrometheusConfig
from nemo_rl.host.guarded_http import ConnectionGuard
from nemo_rl.utils.addresses import bound_socket
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.log_backends.tracker import LoggerInterface, Metrics, full_name, to_scalars

logger = logging.getLogger(__name__)

_PREFIX = "nemo_rl"
_CLOSE_S = 3.0
_NUMBERED = re.compile(r"\b(node|gpu|engine)\.(\d+)\.")
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]+")

_REASONS: dict[int | None, str] = {
    errno.EADDRINUSE: "Another program has the port",
    errno.EACCES: "This user may not serve the port: those below 1024 are often kept for the system",
}
_WHOLE = ("ray",)
"""Groups whose values are all logged each time. A value that is missing belongs to a node or a GPU that is lost."""

type Labels = tuple[tuple[str, str], ...]


def exported_name(metric: str) -> tuple[str, Labels]:
    """Return the name and the labels under which a metric `<prefix>/<name>` is served."""
    labels = tuple((kind, number) for kind, number in _NUMBERED.findall(metric))
    # A node, a GPU and an engine have metrics of the same name, so the last of them stays in the name.
    kinds = [kind for kind, _ in labels]
    plain = _NUMBERED.sub(lambda found: f"{found[1]}_" if found[1] == kinds[-1] else "", metric)
    return f"{_PREFIX}_{_NOT_IN_A_NAME.sub('_', plain).strip('_')}", labels


class PrometheusLogger(LoggerInterface):
    """Serve `http://<host>:<port>/metrics` until the logger is closed.

    Raises:
        ConfigError: the address cannot be served.
    """

    shows_repeated = True

    def __init__(self, cfg: PrometheusConfig):
        self._newest = _Newest()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._newest)
        try:
            listener = bound_socket(cfg.host, cfg.port)
        except (OSError, OverflowError, ValueError, TypeError) as error:
            reason = _REASONS.get(getattr(error, "errno", None), "host has to be an address of this machine")
            raise ConfigError(
                f"logger.prometheus: {cfg.host}:{cfg.port} cannot be served ({error}). {reason}; "
                "choose another logger.prometheus.port, 0 for a free one, or set logger.prometheus.enabled=false."
            ) from error
        self.port: int = listener.getsockname()[1]
        """Served port, also if the section requests a free one."""
        self._server = ConnectionGuard().server(make_asgi_app(registry), lifespan="off", timeout_graceful_shutdown=1)
        arguments = {"sockets": [listener]}
        self._thread = threading.Thread(target=self._server.run, kwargs=arguments, name="prometheus", daemon=True)
        self._thread.start()
        logger.info("Metrics for Prometheus: http://%s:%d/metrics", cfg.host, self.port)

    @override
    def log_metrics(
        self, metrics: Metrics, step: int, prefix: str = "", step_metric: str | None = None, step_finished: bool = False
    ) -> None:
        found = {exported_name(full_name(prefix, name)): value for name, value in to_scalars(metrics).items()}
        group = _NOT_IN_A_NAME.sub("_", prefix or "other")
        values = found | {(f"{_PREFIX}_step", (("group", group),)): float(step)}
        self._newest.add(values, whole=prefix if prefix in _WHOLE else None)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Do nothing, because a configuration is not a number."""

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        self._thread.join(_CLOSE_S)


class _Newest(Collector):
    """Newest value of each metric."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._values: dict[tuple[str, Labels], float] = {}
        self._of_whole: dict[str, frozenset[tuple[str, Labels]]] = {}

    def add(self, values: Mapping[tuple[str, Labels], float], *, whole: str | None = None) -> None:
        """Take the values of a group of metrics, and let a `whole` group replace all its earlier values."""
        with self._guard:
            if whole is not None:
                for gone in self._of_whole.get(whole, frozenset()) - values.keys():
                    self._values.pop(gone, None)
                self._of_whole[whole] = frozenset(values)
            self._values |= values

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each name, with samples that may differ in their labels."""
        with self._guard:
            values = dict(self._values)
        families: dict[str, Metric] = {}
        for (name, labels), value in values.items():
            families.setdefault(name, Metric(name, "", "gauge")).add_sample(name, dict(labels), value)
        yield from families.values()
