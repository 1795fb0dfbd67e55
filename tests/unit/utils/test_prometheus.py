"""The endpoint for Prometheus, asked over HTTP and read with prometheus_client's own parser."""

import errno
import os
import pty
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nemo_rl.config import LoggerConfig
from nemo_rl.utils import logger as logger_module
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.log_backends import prometheus
from nemo_rl.utils.log_backends.prometheus import PrometheusLogger
from nemo_rl.utils.log_backends.tracker import LoggerInterface
from nemo_rl.utils.logger import Logger

pytestmark = pytest.mark.fast


def asked(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def served(logger: Logger) -> PrometheusLogger:
    [backend] = [backend for backend in logger._backends if isinstance(backend, PrometheusLogger)]
    return backend


def test_the_newest_metrics_are_served_until_the_end(tmp_path) -> None:
    logger = Logger(LoggerConfig.build(log_dir=str(tmp_path), prometheus={"enabled": True, "port": 0}))
    port = served(logger).port
    assert asked(port) == {}
    logger.log_metrics({"loss": 0.5, "kl": float("nan"), "note": "text"}, 3, prefix="train")
    logger.log_metrics({"loss": 0.25}, 4, prefix="train")
    logger.log_metrics({"generation": 1.5}, 4, prefix="timing/train")
    logger.log_metrics({"node.0.mem_gb": 8.0, "node.0.gpu.1.mem_gb": 40.0, "node.1.gpu.0.util": 90.0}, 20, prefix="ray")
    logger.log_metrics({"engine.2.open_requests_max": 6.0}, 4, prefix="generation")
    found = asked(port)
    assert found.pop(("nemo_rl_train_kl", ())) != 0
    assert found == {
        ("nemo_rl_train_loss", ()): 0.25,
        ("nemo_rl_timing_train_generation", ()): 1.5,
        ("nemo_rl_ray_node_mem_gb", (("node", "0"),)): 8.0,
        ("nemo_rl_ray_gpu_mem_gb", (("gpu", "1"), ("node", "0"))): 40.0,
        ("nemo_rl_ray_gpu_util", (("gpu", "0"), ("node", "1"))): 90.0,
        ("nemo_rl_generation_engine_open_requests_max", (("engine", "2"),)): 6.0,
        ("nemo_rl_step", (("group", "train"),)): 4.0,
        ("nemo_rl_step", (("group", "timing_train"),)): 4.0,
        ("nemo_rl_step", (("group", "ray"),)): 20.0,
        ("nemo_rl_step", (("group", "generation"),)): 4.0,
    }
    logger.close()
    with pytest.raises(urllib.error.URLError):
        asked(port)


def test_steps_that_are_trained_again_are_served(tmp_path) -> None:
    logger = Logger(LoggerConfig.build(log_dir=str(tmp_path), prometheus={"enabled": True, "port": 0}))
    logger.log_metrics({"loss": 0.5}, 3, prefix="train")
    logger.go_back()
    logger.log_metrics({"loss": 0.75}, 3, prefix="train")
    assert asked(served(logger).port)["nemo_rl_train_loss", ()] == 0.75
    logger.close()


def test_a_port_in_use_is_refused_and_named(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = LoggerConfig.build(log_dir=str(tmp_path), prometheus={"enabled": True, "port": port})
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} cannot be served.*Another program has the port"):
            Logger(config)


def test_a_start_that_fails_leaves_no_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with (
        os.fdopen(leader, "rb"),
        os.fdopen(follower, "w") as terminal,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        monkeypatch.setattr(sys, "stderr", terminal)
        in_use = {"enabled": True, "port": other.getsockname()[1]}
        with pytest.raises(ConfigError, match="Another program has the port"):
            Logger(LoggerConfig.build(log_dir=str(tmp_path), prometheus=in_use), total_steps=3)
        assert sys.stderr is terminal
        logger = Logger(LoggerConfig.build(log_dir=str(tmp_path)), total_steps=3)
        assert sys.stderr is not terminal
        logger.close()
        assert sys.stderr is terminal


def test_a_port_that_this_user_may_not_serve_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(prometheus, "bound_socket", refuse)
    config = LoggerConfig.build(log_dir=str(tmp_path), prometheus={"enabled": True, "port": 80})
    with pytest.raises(ConfigError, match=r"This user may not serve the port.*below 1024.*logger\.prometheus\.port"):
        Logger(config)


def test_a_host_that_is_no_name_is_refused(tmp_path: Path) -> None:
    config = LoggerConfig.build(log_dir=str(tmp_path), prometheus={"enabled": True, "host": "a\0b", "port": 0})
    with pytest.raises(ConfigError, match="host has to be an address of this machine"):
        Logger(config)


def test_a_name_has_one_family_and_nodes_that_are_gone_have_no_values(tmp_path: Path) -> None:
    logger = Logger(LoggerConfig.build(log_dir=str(tmp_path), prometheus={"enabled": True, "port": 0}))
    port = served(logger).port
    logger.log_metrics({"node.0.mem_gb": 8.0, "node.1.mem_gb": 9.0, "node_mem_gb": 17.0}, 10, prefix="ray")
    logger.log_metrics({"loss": 0.5}, 1, prefix="train")
    assert len([key for key in asked(port) if key[0] == "nemo_rl_ray_node_mem_gb"]) == 3
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.read().decode().count("# TYPE nemo_rl_ray_node_mem_gb gauge") == 1
    logger.log_metrics({"node.0.mem_gb": 7.0}, 20, prefix="ray")
    found = asked(port)
    assert {key: value for key, value in found.items() if key[0] == "nemo_rl_ray_node_mem_gb"} == {
        ("nemo_rl_ray_node_mem_gb", (("node", "0"),)): 7.0
    }
    assert found["nemo_rl_train_loss", ()] == 0.5 and found["nemo_rl_step", (("group", "ray"),)] == 20.0
    logger.close()


def test_files_and_the_endpoint_take_metrics_while_a_tracker_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, release = threading.Event(), threading.Event()

    class Hanging(LoggerInterface):
        def log_metrics(self, *arguments: Any, **keywords: Any) -> None:
            hangs.set()
            release.wait(30)

        def log_hyperparams(self, params: Any) -> None:
            pass

    make = logger_module.make_backends
    monkeypatch.setattr(logger_module, "make_backends", lambda *arguments: [*make(*arguments), Hanging()])
    logger = Logger(LoggerConfig.build(log_dir=str(tmp_path), prometheus={"enabled": True, "port": 0}))
    monitor = threading.Thread(target=logger.log_metrics, args=({"node.0.mem_gb": 8.0}, 10, "ray"))
    step = threading.Thread(target=logger.log_metrics, args=({"loss": 0.5}, 1, "train"))
    monitor.start()
    assert hangs.wait(10)
    step.start()
    end = time.monotonic() + 10
    while ("nemo_rl_train_loss", ()) not in asked(served(logger).port):
        assert time.monotonic() < end
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2
    release.set()
    monitor.join(10)
    step.join(10)
    logger.close()


def test_a_foreign_address_is_refused(tmp_path) -> None:
    config = LoggerConfig.build(log_dir=str(tmp_path), prometheus={"enabled": True, "host": "192.0.2.1", "port": 0})
    with pytest.raises(ConfigError, match="host has to be an address of this machine"):
        Logger(config)


def test_nothing_is_served_by_default(tmp_path) -> None:
    logger = Logger(LoggerConfig.build(log_dir=str(tmp_path)))
    assert not [backend for backend in logger._backends if isinstance(backend, PrometheusLogger)]
    logger.close()
