"""Metrics reach every backend under the same names; files, console line, samples."""

import json
import logging
import math
import os
import pty
import re
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_rl.config import LoggerConfig, TrackioConfig
from nemo_rl.files.writing import OptionalOutput
from nemo_rl.utils import logger as logger_module
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.log_backends.tracker import LoggerInterface, flatten_dict, to_scalars
from nemo_rl.utils.logger import Logger, get_next_experiment_dir, print_message_log_samples
from nemo_rl.utils.logging_setup import configure_logging


def read_lines(path) -> list[dict]:
    def refuse(constant):
        raise ValueError(constant)

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_experiment_folders_are_numbered(tmp_path):
    base = tmp_path / "logs"
    assert get_next_experiment_dir(base) == str(base / "exp_001")
    (base / "exp_041").mkdir()
    (base / "exp_0x9").mkdir()
    assert get_next_experiment_dir(base) == str(base / "exp_042")
    assert (base / "exp_042").is_dir()


def test_scalars_of_every_kind_are_logged():
    metrics = {
        "float": 0.1,
        "int": 3,
        "flag": True,
        "tensor": torch.tensor(2.5),
        "row of one": torch.tensor([4.0]),
        "numpy": np.float32(0.5),
        "nan": float("nan"),
        "text": "no number",
        "list": [1, 2],
        "tensor of two": torch.zeros(2),
    }
    scalars = to_scalars(metrics)
    assert math.isnan(scalars.pop("nan"))
    assert scalars == {"float": 0.1, "int": 3.0, "flag": 1.0, "tensor": 2.5, "row of one": 4.0, "numpy": 0.5}


def test_flatten_dict_joins_nested_keys():
    nested = {"a": {"b": 1, "c": {"d": 2}}, "e": [10, {"f": 3}], "g": {}}
    assert flatten_dict(nested) == {"a.b": 1, "a.c.d": 2, "e.0": 10, "e.1.f": 3, "g": {}}
    assert flatten_dict(nested, sep="/", expand_lists=False)["e"] == [10, {"f": 3}]


def test_tensorboard_and_metrics_file_hold_the_same_numbers(tmp_path):
    logger = Logger(LoggerConfig(tensorboard_enabled=True), tmp_path)
    logger.log_metrics({"loss": 0.25, "reward": torch.tensor(1 / 3, dtype=torch.float64)}, 1, prefix="train")
    logger.log_metrics({"loss": float("nan"), "histogram": [1, 2]}, 2, prefix="train")
    logger.log_hyperparams({"grpo": {"num_prompts_per_step": 8}})
    logger.finish()

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/reward"}
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(1, pytest.approx(1 / 3, rel=1e-6))]
    assert math.isnan(events.Scalars("train/loss")[1].value)
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "grpo.num_prompts_per_step: 8" in text

    lines = read_lines(tmp_path / "metrics.jsonl")
    assert all(abs(line.pop("time") - time.time()) < 60 for line in lines)
    assert lines == [
        {"step": 1, "prefix": "train", "metrics": {"loss": 0.25, "reward": 1 / 3}},
        {"step": 2, "prefix": "train", "metrics": {"loss": None}},
    ]


def test_metrics_are_on_disk_before_the_logger_is_closed(tmp_path):
    logger = Logger(LoggerConfig(), tmp_path)
    logger.log_metrics({"loss": 1.0}, 1, prefix="train")
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 1
    logger.close()


def test_the_console_gets_one_line_per_step(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="nemo_rl")
    logger = Logger(LoggerConfig(), tmp_path, total_steps=20)
    for step in (1, 2):
        logger.log_metrics({"loss": 0.5 * step, "reward": 0.25, "rare": 1.0}, step, prefix="train")
        logger.log_metrics({"total_step_time": 1.5}, step, prefix="timing/train")
        logger.log_metrics({"tokens_per_sec": 100.0}, step, prefix="performance")
    logger.log_metrics({"loss": float("nan")}, 3, prefix="train", step_finished=True)
    lines = [record.message for record in caplog.records]
    assert lines == [
        "step 1/20  loss=0.5  reward=0.25  step_s=1.5",
        "step 2/20  loss=1  reward=0.25  step_s=1.5",
        "step 3/20  loss=nan",
    ]


