"""Measure tokens per second of the library's generation phase, and of vLLM alone with the same requests.

    uv run --extra cpu python tools/benchmarks/bare_vllm.py [--workload uniform] [--size 1m] [--threads 1 2]

"vLLM alone" is `LLM.generate` in a separate process, once for each number of threads: the same model, prompts, sampling
and log-probabilities, and no other process that uses the cores. The library's side is the GRPO run of `grpo_vs_trl`
with a learning rate of 0, so that the model does not change. Its time is a step's generation phase as the driver
measures it, including rewards, Ray's calls and tensors. Linux only; use an idle machine.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace

from grpo_vs_trl import SAMPLES_PER_STEP, own_command, read_own, tokens_per_second
from side_by_side import BENCH, ROOT, WARM_UP_STEPS, ratio, run_side, show
from workloads import SIZES, WORKLOADS, find_model, prompts_of

logger = logging.getLogger("bare_vllm")

SAMPLES_PER_PROMPT = 8
CHILD = "--in-this-process"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
}
"""The library's engine settings, except for the threads."""


def bare(workload: str, size: str, steps: int) -> float:
    """Return the median tokens per second of vLLM in this process."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    folder, limits = str(find_model(workload, size)), WORKLOADS[workload]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    llm = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=limits.max_total_tokens,
        max_num_seqs=128,
        kv_cache_memory_bytes=256 << 20,
    )
    problems, rates = prompts_of(workload), []
    for step in range(steps + WARM_UP_STEPS):
        first = step * SAMPLES_PER_STEP // SAMPLES_PER_PROMPT
        rows = problems[first : first + SAMPLES_PER_STEP // SAMPLES_PER_PROMPT]
        chats = [[{"role": "user", "content": row["problem"]}] for row in rows for _ in range(SAMPLES_PER_PROMPT)]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
        params = [
            SamplingParams(max_tokens=limits.max_new_tokens, seed=step * SAMPLES_PER_STEP + row, logprobs=0)
            for row in range(len(prompts))
        ]
        began = time.perf_counter()
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        rates.append(sum(len(answer.outputs[0].token_ids) for answer in answers) / (time.perf_counter() - began))
    return statistics.median(rates[WARM_UP_STEPS:])


def run_bare(arguments: argparse.Namespace, threads: int) -> float:
    """Run `bare` in a process with `threads` threads."""
    command = [sys.executable, __file__, CHILD, "--workload", arguments.workload, "--size", arguments.size]
    environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--steps", str(arguments.steps)], env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    return float(done.stdout.splitlines()[-1])


def run_own(arguments: argparse.Namespace) -> float:
    """Return the median tokens per second of the generation phase of the library's run."""
    folder = BENCH / "runs" / f"bare-{arguments.workload}-{arguments.size}-{int(time.time())}"
    folder.mkdir(parents=True)
    threads = max(arguments.threads)
    settings = SimpleNamespace(steps=arguments.steps + WARM_UP_STEPS, seed=42, threads=threads)
    command, metrics = own_command(arguments.workload, arguments.size, folder, settings)
    run = run_side([*command, "policy.optimizer.kwargs.lr=0.0"], metrics, read_own, folder / "own.log", threads)
    return tokens_per_second(run, generated=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workload", default="uniform", choices=list(WORKLOADS))
    parser.add_argument("--size", default="1m", choices=list(SIZES), help="parameters of the model")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="threads of vLLM; nemo_rl: the most")
    parser.add_argument("--steps", type=int, default=30, help="measured batches of 64 requests")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side, alternating")
    parser.add_argument(CHILD, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run all sides alternately and print the table."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments = parse_arguments()
    if arguments.in_this_process:
        print(bare(arguments.workload, arguments.size, arguments.steps))
        return
    BENCH.mkdir(exist_ok=True)
    rates: dict[str, list[float]] = {}
    for _ in range(arguments.repeats):
        for threads in arguments.threads:
            rates.setdefault(f"vLLM alone, OMP_NUM_THREADS={threads}", []).append(run_bare(arguments, threads))
        rates.setdefault("nemo_rl, generation phase", []).append(run_own(arguments))
        logger.info("%s", json.dumps(rates))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(value for name, value in medians.items() if name.startswith("vLLM"))
    print("| | tokens/s, median | runs | to the best of vLLM alone |\n|---|---:|---|---:|")
    for name, values in rates.items():
        print(f"| {name} | {show(medians[name])} | {', '.join(map(show, values))} | {ratio(medians[name], best)} |")


if __name__ == "__main__":
    main()
