"""Start the servers of NeMo Gym, find their addresses, and end them.

    first rollout ─► command (below `programs.guard`) ─► head server ─► configuration ─► addresses of agents

Invariants: when `close` returns, none of the started processes exists. If this process dies, `guard` ends them. After a
failed start, each later rollout fails at once with the same error.
"""

import asyncio
import json
import logging
import os
import re
import shutil
import socket
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from nemo_rl.agents.programs import guard
from nemo_rl.agents.programs.commands import end_processes
from nemo_rl.agents.programs.interfaces import AgentError
from nemo_rl.config import RunConfig
from nemo_rl.config.schema.agents import NEMO_GYM, HeadServerConfig, NemoGymConfig
from nemo_rl.host.restart_counter import RestartCounter
from nemo_rl.sandbox.scratch import remove
from nemo_rl.utils.addresses import http_address
from nemo_rl.utils.errors import ConfigError

API_KEY = "nemo_rl"
"""API key of the servers. It is not a secret, because the endpoint accepts only the keys of samples."""
_PLAIN = re.compile(r"[\w./:@+-]+")


def should_use_nemo_gym(master_config: RunConfig) -> bool:
    """Return whether agents of NeMo Gym play any rows of a run."""
    return any(name == NEMO_GYM for _, name in master_config.env_entries())


