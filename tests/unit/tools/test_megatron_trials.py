"""The results of Megatron Core are stored by cell, so the tool continues where it was stopped."""

from pathlib import Path

import megatron_trials
import pytest

from nemo_rl.commands.doctor.model_cells import Cell, TrialResult


@pytest.fixture
def asked(monkeypatch) -> list[tuple[str, list[str]]]:
    """Replace the trials by their names."""
    found: list[tuple[str, list[str]]] = []

    def trials_on(mesh, types, seed):
        found.append((mesh, [*types]))
        for name in types:
            for rows in ("padded", "packed"):
                cell = Cell("Megatron Core", f"{mesh}, {rows}", TrialResult.RIGHT, "float32", 1.23e-6)
                yield megatron_trials.trial_of(name, seed, cell)

    monkeypatch.setattr(megatron_trials, "trials_on", trials_on)
    monkeypatch.setattr(megatron_trials, "be_quiet", lambda: None)  # it would end the logging of other tests
    return found


def test_stored_cells_are_not_tried_again(asked, tmp_path: Path) -> None:
    store = tmp_path / "store.jsonl"
    given = ["--store", str(store), "--meshes", "TP 2,one rank"]
    assert megatron_trials.main([*given, "--types", "qwen3,llama"]) == 0
    assert megatron_trials.main([*given, "--types", "llama,gpt_oss"]) == 0
    assert asked == [
        ("TP 2", ["qwen3", "llama"]),
        ("one rank", ["qwen3", "llama"]),
        ("TP 2", ["gpt_oss"]),
        ("one rank", ["gpt_oss"]),
    ]
    assert megatron_trials.main([*given, "--types", "llama", "--variant", "3"]) == 0
    trials = [*megatron_trials.stored(store).values()]
    assert len(trials) == 16
    assert [(each.model_type, each.what, each.seed) for each in trials[4:10]] == [
        ("llama", "one rank, padded", None),
        ("llama", "one rank, packed", None),
        ("llama", "TP 2, padded", None),
        ("llama", "TP 2, packed", None),
        ("llama", "one rank, padded", 3),
        ("llama", "one rank, packed", 3),
    ]


def test_types_are_those_that_megatron_core_trains() -> None:
    types = megatron_trials.known_types()
    assert {"llama", "nemotron_h", "qwen3_5", "qwen3_next", "gpt_oss", "deepseek_v3"} <= {*types}
    assert "olmo2" not in types
