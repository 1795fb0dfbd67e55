"""The limit of a control group counts, if there is one."""

import os

import pytest

from nemo_rl.distributed.cluster import local_ray
from nemo_rl.host import capacity as machine_memory


@pytest.mark.parametrize(("limit", "want"), [("1000000\n", 1_000_000), ("max\n", None), (None, None)])
def test_memory_is_limited_by_the_control_group(limit, want, monkeypatch, tmp_path) -> None:
    file = tmp_path / "memory.max"
    if limit is not None:
        file.write_text(limit)
    monkeypatch.setattr(machine_memory, "_MEMORY_OF_GROUP", file)
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine_memory.machine_bytes() == (want or installed)
    if want is not None and local_ray.object_store_bytes() is not None:
        assert local_ray.object_store_bytes() == 300_000
