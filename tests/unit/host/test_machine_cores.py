"""Cores that a process may use, with and without a limit of its control group."""

import os

import pytest

from nemo_rl.host import capacity as machine_cores

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("limit", "want"),
    [
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("max 100000", None),
        ("9900000 100000", None),
        ("", None),
        (None, None),
    ],
)
def test_the_control_group_limits_the_cores(tmp_path, monkeypatch, limit, want):
    file = tmp_path / "cpu.max"
    if limit is not None:
        file.write_text(limit + "\n")
    monkeypatch.setattr(machine_cores, "_CORES_OF_GROUP", file)
    assert machine_cores.usable_cores() == (want or len(os.sched_getaffinity(0)))


def test_a_fraction_of_a_core_counts_as_one(tmp_path, monkeypatch):
    file = tmp_path / "cpu.max"
    file.write_text("250000 100000\n")
    monkeypatch.setattr(machine_cores, "_CORES_OF_GROUP", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert machine_cores.usable_cores() == 3
