"""Start an SGLang server as a child of this process, or find servers that are already running, and call them.

Invariant: each call ends within its deadline, with an answer or an error that names the server.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import httpx

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.config.schema.model.generation import SglangConfig
from nemo_rl.distributed.ranks.rendezvous import bind_free_port
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.remote.connection import EndpointConnection, EndpointError
from nemo_rl.utils.addresses import http_address
from nemo_rl.utils.errors import ConfigError, WorkerDiedError

_START_S = 1800.0
_POLL_S = 0.25
_CALL_S = 600.0
_END_S = 20.0
_LARGEST_BYTES = 256 << 20
_DEATH_OF_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
_ORIGINAL = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""Environment variable that makes SGLang report log-probabilities before the temperature is applied."""


class SglangServer:
    """One server, or the servers of a router, for one event loop.

    Args:
        settings: Settings of the engine. `engine_kwargs["sglang_cfg"]` has the section `sglang_cfg`.

    Raises:
        ConfigError: The server did not start.
    """

    def __init__(self, settings: EngineSettings) -> None:
        config: SglangConfig = settings.engine_kwargs["sglang_cfg"]
        router = config.sglang_router_config
        self._process: subprocess.Popen[bytes] | None = None
        if router.use_external_router:
            self.url = http_address(str(router.sglang_router_ip), int(router.sglang_router_port or 0))
        else:
            self.url = self._start(settings, config)
        answer_s = float(router.sglang_router_request_timeout_secs or _CALL_S)
        limit = config.sglang_server_config.sglang_server_concurrency + 8
        self._answers = self._connection(self.url, answer_s, limit)
        self._controls: list[EndpointConnection] | None = None

    def _connection(self, url: str, timeout_s: float, limit: int) -> EndpointConnection:
        key = "policy.generation.sglang_cfg.sglang_router_config.sglang_router_request_timeout_secs"
        return EndpointConnection("the SGLang server", url, None, timeout_s, key, limit, _LARGEST_BYTES)

    def _start(self, settings: EngineSettings, config: SglangConfig) -> str:
        listener = bind_free_port("127.0.0.1", None, None)
        port = listener.getsockname()[1]
        listener.close()
        command = [sys.executable, "-P", "-m", "sglang.launch_server", *server_arguments(settings, config, port)]
        environment = {name: value for name, value in os.environ.items() if name != _ORIGINAL}
        self._process = subprocess.Popen(command, env=environment, preexec_fn=_die_with_parent)
        url, end = http_address("127.0.0.1", port), time.monotonic() + _START_S
        while not _is_healthy(url):
            if self._process.poll() is not None:
                raise ConfigError(
                    f"the SGLang server ended with status {self._process.returncode} before it answered; its log is "
                    f"above. Its command: {' '.join(command)}"
                )
            if time.monotonic() > end:
                self.end()
                raise ConfigError(f"the SGLang server at {url} did not answer in {_START_S:g} s.")
            time.sleep(_POLL_S)
        return url

    async def answer(self, body: Mapping[str, Any]) -> Any:
        """Send a request to `/generate`.

        Raises:
            EndpointError: the server refuses the request.
            WorkerDiedError: the server does not answer.
        """
        return await self._ask(self._answers, "POST", "generate", body)

    async def tell(self, path: str, body: Mapping[str, Any] | None = None) -> list[Any]:
        """Call every server, or every server of the router, and return the answers.

        Raises:
            WorkerDiedError: a server does not answer or reports a failure.
        """
        if self._controls is None:
            self._controls = [self._connection(url, _CALL_S, 4) for url in await self._urls()]
        calls = (self._ask(server, "POST" if body is not None else "GET", path, body) for server in self._controls)
        answers = await asyncio.gather(*calls)
        for server, found in zip(self._controls, answers, strict=True):
            if isinstance(found, Mapping) and found.get("success") is False:
                raise WorkerDiedError(f"{server.base_url}/{path} failed: {found.get('message')}")
        return list(answers)

    async def _urls(self) -> list[str]:
        """Return the addresses of a router's servers. Without a router, return the address of the server."""
        try:
            listed = await self._answers.ask("GET", "list_workers")
        except EndpointError as error:
            if error.status is None:
                raise WorkerDiedError(str(error)) from error
            return [self.url]
        return [str(url) for url in listed["urls"]]

    async def _ask(self, server: EndpointConnection, method: Any, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            return await server.ask(method, path, body)
        except EndpointError as error:
            if error.status in (400, 413, 422):
                raise
            ended = "" if self._process is None or self._process.poll() is None else " Its process has ended."
            raise WorkerDiedError(f"{error}.{ended}") from error

    def end(self) -> None:
        """End the server if it was started here."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            self._process.kill()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def server_arguments(settings: EngineSettings, config: SglangConfig, port: int) -> list[str]:
    """Return the command line of a server. Keys of `sglang_cfg` override the library's values."""
    server = config.sglang_server_config
    sleeps = settings.can_sleep and server.needs_offload
    values: dict[str, Any] = {
        "model_path": settings.model_name,
        "tokenizer_path": settings.tokenizer_name,
        "host": "127.0.0.1",
        "port": port,
        "tp_size": config.tp_size,
        "dtype": settings.precision,
        "context_length": settings.max_model_len,
        "mem_fraction_static": settings.gpu_memory_utilization,
        "random_seed": settings.seed,
        "load_format": "auto" if settings.load_weights else "dummy",
        "device": settings.device,
        "disable_cuda_graph": settings.enforce_eager,
        "enable_memory_saver": sleeps,
        "enable_weights_cpu_backup": sleeps and server.cpu_weight_backup,
        "skip_server_warmup": True,
    }
    own = {name: value for name, value in config.server_args.items() if value is not None}
    return [part for name, value in (values | own | _FIXED).items() for part in _option(name, value)]


_FIXED = {"enable_deterministic_inference": True}
"""Arguments that cannot be changed. Without deterministic inference, SGLang would ignore the seeds of requests."""


def _option(name: str, value: Any) -> Iterator[str]:
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        yield from [option] if value else []
    elif isinstance(value, list):
        yield from [option, *map(str, value)]
    else:
        yield from [option, str(value)]


def check_model(policy: PolicyConfig, cluster: ClusterConfig) -> None:
    """Check that the engine can serve the model (`registry.EngineKind.check`).

    Raises:
        ConfigError: SGLang is not installed, and no running server is configured.
    """
    router = "policy.generation.sglang_cfg.sglang_router_config"
    if policy.sampling.sglang_cfg.sglang_router_config.use_external_router or "generation" in cluster.venvs:
        return
    if find_spec("sglang") is None:
        raise ConfigError(
            "policy.generation.backend=sglang starts servers of the package sglang, which is not installed. Give the "
            'engines a Python that has it (cluster.venvs.generation.packages=["sglang[all]"]), or start a server by '
            f"hand and name it: {router}.use_external_router=true with sglang_router_ip and sglang_router_port there."
        )
