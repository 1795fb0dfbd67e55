"""What a run reports about itself: rates, load of the machine and of engines, to Prometheus and the dashboard."""

import json
import os
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from example_runs import REPOSITORY, ExampleRun, StartExample, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

DASHBOARD = REPOSITORY / "infra/grafana/nemo_rl.json"
ONLY_SOMETIMES = {
    "nemo_rl_performance_train_fp_utilization": "on GPUs whose peak is known (test_throughput)",
    "nemo_rl_performance_logprob_fp_utilization": "on GPUs whose peak is known (test_throughput)",
    "nemo_rl_performance_num_run_restarts": "after a restart (test_recovery)",
    "nemo_rl_validation_val_loss": "in supervised runs (test_sft_cpu)",
}
OVERRIDES = (
    "grpo.max_num_steps=3",
    "grpo.max_val_samples=8",
    "grpo.val_batch_size=8",
    "checkpointing.save_period=1",
    "loss_fn.reference_policy_kl_penalty=0.01",
    "policy.generation.vllm_cfg.enable_vllm_metrics_logger=true",
    "policy.generation.vllm_cfg.vllm_metrics_logger_interval=0.02",
    "logger.prometheus.enabled=true",
    "logger.prometheus.port=0",
    "logger.gpu_monitoring.collection_interval=0.5",
    "logger.gpu_monitoring.flush_interval=0.5",
)


def served_names(run: ExampleRun) -> set[str]:
    """Return the names of all samples that the endpoint serves until the run ends."""
    run.wait_for(r"http://127\.0\.0\.1:\d+/metrics")
    found = re.search(r"http://127\.0\.0\.1:\d+/metrics", run.log())
    assert found is not None
    names: set[str] = set()
    while run.process.poll() is None:
        try:
            with urllib.request.urlopen(found[0], timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except (urllib.error.URLError, ConnectionError):
            break
        names |= {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
        time.sleep(0.1)
    return names


def test_a_run_reports_its_rates_and_loads_and_serves_what_the_dashboard_shows(
    start_example: StartExample, tmp_path: Path
) -> None:
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\ncase $1 in *utilization*) echo '0, 87, 40960, 81559' ;; *) exit 9 ;; esac\n")
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    saved = f"checkpointing.checkpoint_dir={tmp_path}/checkpoints"
    run = start_example("run_grpo.py", "grpo_math_cpu.yaml", *OVERRIDES, saved, environment={"PATH": path})
    names = served_names(run)
    assert run.finish() == 0, run.log()[-3000:]

    metrics = read_metrics(run.log_dir)
    for step in (1, 2, 3):
        rates = {name: value for (prefix, at, name), value in metrics.items() if (prefix, at) == ("performance", step)}
        tokens, seconds = metrics["train", step, "total_num_tokens"], metrics["timing/train", step, "total_step_time"]
        assert rates["tokens_per_sec"] == pytest.approx(tokens / seconds)
        # All rows are trained once, and their policy training takes a part of the step.
        assert rates["policy_training_tokens_per_sec"] > rates["tokens_per_sec"]
        phase = metrics["timing/train", step, "policy_training"]
        assert tokens / phase <= rates["policy_training_tokens_per_sec"] < 2 * tokens / phase
        assert 0 < rates["train_tflops"] < 2 and 0 < rates["logprob_tflops"] < 2
        assert not [name for name in rates if "gpu" in name or "utilization" in name]
        assert metrics["generation", step, "engine.0.open_requests_max"] > 0
    load = {name: value for (prefix, _, name), value in metrics.items() if prefix == "ray"}
    assert load["node.0.gpu.0.util"] == 87.0 and load["node.0.gpu.0.mem_gb"] == 40.0
    assert load["node.0.processes.mem_gb"] > 0.5 and 0 < load["node.0.cpu_util"] <= 100
    steps = [value for (prefix, _, name), value in metrics.items() if (prefix, name) == ("ray", "train_step")]
    assert steps == sorted(steps) and set(steps) <= {0.0, 1.0, 2.0, 3.0}

    panels = json.loads(DASHBOARD.read_text())["panels"]
    shown = {
        name for panel in panels for target in panel["targets"] for name in re.findall(r"nemo_rl_\w+", target["expr"])
    }
    assert len(shown) > 30
    assert shown - ONLY_SOMETIMES.keys() <= names, sorted(shown - ONLY_SOMETIMES.keys() - names)
    assert ONLY_SOMETIMES.keys() <= shown and not ONLY_SOMETIMES.keys() & names
