"""A small run's log folder, written as the library writes it."""

import json
import math
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "examples/assets/tiny-chat"
HOSTILE = (
    "@SCRIPTS@ @DATA@ <script>document.title='owned'</script>"
    "<img src=x onerror=\"document.title='owned'\">\u202e</script>\x07&amp;"
)


def grey_png(level: int) -> bytes:
    """Return a file with a picture of one pixel."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    parts = (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)), (b"IDAT", zlib.compress(bytes([0, level])))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in (*parts, (b"IEND", b"")))


def row(step: int, group: int, sample: int, text: str, reward: float | None = 1.0, **more: Any) -> dict[str, Any]:
    ids = [5, 6, 7, 8]
    return {
        "idx": 100 + group,
        "group": group,
        "sample": sample,
        "task_name": "math",
        "content": [{"role": "user", "content": f"question {group}"}, {"role": "assistant", "content": text}],
        "rewards": reward,
        "turn_rewards": [] if reward is None else [reward],
        "outcome": "finished" if reward is not None else "reward_error",
        "response_length": 2 + sample,
        "token_ids": ids,
        "token_loss_mask": [0, 0, 1, 1],
        "generation_logprobs": [0.0, 0.0, -0.25, -1.5],
        "prev_logprobs": [0.0, 0.0, -0.25, -1.25],
        "values": [0.0, 0.0, 0.5, 0.75],
        "advantages": [0.0, 0.0, 1.0, 1.0],
        "weight_versions": [[2, step - 1]],
        **more,
    }


def write_run(
    folder: Path,
    steps: int = 6,
    seed: int = 1,
    text: str = "an answer",
    *,
    number: int = 1,
    first: int = 1,
    config: Mapping[str, Any] = MappingProxyType({}),
    record: Mapping[str, Any] = MappingProxyType({}),
    **metrics: list[float],
) -> Path:
    """Write a run of GRPO; `metrics` are columns of `train/`.

    Args:
        folder: the folder of all runs.
        steps: the last step.
        seed: its seed.
        text: the answer of each sample.
        number: number of the run in the folder.
        first: the first step.
        config: more sections of its configuration.
        record: more entries of its record.
    """
    run = folder / f"exp_{number:03d}"
    run.mkdir(parents=True)
    written = {
        "policy": {"model_name": str(TINY), "generation": {"backend": "vllm"}},
        "grpo": {"max_num_steps": steps, "seed": seed, "num_prompts_per_step": 2},
        **config,
    }
    (run / "config.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")
    started = {"status": "finished", "started": 1000.0, "ended": 1100.0, "command": ["run_grpo.py"], "host": "here"}
    (run / "run.json").write_text(json.dumps(started | dict(record)), encoding="utf-8")
    (run / "metrics.jsonl").touch()
    for step in range(first, steps + 1):
        add_step(
            run, step, {"reward": step / steps} | {name: column[step - first] for name, column in metrics.items()}, text
        )
    return run


def add_step(run: Path, step: int, metrics: dict[str, float], text: str) -> None:
    """Append a step's metrics and samples."""
    numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    timing = {
        "idle/buffer_starvation": 0.5,
        "exposed_generation": 1.0,
        "generation": 1.0,
        "policy_training": 2.0,
        "total_step_time": 4.0,
        "checkpointing": 0.5,
    }
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for prefix, values in (("train", numbers), ("timing/train", timing)):
            line = {"step": step, "prefix": prefix, "metrics": values, "time": 1000.0 + 10 * step}
            file.write(json.dumps(line) + "\n")
    rows = [row(step, group, sample, text) for group in range(2) for sample in range(2)]
    path = run / f"train_data_step{step}.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