def test_batches_are_written_as_jsonl(tmp_path):
    logger = Logger(LoggerConfig(), tmp_path)
    batch = {
        "content": ["7+5=12 \u00e9", 'a "quote"\n'],
        "rewards": torch.tensor([1.0, float("inf")]),
        "token_ids": [torch.tensor([3, 4]), torch.tensor([5])],
        "advantages": np.array([[0.5, 0.0], [0.25, 0.0]], dtype=np.float32),
    }
    logger.log_batched_dict_as_jsonl(batch, "train_data_step1.jsonl")
    assert read_lines(tmp_path / "train_data_step1.jsonl") == [
        {"content": "7+5=12 \u00e9", "rewards": 1.0, "token_ids": [3, 4], "advantages": [0.5, 0.0]},
        {"content": 'a "quote"\n', "rewards": None, "token_ids": [5], "advantages": [0.25, 0.0]},
    ]
    with pytest.raises(ValueError, match="differ in length"):
        logger.log_batched_dict_as_jsonl({"a": [1], "b": [1, 2]}, "bad.jsonl")
    logger.log_string_list_as_jsonl(['{"a": 1}', '{"a": 2}'], "lines.jsonl")
    assert read_lines(tmp_path / "lines.jsonl") == [{"a": 1}, {"a": 2}]


def test_a_tracker_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(logger_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"logger\.mlflow_enabled=true needs the package mlflow.*--extra mlflow"):
        Logger(LoggerConfig(mlflow_enabled=True), tmp_path)


