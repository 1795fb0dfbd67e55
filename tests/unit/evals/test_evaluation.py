"""The loop of an evaluation: what it stores, how it resumes, what it refuses."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from eval_helpers import StoppingRunner, eval_config, make_prompts, make_sampler

from nemo_rl.config.runs.eval import EvalMasterConfig
from nemo_rl.evals import evaluator
from nemo_rl.evals.evaluator import Sampler, ask_all, evaluate
from nemo_rl.evals.records import AnswerRecord, RecordStore
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.utils.errors import CheckpointError, ConfigError, RunInterruptedError

SMALL = ("data.num_samples=7", "eval.num_tests_per_prompt=2", "generation.max_new_tokens=24")


@pytest.fixture
def loop():
    loop = EventLoopThread()
    yield loop
    loop.close()


def _ask(config: EvalMasterConfig, loop: EventLoopThread, stop_at: int | None = None) -> list[AnswerRecord]:
    """Return all answers, or those stored before the runner fails in collection `stop_at`."""
    prompts = make_prompts(config)
    sampler, _ = make_sampler(config, loop)
    if stop_at is not None:
        sampler = Sampler(StoppingRunner(sampler.runner, stop_at), sampler.sampling)
    store = RecordStore(config, len(prompts))
    try:
        ask_all(config, prompts, store, sampler)
    except KeyboardInterrupt:
        assert stop_at is not None
    finally:
        store.close()
    return store.records


def test_answers_do_not_depend_on_batch_size_or_on_a_restart(loop, tmp_path) -> None:
    whole = _ask(eval_config(*SMALL, "generation.num_prompts_per_step=-1"), loop)
    assert [(r.idx, r.sample) for r in whole] == [(i, s) for i in range(7) for s in (0, 1)]
    assert len({r.response for r in whole}) > 5
    assert all(r.is_correct == (r.answer == r.ground_truth) for r in whole)
    assert whole[0].prompt.startswith("<|im_start|>user\n")

    folder = f"eval.save_path={tmp_path}"
    stopped = _ask(eval_config(*SMALL, folder, "generation.num_prompts_per_step=2"), loop, stop_at=2)
    assert stopped == whole[:8]
    file = tmp_path / "evaluation_data.jsonl"
    with file.open("a") as half_written:
        half_written.write(file.read_text().splitlines()[0] + '\n{"idx": 4, "sam')
    resumed = _ask(eval_config(*SMALL, folder, "generation.num_prompts_per_step=3"), loop)
    assert resumed == whole
    assert [json.loads(line)["idx"] for line in file.read_text().splitlines()] == [r.idx for r in whole]


def test_a_finished_evaluation_starts_nothing(loop, tmp_path, monkeypatch) -> None:
    config = eval_config(*SMALL, f"eval.save_path={tmp_path}")
    records = _ask(config, loop)
    monkeypatch.setattr(evaluator, "init_ray", lambda: pytest.fail("Ray was started"))
    report = evaluate(config)
    assert report.score.value == pytest.approx(sum(r.is_correct for r in records) / len(records))
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["score"]["value"] == report.score.value
    assert stored["metric"] == "pass@1"
    again = evaluate(eval_config(*SMALL, f"eval.save_path={tmp_path}", "eval.k_value=2", "eval.metric=cons@k"))
    assert again.metric == "cons@2"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("generation.temperature=0.5", "generation.temperature was 1.0 and is 0.5"),
        ("eval.num_tests_per_prompt=3", "eval.num_tests_per_prompt was 2 and is 3"),
        ("data.seed=7", "data.seed was 42 and is 7"),
        ("generation.backend=hf", "generation.backend was 'vllm' and is 'hf'"),
    ],
)
def test_another_configuration_is_refused(loop, tmp_path, override, told) -> None:
    folder = f"eval.save_path={tmp_path}"
    _ask(eval_config(*SMALL, folder), loop)
    before = (tmp_path / "evaluation_data.jsonl").read_bytes()
    changed = eval_config(*SMALL, folder, override)
    with pytest.raises(ConfigError, match="holds answers of another evaluation") as refusal:
        RecordStore(changed, 7)
    assert told in str(refusal.value)
    assert (tmp_path / "evaluation_data.jsonl").read_bytes() == before


def test_another_model_under_the_same_name_is_refused(loop, tmp_path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in Path(eval_config().generation.model_name).iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    overrides = (*SMALL, f"eval.save_path={tmp_path}/out", f"generation.model_name={model}")
    _ask(eval_config(*overrides), loop)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    with pytest.raises(ConfigError, match=r"model\.safetensors was '\d+ bytes, changed at"):
        RecordStore(eval_config(*overrides), 7)


def test_a_damaged_line_is_named(loop, tmp_path) -> None:
    config = eval_config(*SMALL, f"eval.save_path={tmp_path}")
    _ask(config, loop)
    file = tmp_path / "evaluation_data.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:3], "nonsense\n", *lines[4:]]))
    with pytest.raises(CheckpointError, match=r"evaluation_data\.jsonl:4 is not an answer"):
        RecordStore(config, 7)
    file.write_text("".join([*lines[:2], *lines[4:]]))
    with pytest.raises(CheckpointError, match="holds answer 0 of prompt 2, expected answer 0 of prompt 1"):
        RecordStore(config, 7)


def test_a_majority_needs_extracted_answers(monkeypatch) -> None:
    from nemo_rl.environments.math_environment import MathEnvironment

    monkeypatch.setattr(MathEnvironment, "gives_answers", False)
    with pytest.raises(ConfigError, match="MathEnvironment.* gives none"):
        evaluate(eval_config("eval.metric=cons@k"))


def test_prompts_that_are_too_long_are_not_sampled_and_count_as_wrong(loop) -> None:
    config = eval_config(*SMALL, "data.max_input_seq_length=4")
    records = _ask(config, loop)
    assert {r.outcome for r in records} == {"prompt_too_long"}
    assert not any(r.is_correct or r.response for r in records)


def test_a_signal_ends_an_evaluation_after_its_batch(loop, tmp_path) -> None:
    config = eval_config(*SMALL, f"eval.save_path={tmp_path}", "generation.num_prompts_per_step=2")
    prompts = make_prompts(config)
    sampler, _ = make_sampler(config, loop)
    store = RecordStore(config, len(prompts))
    with evaluator.deferred_signals(config) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(RunInterruptedError, match="SIGTERM was received. The answers to 2 of 7 prompts") as error:
            ask_all(config, prompts, store, sampler, signals)
    store.close()
    assert error.value.exit_status == 75
    assert len((tmp_path / "evaluation_data.jsonl").read_text().splitlines()) == 4
    assert _ask(config, loop) == _ask(eval_config(*SMALL), loop)


def test_only_answers_about_images_have_the_entry(tmp_path) -> None:
    config = eval_config("eval.num_tests_per_prompt=2", f"eval.save_path={tmp_path}")
    plain = AnswerRecord(0, 0, "p", "r", "1", "1", 1.0, "finished", 1)
    seen = replace(plain, sample=1, images=[{"digest": "ab", "source": "a.png", "size": [28, 14], "tokens": [3, 7]}])
    store = RecordStore(config, 1)
    store.append([plain, seen])
    store.close()
    lines = [json.loads(line) for line in (tmp_path / "evaluation_data.jsonl").read_text().splitlines()]
    assert [line.get("images") for line in lines] == [None, seen.images]
    again = RecordStore(config, 1)
    assert again.records == [plain, seen]
    again.close()
