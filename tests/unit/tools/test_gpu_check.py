"""The runner of `tools/gpu_check.py`, its arithmetic, and faults that its checks must find.

The whole program runs in `tests/functional/test_gpu_check_cpu.py`.
"""

import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_checks import batch_invariance, memory, persistence, runner, shared_prefixes, weight_sync
from gpu_checks.attention import kernels
from gpu_checks.bench import Bench
from gpu_checks.plan import CHECKS, chosen
from gpu_checks.report import Report, Row, table_line
from gpu_checks.runner import Check, Runner, Setting

from nemo_rl.distributed.ranks.placements import held_here
from nemo_rl.models.attention import kernels as attention_kernels
from nemo_rl.models.dtensor.checkpoints import model_files as checkpoint_io
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.worker import GenerationWorker
from nemo_rl.models.policy.workers.rank import PolicyRank
from nemo_rl.utils.errors import ConfigError, WeightSyncError
from nemo_rl.weight_sync.transport import SharedMemorySender

SETTING = Setting(cpu=True, folder="", bench="sample_checks:Stand")


@pytest.fixture(autouse=True)
def sample_checks_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def _check(function: str, deadline_s: float = 30.0) -> Check:
    return Check(function, "correctness", f"sample_checks:{function}", deadline_s)


def _rows(checks: list[Check], setting: Setting = SETTING, budget_s: float = 60.0) -> tuple[Runner, list[Row]]:
    running = Runner(setting, budget_s)
    try:
        return running, list(running.rows(checks))
    finally:
        running.close()


def test_each_check_ends_with_its_own_status() -> None:
    names = ["counts", "finds_a_problem", "counts", "raises", "counts", "hangs", "dies", "counts"]
    began = time.monotonic()
    ended, rows = _rows([_check(name, 0.5 if name == "hangs" else 120.0) for name in names], budget_s=300.0)
    assert time.monotonic() - began < 60, "the one that hangs would take a minute"
    assert ended.machine == {"device": "none"}
    assert [(row.check, row.status) for row in rows] == [
        ("counts", "ok"),
        ("finds_a_problem", "ok"),
        ("finds_a_problem", "failed"),
        ("counts", "ok"),
        ("raises", "ok"),
        ("raises", "failed"),
        ("counts", "ok"),
        ("hangs", "ok"),
        ("hangs", "failed"),
        ("dies", "ok"),
        ("dies", "failed"),
        ("counts", "ok"),
    ]
    # A problem is sent from the process, an exception is not.
    assert [row.figures["calls"] for row in rows if row.check == "counts"] == [1, 2, 1, 1]
    reasons = {row.check: row.reason for row in rows if row.status == "failed"}
    assert reasons == {
        "finds_a_problem": "too large",
        "raises": "ValueError: planted",
        "hangs": "no answer within 0.5 s",
        "dies": "its process ended with status 7",
    }
    assert "sample_checks.py" in next(row.trace for row in rows if row.reason == "ValueError: planted")


def test_checks_beyond_the_time_budget_are_skipped(monkeypatch) -> None:
    monkeypatch.setattr(runner, "_LEAST_S", 0.1)
    _, rows = _rows([_check("counts"), _check("hangs"), _check("counts")], budget_s=3.0)
    assert [(row.check, row.status) for row in rows] == [
        ("counts", "ok"),
        ("hangs", "ok"),
        ("hangs", "skipped"),
        ("counts", "skipped"),
    ]
    assert rows[-1].reason == "the budget of 3 s is spent"
    assert not Report(rows=rows).failures()


def test_a_check_with_an_environment_has_its_own_process() -> None:
    own = dataclasses.replace(_check("counts"), environment=(("PLANTED", "here"),))
    _, rows = _rows([_check("counts"), own, own, _check("counts")])
    found = [(row.figures["calls"], row.figures["planted"]) for row in rows]
    assert found == [(1, ""), (1, "here"), (2, "here"), (1, "")]