def test_tracker_classes_are_importable_without_their_libraries():
    code = (
        "import sys, nemo_rl.utils.logger;"
        "assert not set(sys.modules) & {'wandb', 'mlflow', 'swanlab', 'torch', 'ray', 'tensorboard'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert issubclass(logger_module.TensorboardLogger, LoggerInterface)
    with pytest.raises(AttributeError, match="CometLogger"):
        logger_module.CometLogger  # noqa: B018


def test_a_user_backend_needs_two_methods():
    class Mine(LoggerInterface):
        def log_metrics(self, metrics, step, prefix="", step_metric=None, step_finished=False):
            self.seen = (metrics, step, prefix)

        def log_hyperparams(self, params):
            pass

    mine = Mine()
    mine.log_metrics({"a": 1}, 1)
    mine.close()
    assert mine.seen == ({"a": 1}, 1, "")


def test_samples_show_best_and_worst_and_keep_markup(caplog):
    caplog.set_level(logging.INFO, logger="nemo_rl")
    logs = [[{"role": "user", "content": f"[bold]q{i}"}, {"role": "assistant", "content": f"a{i}"}] for i in range(4)]
    print_message_log_samples(logs, [0.0, 1.0, 0.5, 0.25], num_samples=3, step=7)
    text = [record.message for record in caplog.records]
    assert [next(i for i in range(4) if f"a{i}" in page) for page in text] == [1, 2, 0]
    assert "user: [bold]q1" in text[0] and "reward 1 " in text[0] and text[0].startswith("step 7, sample 1\n")
    caplog.clear()
    print_message_log_samples(logs, [0.0, 1.0, 0.5, 0.25], num_samples=0)
    print_message_log_samples([], [], num_samples=3)
    assert not caplog.records
    with pytest.raises(ValueError, match="2 rewards"):
        print_message_log_samples(logs, [0.0, 1.0])


def test_the_log_level_follows_its_variable(monkeypatch):
    monkeypatch.setenv("NRL_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="NRL_LOG_LEVEL=LOUD.*WARNING"):
        configure_logging()
    code = (
        "import logging; from nemo_rl.utils.logging_setup import configure_logging; configure_logging();"
        "logging.getLogger('nemo_rl.x').info('mine'); logging.getLogger('other').info('theirs');"
        "logging.getLogger('other').warning('their warning')"
    )
    for level, expected in (("INFO", ["mine", "their warning"]), ("warning", ["their warning"])):
        environment = os.environ | {"NRL_LOG_LEVEL": level}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert [line.split(" ", 2)[2] for line in run.stderr.splitlines()] == expected


def test_records_are_printed_above_a_live_progress_bar():
    """On a terminal the bar redraws below each record instead of being torn by it."""
    code = (
        "import logging, sys, time; from nemo_rl.utils.logging_setup import configure_logging; configure_logging();"
        "from nemo_rl.utils.log_backends.console import ConsoleLogger;"
        "c = ConsoleLogger(3);"
        "[c.log_metrics({'loss': 0.5}, step, 'train', step_finished=True) for step in (1, 2, 3)]; c.close()"
    )
    leader, follower = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stderr=follower, env=os.environ | {"TERM": "xterm"})
    os.close(follower)
    output = b""
    while True:
        try:
            block = os.read(leader, 4096)
        except OSError:
            break
        if not block:
            break
        output += block
    os.close(leader)
    assert process.wait() == 0
    text = output.decode()
    assert all(f"step {step}/3" in text for step in (1, 2, 3))
    assert "3/3" in text.split("step 3/3")[0] or "2/3" in text
    lines = text.replace("\r", "\n").split("\n")
    records = [line for line in lines if "loss=0.5" in line]
    assert len(records) == 3
    assert not any("\u2501" in line for line in records), "a record shares its line with the bar"


def wandb_records(path) -> bytes:
    """Yield the payloads of a .wandb file: LevelDB log blocks of 32 KiB after a header of 7 bytes."""
    data, position, payloads = path.read_bytes(), 7, []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, _ = struct.unpack_from("<IHB", data, position)
        payloads.append(data[position + 7 : position + 7 + length])
        position += 7 + length
    return b"".join(payloads)


@pytest.mark.slow
def test_wandb_records_offline(tmp_path):
    """A real offline run of the wandb client; names and numbers are in its file."""
    code = f"""
from nemo_rl.config import LoggerConfig
from nemo_rl.utils.logger import Logger
logger = Logger(LoggerConfig(wandb_enabled=True, wandb={{"project": "p", "name": "n"}}), {str(tmp_path)!r})
logger.log_hyperparams({{"grpo": {{"num_prompts_per_step": 8}}}})
logger.log_metrics({{"loss": 0.3671875}}, 31, prefix="train")
logger.close()
"""
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    [path] = tmp_path.glob("wandb/wandb/offline-run-*/*.wandb")
    records = wandb_records(path)
    for name, value in ((b"train/loss", b"0.3671875"), (b"train/step", b"31")):
        assert re.search(name + rb".{1,4}" + value, records, re.DOTALL), name
    assert b"num_prompts_per_step" in records


@pytest.mark.slow
def test_swanlab_records_offline(tmp_path):
    """A real offline run of SwanLab; names and numbers are in its files, and it leaves the handler of Ctrl-C alone."""
    pytest.importorskip("swanlab")
    code = f"""
import signal
from nemo_rl.config import LoggerConfig
from nemo_rl.utils.logger import Logger
before = signal.getsignal(signal.SIGINT)
logger = Logger(LoggerConfig(swanlab_enabled=True, swanlab={{"project": "p", "name": "n"}}), {str(tmp_path)!r})
assert signal.getsignal(signal.SIGINT) is before
logger.log_hyperparams({{"grpo": {{"num_prompts_per_step": 8, "stop": None}}}})
logger.log_metrics({{"loss": 0.3671875, "kl": float("nan"), "histogram": [1, 2]}}, 31, prefix="train")
logger.log_metrics({{"accuracy": 0.8203125}}, 31, prefix="validation")
logger.close()
assert signal.getsignal(signal.SIGINT) is before
"""
    environment = os.environ | {"SWANLAB_MODE": "offline"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    [path] = tmp_path.glob("swanlab/run-*/run-*.swanlab")
    records = path.read_bytes()
    for name, value in ((b"train/loss", 0.3671875), (b"validation/accuracy", 0.8203125)):
        assert name in records and struct.pack("<d", value) in records, name
    assert b"train/kl" in records and b"histogram" not in records
    assert "num_prompts_per_step" in (path.parent / "files/config.yaml").read_text()


@pytest.mark.slow
def test_trackio_records_in_the_folder_of_the_run(tmp_path):
    """A real local run of Trackio; names and numbers are in its database, and Ctrl-C keeps its handler."""
    pytest.importorskip("trackio")
    code = f"""
import signal
from nemo_rl.config import LoggerConfig
from nemo_rl.utils.logger import Logger
before = signal.getsignal(signal.SIGINT)
logger = Logger(LoggerConfig.build(trackio_enabled=True, trackio={{"project": "p", "name": "n"}}), {str(tmp_path)!r})
logger.log_hyperparams({{"grpo": {{"num_prompts_per_step": 8, "stop": None}}}})
logger.log_metrics({{"loss": 0.3671875, "kl": float("nan"), "histogram": [1, 2]}}, 31, prefix="train")
logger.log_metrics({{"accuracy": 0.8203125}}, 31, prefix="validation")
logger.close()
assert signal.getsignal(signal.SIGINT) is before
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRACKIO_")}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    [path] = tmp_path.glob("trackio/p*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
        configs = str(database.execute("SELECT * FROM configs").fetchall())
    logged = [(step, json.loads(metrics)) for step, metrics in rows]
    assert (31, 0.3671875) in [(step, metrics.get("train/loss")) for step, metrics in logged]
    assert (31, 0.8203125) in [(step, metrics.get("validation/accuracy")) for step, metrics in logged]
    assert not [name for _, metrics in logged for name in metrics if "histogram" in name]
    assert "grpo.num_prompts_per_step" in configs


class FakeMlflow(ModuleType):
    """Records what it gets; has only what `MLflowLogger` calls."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.told: list[tuple[str, Any]] = []
        self.__spec__ = ModuleSpec("mlflow", None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.told.append((name, args or kwargs))
            if name.startswith("log_"):
                assert kwargs["run_id"] == "run 1", "without the run, another thread would start a run of its own"
            return SimpleNamespace(info=SimpleNamespace(run_id="run 1")) if name == "start_run" else None

        return call


@pytest.fixture
def fake_mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    module, exceptions = FakeMlflow(), ModuleType("mlflow.exceptions")
    exceptions.MlflowException = Exception  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", exceptions)
    monkeypatch.delitem(sys.modules, "nemo_rl.utils.log_backends.mlflow", raising=False)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return module


def test_mlflow_stores_runs_in_the_folder_of_the_run(tmp_path: Path, fake_mlflow: FakeMlflow) -> None:
    Logger(LoggerConfig.build(mlflow_enabled=True), tmp_path).close()
    told = dict(fake_mlflow.told)
    assert told["set_tracking_uri"] == (f"sqlite:///{tmp_path}/mlflow/mlflow.db",)
    assert told["create_experiment"] == ("grpo-dev",)
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"


def test_secrets_of_a_configuration_do_not_reach_trackers(tmp_path: Path, fake_mlflow: FakeMlflow) -> None:
    logger = Logger(LoggerConfig.build(mlflow_enabled=True), tmp_path)
    logger.log_hyperparams(
        {
            "policy": {"dtensor_cfg": {"env_vars": {"HF_TOKEN": "private 1"}}, "generation": {"env_vars": None}},
            "env": {"agent": {"environment": {"KEY": "private 2"}}, "extra": [{"api_key": "private 3"}]},
            "judge": {"api_key_env": "JUDGE_KEY", "environment": {"steps": 3}},
            "logger": {"mlflow": {"tracking_uri": "https://me:private4@host:5000/x"}},
            "seed": 7,
        }
    )
    logger.close()
    told = {name: value for call, args in fake_mlflow.told if call == "log_params" for name, value in args[0].items()}
    assert told == {
        "policy.dtensor_cfg.env_vars.HF_TOKEN": "***",
        "policy.generation.env_vars": "None",
        "env.agent.environment.KEY": "***",
        "env.extra": "[{'api_key': '***'}]",
        "judge.api_key_env": "JUDGE_KEY",
        "judge.environment.steps": "3",
        "logger.mlflow.tracking_uri": "https://***@host:5000/x",
        "seed": "7",
    }


def test_a_second_run_of_a_process_is_not_put_into_the_folder_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, trackio = [], ModuleType("trackio")
    trackio.init = lambda **arguments: made.append(os.environ["TRACKIO_DIR"])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setenv("TRACKIO_DIR", "")
    monkeypatch.delenv("TRACKIO_DIR")
    monkeypatch.setattr(logger_module.TrackioLogger, "_first_folder", None)
    config = TrackioConfig()
    logger_module.TrackioLogger(config, tmp_path / "1")
    with pytest.raises(ConfigError, match=rf"reports to {tmp_path}/1 already.*a process of its own"):
        logger_module.TrackioLogger(config, tmp_path / "2")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "all"))
    logger_module.TrackioLogger(config, tmp_path / "3")
    assert made == [str(tmp_path / "1"), str(tmp_path / "all")]


def test_mlflow_gets_metrics_of_all_threads_in_one_run_and_in_blocks(tmp_path: Path, fake_mlflow: FakeMlflow) -> None:
    logger = Logger(LoggerConfig.build(mlflow_enabled=True), tmp_path)
    many = {f"node.{number}.mem_gb": 1.0 for number in range(1500)}
    thread = threading.Thread(target=logger.log_metrics, args=(many, 20, "ray"))
    thread.start()
    thread.join()
    logger.log_hyperparams({"seed": 1})
    logger.close()
    sent = [args[0] for name, args in fake_mlflow.told if name == "log_metrics"]
    assert [len(block) for block in sent] == [1000, 500]
    assert ("log_params", ({"seed": "1"},)) in fake_mlflow.told


@pytest.mark.parametrize("given", ["key", "variable"])
def test_mlflow_stores_runs_at_its_tracking_uri(
    given: str, tmp_path: Path, fake_mlflow: FakeMlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"sqlite:///{tmp_path}/other.db"
    if given == "variable":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    section = {"tracking_uri": address} if given == "key" else {}
    Logger(LoggerConfig.build(mlflow_enabled=True, mlflow=section), tmp_path).close()
    assert dict(fake_mlflow.told)["set_tracking_uri"] == (address,)


def test_an_unreachable_mlflow_server_is_refused_immediately(tmp_path: Path, fake_mlflow: FakeMlflow) -> None:
    with socket.socket() as bound:  # bound, but no process listens
        bound.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        config = LoggerConfig.build(mlflow_enabled=True, mlflow={"tracking_uri": address})
        with pytest.raises(ConfigError, match=rf"no server answers at tracking_uri={address} .*refused"):
            Logger(config, tmp_path)
    assert fake_mlflow.told == []


@pytest.mark.slow
def test_mlflow_stores_runs_in_a_database(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)  # artifacts of a new experiment
    store = f"sqlite:///{tmp_path}/store.db"
    section = {"tracking_uri": store, "experiment_name": "e", "run_name": "r"}
    logger = Logger(LoggerConfig(mlflow_enabled=True, mlflow=section), tmp_path)
    logger.log_hyperparams({"grpo": {"seed": 1}, "long": "x" * 1000})
    logger.log_metrics({"loss": 0.25}, 3, prefix="train")
    thread = threading.Thread(target=logger.log_metrics, args=({"node.0.mem_gb": 8.0}, 20, "ray"))
    thread.start()
    thread.join()
    logger.close()
    [run] = mlflow.search_runs(experiment_names=["e"], output_format="list")
    assert run.info.status == "FINISHED"
    assert run.data.metrics["train/loss"] == 0.25 and run.data.metrics["ray/node.0.mem_gb"] == 8.0
    assert run.data.params["grpo.seed"] == "1"


def test_a_full_log_disk_loses_numbers_with_one_warning_per_file(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    logger = Logger(LoggerConfig(), tmp_path)
    caplog.set_level(logging.INFO, logger="nemo_rl")
    for step in (1, 2, 3):
        logger.log_metrics({"loss": 0.25}, step, prefix="train", step_finished=True)
    logger.close()
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        "JsonlLogger cannot be written: [Errno 28] No space left on device. The run continues; this output is "
        "incomplete."
    ]
    assert sum("loss=0.25" in record.message for record in caplog.records) == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's writer thread
def test_logging_to_a_full_disk_keeps_whole_lines_and_resumes_with_free_space(tmp_path, ram_disk, caplog):
    with ram_disk("size=64k") as folder:
        logger = Logger(LoggerConfig(tensorboard_enabled=True), folder)
        for step in range(400):
            logger.log_metrics({"loss": step}, step, prefix="train" * 20)
            logger.log_batched_dict_as_jsonl({"text": ["long" * 500]}, f"rows_{step}.jsonl")
        whole = read_lines(folder / "metrics.jsonl")
        assert 10 < len(whole) < 400
        for file in folder.glob("rows_*"):
            file.unlink()
        logger.log_metrics({"loss": 0.5}, 401, prefix="train")
        *earlier, last = read_lines(folder / "metrics.jsonl")
        assert earlier == whole
        assert last.items() >= {"step": 401, "prefix": "train", "metrics": {"loss": 0.5}}.items()
        assert not list(folder.glob("*.partial"))
        logger.close()
    said = [record.message.split(":")[0] for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(said) == [
        "JsonlLogger cannot be written",
        f"Samples in {folder} cannot be written",
        "TensorboardLogger cannot be written",
    ]


def test_only_write_errors_are_tolerated():
    output = OptionalOutput("numbers", (OSError, TimeoutError))
    with output.attempt():
        raise TimeoutError("the tracker does not answer")
    with pytest.raises(KeyError), output.attempt():
        raise KeyError("a mistake")
