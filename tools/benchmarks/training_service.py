"""Measure the training service: tokens per second of tenants, latency of samples, memory of adapters.

    uv run --extra cpu --extra test python tools/benchmarks/training_service.py
    uv run --extra cpu --extra test python tools/benchmarks/training_service.py \
        --model models/SmolLM2-135M-Instruct --precision bfloat16

It prints a Markdown table. A step is a forward_backward of `--rows` sequences of `--length` tokens and an optim_step.
`in-process` calls the service's models directly, so the difference to one tenant is HTTP, the library of the client and
the service's files. Four tenants are four clients on threads of one program, each with its own adapter. Memory is the
proportional set size of all processes of the service, before and after eight adapters made their first update.
Linux only; use an idle machine.
"""

import argparse
import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from side_by_side import ROOT, pss_mb, tree_of
from tinker import types

from nemo_rl.config import load_config
from nemo_rl.config.runs.service import ServiceMasterConfig
from nemo_rl.models.adapters.tensors import AdapterShape
from nemo_rl.models.adapters.training import AdamParams
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.serving.interfaces import LossSpec, TrainingDatum
from nemo_rl.serving.models import open_models

CONFIG = ROOT / "examples/configs/serve_cpu.yaml"
NEW_TOKENS = 32
NUM_SAMPLES = 8
NUM_ADAPTERS = 8
NUM_TENANTS = 4
STEP = {"learning_rate": 1e-4}


def overrides_of(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Return the keys of both sides over those of the shipped configuration."""
    return [
        f"policy.model_name={arguments.model}",
        f"policy.precision={arguments.precision}",
        f"policy.max_total_sequence_length={max(128, arguments.length + 1)}",
        "service.model_aliases=[served]",
        f"service.state_dir={folder / 'state'}",
        f"service.log_dir={folder / 'logs'}",
        "service.max_resident_models=64",
        "service.max_models_per_key=64",
        "service.port=0",
        *arguments.overrides,
    ]


def sequences(arguments: argparse.Namespace, seed: int) -> np.ndarray:
    """Return random tokens `[rows, length + 1]`."""
    return np.random.default_rng(seed).integers(5, 250, (arguments.rows, arguments.length + 1))


def timed(step: Callable[[int], None], steps: int) -> float:
    """Return the median seconds of a step after one that does not count."""
    seconds = []
    for number in range(steps + 1):
        begin = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def in_process(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return seconds of a step and of a sample through the models without HTTP."""
    config = load_config(CONFIG, overrides_of(arguments, folder), schema=ServiceMasterConfig)
    models = open_models(config.policy, config.cluster, 0)
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    ones = np.ones(arguments.length, np.float32)
    rows = sequences(arguments, 0)
    data = [TrainingDatum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": ones}) for row in rows]
    with asyncio.Runner() as runner:
        runner.run(models.create("one", AdapterShape(rank=8)))

        def step(number: int) -> None:
            runner.run(models.run_pass("one", data, LossSpec("cross_entropy"), backward=True))
            runner.run(models.update("one", AdamParams(**STEP)))

        def sample(number: int) -> None:
            runner.run(models.sample("first", rows[0, :16].tolist(), params, seed=number))

        step_s = timed(step, arguments.steps)
        runner.run(models.publish("one", "first"))
        sample_s = timed(sample, NUM_SAMPLES)
    models.close()
    return {"step": step_s, "sample": sample_s}


@contextmanager
def served(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[str, int]]:
    """Give the address and the process id of a service."""
    command = [sys.executable, "-m", "nemo_rl", "serve", str(CONFIG), *overrides_of(arguments, folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        assert process.stdout is not None
        found = re.match(r"Serving on (\S+)", process.stdout.readline())
        assert found is not None, "the service did not start"
        try:
            yield found[1], process.pid
        finally:
            process.send_signal(signal.SIGTERM)


def datums(rows: np.ndarray) -> list[types.Datum]:
    """Return sequences in the form of the client's library."""
    length = rows.shape[1] - 1
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": types.TensorData(data=row[1:].tolist(), dtype="int64", shape=[length]),
                "weights": types.TensorData(data=[1.0] * length, dtype="float32", shape=[length]),
            },
        )
        for row in rows
    ]


def trainer_of(url: str, rank: int) -> Any:
    """Return a training client of a session of its own."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
    return service.create_lora_training_client(base_model="served", rank=rank, seed=0).result()


def train(trainer: Any, data: list[types.Datum]) -> None:
    """Make a step as a program does: both requests at once, and then their results."""
    passed = trainer.forward_backward(data, "cross_entropy")
    updated = trainer.optim_step(types.AdamParams(**STEP))
    passed.result()
    updated.result()


def through_http(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the seconds of a step of one tenant and of four at once, of a sample, and MB for an adapter."""
    data = datums(sequences(arguments, 0))
    found: dict[str, float] = {}
    with served(arguments, folder) as (url, pid):
        trainers = [trainer_of(url, 8) for _ in range(NUM_TENANTS)]
        found["step"] = timed(lambda number: train(trainers[0], data), arguments.steps)
        with ThreadPoolExecutor(NUM_TENANTS) as threads:

            def together(number: int) -> None:
                list(threads.map(lambda trainer: train(trainer, data), trainers))

            found["step of all"] = timed(together, max(2, arguments.steps // 2))
        sampler = trainers[0].save_weights_and_get_sampling_client().result()
        prompt = data[0].model_input.to_ints()[:16]

        def sample(number: int) -> None:
            params = types.SamplingParams(max_tokens=NEW_TOKENS, stop=[], seed=number)
            sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result()

        found["sample"] = timed(sample, NUM_SAMPLES)
        for rank in (32, 8, 32):  # the first ones fill memory that is free already
            before = pss_mb(tree_of(pid))
            for trainer in [trainer_of(url, rank) for _ in range(NUM_ADAPTERS)]:
                train(trainer, data[:1])
            found[f"memory of rank {rank}"] = (pss_mb(tree_of(pid)) - before) / NUM_ADAPTERS
    return found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/assets/tiny-chat", help="folder of the base model")
    parser.add_argument("--precision", default="float32", help="of the base model")
    parser.add_argument("--rows", type=int, default=8, help="sequences of a forward_backward")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=10, help="steps of each measurement")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further keys of the service")
    arguments = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        without, through = in_process(arguments, Path(folder) / "own"), through_http(arguments, Path(folder) / "http")
    tokens = arguments.rows * arguments.length
    lines = {
        "tokens/s, in-process": f"{tokens / without['step']:,.0f}",
        "tokens/s, one tenant": f"{tokens / through['step']:,.0f}",
        f"tokens/s, {NUM_TENANTS} tenants together": f"{NUM_TENANTS * tokens / through['step of all']:,.0f}",
        f"seconds for {NEW_TOKENS} tokens, in-process": f"{without['sample']:.3f}",
        f"seconds for {NEW_TOKENS} tokens, through HTTP": f"{through['sample']:.3f}",
        "MB for an adapter of rank 8": f"{through['memory of rank 8']:.1f}",
        "MB for an adapter of rank 32": f"{through['memory of rank 32']:.1f}",
    }
    print(f"| {Path(arguments.model).name}, {arguments.precision}, {arguments.rows} x {arguments.length} tokens | |")
    print("|---|---:|")
    for name, value in lines.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