def test_a_device_that_cannot_be_used_is_one_failure() -> None:
    setting = dataclasses.replace(SETTING, folder="unusable")
    _, rows = _rows([_check("counts"), _check("counts")], setting)
    assert [(row.status, row.reason) for row in rows] == [
        ("failed", "ValueError: no device here"),
        ("skipped", "no process for checks can be started"),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_check_gives_the_reason_and_advice(tmp_path) -> None:
    with pytest.raises(ConfigError, match="this process sees no CUDA device"):
        Bench(Setting(cpu=False, folder=str(tmp_path)))


def test_results_are_written_as_table_and_json(tmp_path) -> None:
    rows = [
        Row("policy", "gradients", "correctness", "failed", {"error": 0.25, "kernel": "flash"}, "too far", seconds=1.5),
        Row("training step", "packs", "speed", "failed", {"tokens_per_s": 12345.6, "mfu": None}, "out of memory"),
    ]
    report = Report({"device": "none"}, rows, 3.0)
    assert report.failures() == rows[:1]  # a speed that was not measured is not a wrong result
    first, reason = table_line(rows[0]).splitlines()
    assert first.startswith("failed  correct  policy: gradients ") and first.endswith("error=0.25  kernel=flash")
    assert reason.strip() == "too far"
    assert table_line(rows[1]).splitlines()[0].endswith("tokens_per_s=12,346  mfu=-")
    report.write_json(tmp_path / "r.json")
    read = json.loads((tmp_path / "r.json").read_text())
    assert (read["machine"], read["rows"][0]["figures"]["error"]) == ({"device": "none"}, 0.25)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert report.summary() == "0 ok, 2 failed, 0 skipped in 3 s"


def test_checks_are_chosen_by_name() -> None:
    assert [check.name for check in chosen(["sync", "lora"])] == ["weight sync", "sync bandwidth", "lora"]
    assert [check.name for check in chosen(["expandable"])] == ["expandable segments"]
    assert chosen([]) == list(CHECKS)
    with pytest.raises(SystemExit, match="Names: attention"):
        chosen(["no such check"])


def test_speeds_are_measured_before_the_slow_comparisons() -> None:
    """Eight minutes on one GPU end with figures of speed, after what they rest on has been checked."""
    names = [check.name for check in CHECKS]
    first = names.index("training step")
    assert {"policy", "weight sync", "late broadcast", "memory", "offload", "adamw"} <= set(names[:first])
    assert {check.kind for check in CHECKS[:first]} == {"correctness"}
    assert names[first + 1 : first + 3] == ["sync bandwidth", "one microbatch"]
    for slow in ("compiled layers", "large model", "lora", "cached tokens", "float8"):
        assert names.index(slow) > names.index("long rows")


@pytest.fixture
def bench(tmp_path) -> Iterator[Bench]:
    before, threads, path = dict(os.environ), torch.get_num_threads(), list(sys.path)
    bench = Bench(Setting(cpu=True, folder=str(tmp_path)))
    yield bench
    bench.end_engine()
    bench.end_policy()
    os.environ.clear()
    os.environ.update(before)
    torch.set_num_threads(threads)
    sys.path[:] = path


def test_attention_that_sees_too_much_is_found(bench, monkeypatch) -> None:
    assert not any(finding.problem for finding in kernels(bench))
    mask = attention_kernels._mask
    monkeypatch.setattr(
        attention_kernels,
        "_mask",
        lambda query, key, scoring: mask(query, key, dataclasses.replace(scoring, window=None)),
    )
    problems = {finding.name: finding.problem for finding in kernels(bench)}
    assert problems["float32, window None"] == ""
    assert problems["float32, window 16"] == problems["bfloat16, window 16"] == "differs from dense attention"


def test_answers_that_ignore_their_prompt_are_found(bench, monkeypatch) -> None:
    assert not any(finding.problem for finding in shared_prefixes.kernels(bench))
    mask = attention_kernels._mask

    def top_left(query, key, scoring):
        whole = mask(query, key, scoring)
        return whole if query.shape[2] == key.shape[2] else torch.ones(whole.shape, dtype=torch.bool).tril()

    monkeypatch.setattr(attention_kernels, "_mask", top_left)
    problems = [finding.problem for finding in shared_prefixes.kernels(bench)]
    assert "differs from dense attention" in problems


def test_a_policy_that_shares_no_prompts_is_found(bench, monkeypatch) -> None:
    monkeypatch.setattr(shared_prefixes, "TINY_ON_CPU", ("qwen2",))
    assert not any(finding.problem for finding in shared_prefixes.policy(bench))
    monkeypatch.setattr(PolicyRank, "shares_prompts", lambda self: False)
    assert {finding.problem for finding in shared_prefixes.policy(bench)} == {"the policy shares no prompts"}


def test_an_engine_whose_answers_may_depend_on_others_is_found(bench) -> None:
    plain = dataclasses.replace(batch_invariance.settings(bench, "hf"), zero_mismatch=False)
    assert "depend in their last bits" in batch_invariance.problem(bench, plain)


def test_memory_beyond_the_prediction_is_found(bench, monkeypatch) -> None:
    assert not any(finding.problem for finding in memory.predicted(bench))
    monkeypatch.setattr(bench, "peak_gib", lambda: 1.0)
    problems = {finding.name: finding.problem for finding in memory.predicted(bench)}
    assert problems["training, recomputing selected"] == "more than predicted"
    assert problems["selective recomputation"].startswith("saves nothing")


def test_a_weight_that_is_not_restored_is_found(bench, monkeypatch) -> None:
    load = checkpoint_io.load_weights

    def loads_all_but_one_number(model, folder):
        load(model, folder)
        with torch.no_grad():
            held_here(next(iter(model.parameters()))).view(-1)[0] += 1e-6

    monkeypatch.setattr(checkpoint_io, "load_weights", loads_all_but_one_number)
    found = {finding.name: finding for finding in persistence.checkpoint(bench)}
    assert found["a new rank loads it"].figures["differ"] == 1
    assert "not the same bits" in found["a new rank loads it"].problem


class EngineHere:
    """The engine's half of a sync in this process, like `EngineProcess` without the slow imports."""

    def __init__(self, settings: EngineSettings):
        self._loop, self._answers = asyncio.Runner(), []
        self._worker = GenerationWorker(settings)

    def send(self, method: str, *args: Any) -> None:
        self._answers.append(self._loop.run(getattr(self._worker, method)(*args)))

    def answer(self) -> Any:
        return self._answers.pop(0)

    def call(self, method: str, *args: Any) -> Any:
        self.send(method, *args)
        return self.answer()

    def close(self) -> None:
        self._loop.close()


def test_a_changed_byte_in_a_bucket_is_found(bench, monkeypatch) -> None:
    publish = SharedMemorySender.publish

    def damages_what_was_stamped(self, bucket):
        self.buffer(bucket.num_bytes, bucket.index)[bucket.slots[0].offset] ^= 1
        publish(self, bucket)

    monkeypatch.setattr(SharedMemorySender, "publish", damages_what_was_stamped)
    monkeypatch.setattr("gpu_checks.bench.EngineProcess", EngineHere)
    with pytest.raises(WeightSyncError, match="content differs in model.embed_tokens.weight"):
        list(weight_sync.between_processes(bench))
