"""The endpoint for Prometheus, asked over HTTP and read with prometheus_client's own parser."""

import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nemo_rl.config import LoggerConfig
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.log_backends.prometheus import PrometheusLogger
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


def test_a_foreign_address_is_refused(tmp_path) -> None:
    config = LoggerConfig.build(log_dir=str(tmp_path), prometheus={"enabled": True, "host": "192.0.2.1", "port": 0})
    with pytest.raises(ConfigError, match="host has to be an address of this machine"):
        Logger(config)


def test_nothing_is_served_by_default(tmp_path) -> None:
    logger = Logger(LoggerConfig.build(log_dir=str(tmp_path)))
    assert not [backend for backend in logger._backends if isinstance(backend, PrometheusLogger)]
    logger.close()