def find_program(section: NemoGymConfig) -> str:
    """Return the path of the program that starts the servers.

    Raises:
        ConfigError: the program does not exist on this machine.
    """
    program = section.command[0]
    folders = [] if section.uv_venv_dir is None else [os.path.join(section.uv_venv_dir, "bin")]
    places = [*folders, sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    found = shutil.which(program, path=os.pathsep.join(places))
    if found is None:
        looked = f"in {folders[0]} and PATH" if folders else "in PATH"
        raise ConfigError(
            f"env.nemo_gym.command starts {program!r}, which is not {looked}. Install NeMo Gym into a Python "
            "environment of its own, and name that environment as env.nemo_gym.uv_venv_dir or the program's path in "
            "env.nemo_gym.command; or start the servers yourself, leave env.nemo_gym.config_paths out, and give their "
            "env.nemo_gym.head_server."
        )
    return os.path.abspath(found)


def overrides(config_paths: Sequence[str], base_url: str, model: str) -> list[str]:
    """Return the command's arguments, in Hydra's grammar.

    Args:
        config_paths: configuration files of the servers.
        base_url: address of the endpoint, up to `/v1`.
    """
    return [
        f"+config_paths=[{','.join(map(_value, config_paths))}]",
        f"+policy_base_url={_value(base_url)}",
        f"+policy_api_key={_value(API_KEY)}",
        f"+policy_model_name={_value(model)}",
    ]


def _value(text: str) -> str:
    """Return a text as a value in Hydra's grammar, in quotes if necessary."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def added_config(section: NemoGymConfig, host: str, port: int) -> Mapping[str, Any]:
    """Return the configuration that is added to that of the files in `config_paths`.

    Args:
        host: host of the head server.
    """
    given = {
        "port_range_low": section.port_range_low,
        "port_range_high": section.port_range_high,
        "uv_cache_dir": section.uv_cache_dir,
        "uv_venv_dir": section.uv_venv_dir,
    }
    known = {key: value for key, value in given.items() if value is not None}
    return {**section.servers, **known, "head_server": {"host": host, "port": port}}


logger = logging.getLogger(__name__)

_AGENTS = "responses_api_agents"
_KINDS = (_AGENTS, "responses_api_models", "resources_servers")
_CONFIG_PATH = "/global_config_dict_yaml"
_POLL_S = 0.2
_CONNECT_S = 5.0
_END_S = 10.0
_LAST_BYTES = 2000
_MAX_RESTARTS = 3
_CONFIG_FILE, _LOG_FILE = "nemo_rl.yaml", "servers.log"
_FOLDER_VARIABLE = "NEMO_RL_GYM_FOLDER"
"""Environment variable of all server processes, by which they are found if their guard was killed."""
_KEY = re.compile(r"sk-[\w.-]+")


class GymServers:
    """The servers of one environment, for use on one event loop.

    Args:
        section: the section `env.nemo_gym`.

    Raises:
        ConfigError: the program that starts the servers does not exist on this machine.
    """

    def __init__(self, section: NemoGymConfig) -> None:
        self._section = section
        self._program = find_program(section) if section.config_paths else None
        self._lock = asyncio.Lock()
        self._running: _Process | None = None
        self._base_url = ""
        self._agents: dict[str, str] = {}
        self._restarts = RestartCounter(_MAX_RESTARTS)
        self._failure: str | None = None

    async def agent_url(self, name: str, base_url: str, model: str) -> str:
        """Return the address of an agent, after the servers have started.

        Args:
            name: name of the agent in the servers' configuration.
            base_url: address up to `/v1` of the endpoint that the servers call.

        Raises:
            AgentError: the servers cannot be started or reached, or have no such agent.
        """
        async with self._lock:
            if self._failure is not None:
                raise AgentError(self._failure)
            has_ended = self._running is not None and self._running.has_ended
            if has_ended:
                self._count_restart()
            if has_ended or self._base_url != base_url:
                await self._started(base_url, model)
        if name not in self._agents:
            known = ", ".join(sorted(self._agents)) or "none"
            raise AgentError(
                f"agent_ref.name={name!r} of the row is no agent of NeMo Gym's servers; there are: {known}"
            )
        return self._agents[name]

    async def close(self) -> None:
        """End the servers that this object started."""
        running, self._running = self._running, None
        if running is not None:
            await running.end()

    def _count_restart(self) -> None:
        """Count that the servers ended by themselves, and have to be started again."""
        self._restarts.add()
        if self._restarts.are_too_many:
            times = self._restarts.number
            self._failure = f"NeMo Gym's servers cannot be used: they have ended {times} times in an hour"
            raise AgentError(self._failure)

    async def _started(self, base_url: str, model: str) -> None:
        """Start the servers for an address of the endpoint, or find servers that are running already."""
        await self.close()
        self._base_url = ""
        deadline = time.monotonic() + self._section.start_timeout_s
        try:
            if self._program is None:
                config = await _global_config(self._section.head_server or HeadServerConfig(), deadline, None)
            else:
                config = await self._launched(base_url, model, deadline)
            _check_policy(config, base_url)
            for host, port in _addresses(config, _KINDS).values():
                await _answering(host, port, deadline, self._running)
        except AgentError as error:
            await self.close()
            self._failure = f"NeMo Gym's servers cannot be used: {error}"
            raise AgentError(self._failure) from None
        except BaseException:  # a cancelled rollout
            await self.close()
            raise
        found = _addresses(config, [_AGENTS])
        self._agents = {name: http_address(host, port) for name, (host, port) in found.items()}
        self._base_url = base_url
        logger.info("NeMo Gym's servers answer; agents: %s", ", ".join(sorted(self._agents)))

    async def _launched(self, base_url: str, model: str, deadline: float) -> Mapping[str, Any]:
        """Start the processes, and return the configuration of all servers."""
        section = self._section
        head = section.head_server or HeadServerConfig.build(port=_free_port())
        assert self._program is not None, "it is found where there are config_paths"
        variables = {} if section.uv_cache_dir is None else {"UV_CACHE_DIR": section.uv_cache_dir}
        self._running = await _Process.started(section, self._program, head, (base_url, model), variables)
        return await _global_config(head, deadline, self._running)


class _Process:
    """The command that starts the servers, below a guard that ends all its processes."""

    def __init__(self, process: asyncio.subprocess.Process, folder: str, log: Path) -> None:
        self._process = process
        self._folder = folder
        self._log = log

    @classmethod
    async def started(
        cls,
        section: NemoGymConfig,
        program: str,
        head: HeadServerConfig,
        policy: tuple[str, str],
        env: Mapping[str, str],
    ) -> "_Process":
        """Start the command, with its output written to the log."""
        folder = os.path.realpath(tempfile.mkdtemp(prefix="nemo_rl_gym_"))
        config = Path(folder, _CONFIG_FILE)
        config.write_text(yaml.safe_dump(dict(added_config(section, head.host, head.port))), encoding="utf-8")
        log = Path(section.log_dir, _LOG_FILE).absolute()
        log.parent.mkdir(parents=True, exist_ok=True)
        arguments = overrides([*section.config_paths, str(config)], *policy)
        variables = {**os.environ, **env, _FOLDER_VARIABLE: folder}
        plan = {"command": [program, *section.command[1:], *arguments], "environment": variables}
        with open(log, "ab", opener=_private) as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(guard.__file__), folder, str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={},
                start_new_session=True,
            )
        assert process.stdin
        process.stdin.write(json.dumps(plan).encode() + b"\n")
        return cls(process, folder, log)

    @property
    def has_ended(self) -> bool:
        """True if the command and its processes have ended."""
        return self._process.returncode is not None

    @property
    def last_words(self) -> str:
        """Exit status of a command that has ended, and the end of its output."""
        with self._log.open("rb") as file:
            file.seek(-min(2 * _LAST_BYTES, self._log.stat().st_size), os.SEEK_END)
            # Keys are masked before the text is cut, because a part of a key would not be recognised.
            text = _KEY.sub("sk-***", file.read().decode(errors="replace"))[-_LAST_BYTES:].strip()
        return f"the command exited with status {self._process.returncode}; {self._log} ends with:\n{text}"

    async def end(self) -> None:
        """End all processes, and remove all files except the log."""
        assert self._process.stdin
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            logger.warning("the guard of NeMo Gym's servers did not end in %g s", _END_S)
        if self._process.returncode is None or self._process.returncode < 0:  # the guard itself was killed
            pid = self._process.pid if self._process.returncode is None else None
            if not await asyncio.to_thread(end_processes, pid, self._folder, _END_S):
                logger.warning("processes of NeMo Gym's servers did not end in %g s of SIGKILL", _END_S)
        if os.path.isdir(self._folder):
            await asyncio.to_thread(remove, self._folder)


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner may read, because servers may write the keys of samples into it."""
    return os.open(path, flags, 0o600)


async def _global_config(head: HeadServerConfig, deadline: float, process: _Process | None) -> Mapping[str, Any]:
    """Ask the head server for the configuration of all servers, repeatedly until it answers."""
    url = f"{http_address(head.host, head.port)}{_CONFIG_PATH}"
    async with httpx.AsyncClient(timeout=_CONNECT_S) as client:
        while True:
            try:
                response = await client.get(url)
                if response.status_code == httpx.codes.OK:
                    return _read_config(url, response)
                reason = f"status {response.status_code}"
            except httpx.HTTPError as error:
                reason = str(error) or type(error).__name__
            await _wait(deadline, process, f"the head server {url} does not answer ({reason})")


def _read_config(url: str, response: httpx.Response) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(response.json())
    except (ValueError, yaml.YAMLError, AttributeError) as error:
        raise AgentError(f"the head server {url} sent no configuration: {error}") from None
    if not isinstance(config, Mapping):
        raise AgentError(f"the head server {url} sent a {type(config).__name__}, which is no configuration")
    return config


async def _answering(host: str, port: int, deadline: float, process: _Process | None) -> None:
    """Wait until a server accepts connections."""
    while True:
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return
        except (OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
        await _wait(deadline, process, f"the server {host}:{port} does not answer ({reason})")


async def _wait(deadline: float, process: _Process | None, reason: str) -> None:
    """Wait for a moment. Raise an error if the process has ended or the deadline is over."""
    if process is not None and process.has_ended:
        raise AgentError(process.last_words)
    if time.monotonic() > deadline:
        raise AgentError(f"{reason}, and env.nemo_gym.start_timeout_s has passed")
    await asyncio.sleep(_POLL_S)


def _addresses(config: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return host and port of each server of the given kinds, by the server's name."""
    found = {}
    for name, by_kind in config.items():
        for kind, implementations in by_kind.items() if isinstance(by_kind, Mapping) else ():
            if kind not in kinds or not isinstance(implementations, Mapping):
                continue
            for server in implementations.values():
                if isinstance(server, Mapping) and server.get("host") and server.get("port"):
                    found[str(name)] = (str(server["host"]), int(server["port"]))
    return found


def _check_policy(config: Mapping[str, Any], base_url: str) -> None:
    """Refuse servers that call the model at another address, because they are old or configured differently."""
    given = config.get("policy_base_url")
    if given != base_url:
        raise AgentError(
            f"the servers call the model at {given!r}, and the endpoint of this run is {base_url!r}. Start them with "
            f"+policy_base_url={base_url}, where cluster.agent_endpoint.port keeps the port the same; with "
            "env.nemo_gym.config_paths, end other servers that have the same env.nemo_gym.head_server."
        )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
