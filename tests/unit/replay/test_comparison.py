"""Two records of a step compared: what is named first, what counts as equal, what is told to people and programs."""

import io
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from nemo_rl.commands.replay.compare import compare, configuration, configuration_notes
from nemo_rl.commands.replay.findings import (
    Compared,
    Comparison,
    Tolerances,
    chosen,
    circumstances,
    code_notes,
    factor_of,
    tolerances,
)
from nemo_rl.commands.replay.records import Step
from nemo_rl.commands.replay.run import write_text
from nemo_rl.config.rules.resume import ChangedKey
from nemo_rl.models.policy.update_records import UpdateRecord
from nemo_rl.models.training.tensor_checks import fingerprint
from nemo_rl.utils.errors import ReplayError

EXACT = Tolerances()
DATA = Compared("prompts in the data", 2)
NAMES = ("model.layers.0.weight", "model.layers.1.weight", "lm_head.weight")
PREV = torch.tensor([[0.0, -1.0, -2.0, -3.0], [0.0, -1.0, -2.0, 0.0]])
MODULES = ("model.embed", "model.layers.0.mlp", "model.layers.1.mlp.act", "model.layers.1.mlp", "model.layers.1")


def numbers(seed: int, size: int = 40) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def prints(seed: int, changed: dict[str, float] | None = None, names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    """Fingerprints of random tensors by name; `changed` scales some."""
    changed = changed or {}
    return {name: fingerprint(numbers(seed + n) * (1 + changed.get(name, 0.0))) for n, name in enumerate(names)}


def update(**changes: Any) -> UpdateRecord:
    """An update with two rows of four tokens."""
    made = UpdateRecord(
        loss=0.25,
        metrics={"kl_penalty": 0.01, "entropy": 2.0},
        grad_norm=1.0,
        lr=1e-4,
        microbatch_losses=[[0.25]],
        before=prints(10),
        gradients=prints(20),
        after=prints(30),
        modules=[list(prints(40, names=MODULES).items())],
        devices=["cpu, 1 threads"],
        logprobs={row: -numbers(50 + row, 3).abs() for row in (0, 1)},
    )
    return replace(made, **changes)


def sample(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "idx": 17,
        "group": 1,
        "sample": number,
        "branch": None,
        "task_name": "math",
        "reward": 1.0,
        "penalized_reward": 1.0,
        "outcome": "finished",
        "input_ids": "aa",
        "token_mask": "bb",
        "generation_logprobs": "cc",
    } | changes


def step(*updates: UpdateRecord, samples: list[dict[str, Any]] | None = None, **tensors: torch.Tensor) -> Step:
    return Step(
        {
            "config": {"policy": {"precision": "float32"}},
            "samples": samples or [sample(0), sample(1)],
            "environment": {"torch": "2.13.0"},
            "code": {"losses/divergence.py": "1", "losses/objectives.py": "2"},
            "layout": {"pp": 1, "dp_shard": 1},
        },
        {"advantages": torch.tensor([[0.0, 0.5, 0.5, 0.5], [0.0, -0.5, -0.5, 0.0]])} | tensors,
        list(updates or (update(),)),
    )


def result(
    now: Step, changed: list[ChangedKey] | None = None, limits: Tolerances = EXACT, data: Compared = DATA
) -> Comparison:
    return Comparison(2, compare(step(), now, changed or [], data, limits), limits.is_exact)


def test_equal_steps_are_equal_in_every_part() -> None:
    found = result(step())
    assert found.first is None and found.verdict == "Step 2 is equal to that of the run, bit for bit."
    assert [stage.name for stage in found.stages] == [
        "configuration",
        "samples",
        "prompts in the data",
        "weights before the step",
        "outputs of modules",
        "advantages",
        "log-probabilities",
        "loss and its terms",
        "gradients",
        "learning rate and gradient norm",
        "weights after the step",
    ]
    assert all(stage.compared and stage.skipped is None for stage in found.stages)


def test_a_changed_key_is_named_even_if_no_number_differs() -> None:
    key = ChangedKey("loss_fn.ratio_clip_min", 0.2, 0.1)
    found = result(step(), [key])
    assert found.first is not None and found.first.differences[0].name == "loss_fn.ratio_clip_min"
    assert "loss_fn.ratio_clip_min differs: 0.2 in the run, 0.1 now" in found.verdict
    assert "All numbers are equal nevertheless." in found.verdict


def test_keys_that_a_step_does_not_read_are_no_difference() -> None:
    keys = [ChangedKey(name, 1, 2) for name in ("logger.log_dir", "grpo.max_num_steps", "env.math.num_workers")]
    keys += [ChangedKey("policy.model_name", "here", "there", of_model=True)]
    keys += [ChangedKey("policy.train_micro_batch_size", 4, 2, of_model=True)]
    assert result(step(), keys).first is None
    assert list(configuration_notes(keys, {}, {})) == [
        "keys that are no difference by themselves have changed: logger.log_dir, grpo.max_num_steps, "
        "env.math.num_workers, policy.model_name"
    ]


def test_compared_keys_are_counted_and_those_of_one_version_are_told() -> None:
    before: dict[str, Any] = {
        "policy": {"model_name": "m", "precision": "float32", "logprob_batch_size": 1, "optimizer": {"name": "a"}},
        "grpo": {"seed": 1, "max_num_steps": 3, "old": 1, "own": {"a": 1}},
        "logger": {"log_dir": "logs"},
    }
    now = deepcopy(before)
    del now["grpo"]["old"]
    now["grpo"] |= {"new": 2, "own": {"b": 1}}
    changed = [ChangedKey("grpo.own.a", 1, "(absent)"), ChangedKey("grpo.own.b", "(absent)", 1)]
    stage = configuration(changed, before, now)
    assert [each.name for each in stage.differences] == ["grpo.own.a", "grpo.own.b"]
    assert stage.compared == len({"policy.precision", "policy.optimizer.name", "grpo.seed"}) + len(changed)
    assert list(configuration_notes(changed, before, now)) == [
        "keys that only the version of the run has: grpo.old",
        "keys that only this version has: grpo.new",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": 0.0}, "its reward is 0.0, recorded 1.0"),
        ({"input_ids": "xx"}, "its tokens"),
        ({"idx": 18, "task_name": "code"}, "its row of the data is 18, recorded 17, its environment is code, recorded"),
        ({"group": 2, "sample": 0}, "its prompt is 2, recorded 1, its number among the samples of the prompt is 0"),
        ({"branch": 1}, "its conversation is 1, recorded None"),
        (
            {"generation_logprobs": "xx", "token_mask": "yy"},
            "which of its tokens count, the engine's log-probabilities",
        ),
    ],
)
def test_a_changed_sample_is_named(changes: dict[str, Any], said: str) -> None:
    found = result(step(samples=[sample(0), sample(1, **changes)]))
    assert found.first is not None and found.first.name == "samples"
    assert f"sample 1 of prompt 1 differs from the record: {said}" in found.verdict


SCALED = dict.fromkeys(MODULES[2:], 1e-5)


@pytest.mark.parametrize(
    ("now", "stage", "name"),
    [
        (step(update(before=prints(11))), "weights before the step", NAMES[0]),
        (
            step(advantages=torch.tensor([[0.0, 0.5, 0.5, 0.5], [0.0, -0.5, -0.25, 0.0]])),
            "advantages",
            "sample 1 of prompt 1",
        ),
        (
            step(update(modules=[list(prints(40, SCALED, MODULES).items())])),
            "outputs of modules",
            "model.layers.1.mlp.act",
        ),
        (
            step(update(logprobs={0: -numbers(50, 3).abs(), 1: -numbers(52, 3).abs()})),
            "log-probabilities",
            "sample 1 of prompt 1",
        ),
        (step(update(loss=0.26, metrics={"kl_penalty": 0.02, "entropy": 2.0})), "loss and its terms", "kl_penalty"),
        (step(update(loss=0.26)), "loss and its terms", "loss"),
        (step(update(gradients=prints(20, dict.fromkeys(NAMES[:2], 1e-6)))), "gradients", NAMES[1]),
        (step(update(model_metrics={"moe_aux_loss": 0.5})), "loss and its terms", "moe_aux_loss"),
        (step(update(lr=1.1e-4)), "learning rate and gradient norm", "learning rate"),
        (step(update(grad_norm=1.0 + 1e-7)), "learning rate and gradient norm", "gradient norm"),
        (step(update(grad_norm=float("nan"))), "learning rate and gradient norm", "gradient norm"),
        (step(update(after=prints(30, {NAMES[2]: 1e-7}))), "weights after the step", NAMES[2]),
    ],
)
def test_the_first_part_and_thing_that_differs_is_named(now: Step, stage: str, name: str) -> None:
    found = result(now)
    assert found.first is not None
    assert (found.first.name, found.first.differences[0].name) == (stage, name)
    assert found.first.cause and found.first.cause in found.verdict


def test_differences_within_the_tolerances_are_equal_and_larger_ones_are_not() -> None:
    limits = tolerances("float32")
    near = update(
        loss=0.25 + 1e-6,
        grad_norm=1.0 + 1e-4,
        gradients=prints(20, dict.fromkeys(NAMES, 1e-4)),
        modules=[list(prints(40, dict.fromkeys(MODULES, 1e-6), MODULES).items())],
        logprobs={row: -numbers(50 + row, 3).abs() + 1e-5 for row in (0, 1)},
    )
    found = result(step(near), limits=limits)
    assert found.first is None and "within the tolerances" in found.verdict
    far = replace(near, gradients=prints(20, dict.fromkeys(NAMES, 0.5)))
    first = result(step(far), limits=limits).first
    assert first is not None and first.name == "gradients"
    assert result(step(near), limits=tolerances("float32", 1e-3)).first is not None
    rate = result(step(replace(near, lr=1e-4 * (1 + 1e-6))), limits=limits).first
    assert rate is not None and rate.differences[0].name == "learning rate"


def test_numbers_that_are_not_finite_differ_from_finite_ones_and_equal_each_other() -> None:
    bad = update(
        loss=float("nan"),
        grad_norm=float("nan"),
        logprobs={0: torch.full((3,), float("nan")), 1: -numbers(51, 3).abs()},
    )
    first = result(step(bad), limits=tolerances("float32")).first
    assert first is not None and first.differences[0].size == float("inf")
    stages = compare(step(bad), step(deepcopy(bad)), [], DATA, EXACT)
    assert Comparison(1, stages, True).first is None


def test_modules_that_ranks_divide_differently_are_not_compared() -> None:
    stages = compare(step(), step(update(modules=[[], []])), [], DATA, tolerances("float32"))
    skipped = {stage.name: stage.skipped for stage in stages if stage.skipped}
    assert list(skipped) == ["outputs of modules"] and "divide the work differently" in skipped["outputs of modules"]


def test_a_forward_pass_without_records_of_modules_says_how_to_get_them() -> None:
    before = step(update(modules=[[]]))
    now = step(update(modules=[[]], logprobs={0: -numbers(52, 3).abs(), 1: -numbers(51, 3).abs()}))
    verdict = Comparison(2, compare(before, now, [], DATA, EXACT), True).verdict
    assert "--add-modules" in verdict and "log-probabilities of token 1 of sample 0 of prompt 1" in verdict


def test_scores_before_the_update_ask_for_modules_too() -> None:
    before, now = (step(update(modules=[[]]), prev_logprobs=PREV * scale) for scale in (1.0, 1.01))
    verdict = Comparison(2, compare(before, now, [], DATA, EXACT), True).verdict
    assert "prev logprobs of token 1 of sample 0 of prompt 1" in verdict and "--add-modules" in verdict


def test_several_updates_are_compared_each() -> None:
    stages = compare(step(update(), update()), step(update(), update(loss=0.5)), [], DATA, EXACT)
    first = Comparison(1, stages, True).first
    assert first is not None and first.name == "loss and its terms (update 2)"


def test_another_number_of_updates_is_told_after_what_comes_before_them() -> None:
    fewer = Comparison(1, compare(step(update(), update()), step(update()), [], DATA, EXACT), True)
    assert "the run made 2 updates, the replay 1. policy.train_global_batch_size or what divides" in fewer.verdict
    assert [stage.name for stage in fewer.stages][3:] == [
        "weights before the step",
        "outputs of modules (update 1)",
        "advantages",
        "updates",
    ]
    none = replace(step(sample_mask=torch.tensor([0.0, 1.0])), updates=[])
    first = Comparison(1, compare(step(sample_mask=torch.ones(2)), none, [], DATA, EXACT), True).first
    assert first is not None and first.name == "sample mask"


@pytest.mark.parametrize("module", [True, False])
def test_a_changed_forward_pass_is_told_before_the_advantages_that_follow_from_it(module: bool) -> None:
    scaled = [list(prints(40, SCALED, MODULES).items())]
    before = step(prev_logprobs=PREV, reference_policy_logprobs=PREV, sample_mask=torch.ones(2))
    now = step(
        update(modules=scaled) if module else update(),
        prev_logprobs=PREV * 1.001,
        reference_policy_logprobs=PREV * 1.001,
        sample_mask=torch.tensor([1.0, 0.0]),
        advantages=torch.zeros(2, 4),
    )
    stages = compare(before, now, [], DATA, EXACT)
    differing = [stage.name for stage in stages if stage.differences]
    assert differing == [
        *(["outputs of modules"] if module else []),
        "prev logprobs",
        "reference policy logprobs",
        "sample mask",
        "advantages",
    ]


@pytest.mark.parametrize(
    ("now", "name", "said"),
    [
        (step(prev_logprobs=PREV), "prev logprobs", "prev logprobs: only the replay computed them"),
        (
            step(update(logprobs={0: -numbers(50, 3).abs()})),
            "sample 1 of prompt 1",
            "log-probabilities of sample 1 of prompt 1: only the run computed them",
        ),
        (
            step(update(logprobs={row: -numbers(50 + row, 3).abs() for row in (0, 1)} | {2: numbers(1, 3)})),
            "row 2",
            "log-probabilities of row 2: only the replay computed them",
        ),
        (
            step(update(logprobs={0: -numbers(50, 3).abs(), 1: torch.cat([-numbers(51, 3).abs(), torch.ones(1)])})),
            "sample 1 of prompt 1",
            "log-probabilities of token 4 of sample 1 of prompt 1: 0 in the run, 1 now",
        ),
        (step(update(metrics={"entropy": 2.0})), "kl_penalty", "loss term kl_penalty: only the run computed it"),
        (
            step(update(microbatch_losses=[[0.25, 0.0]])),
            "loss of microbatch 1 of data-parallel rank 0",
            "loss of microbatch 1 of data-parallel rank 0: only the replay computed it",
        ),
        (step(update(gradients={})), NAMES[2], f"the gradient of {NAMES[2]} is missing now"),
    ],
)
def test_what_one_side_lacks_is_a_difference(now: Step, name: str, said: str) -> None:
    found = result(now)
    assert found.first is not None and found.first.differences[0].name == name
    assert said in found.verdict


def test_zeros_after_the_end_of_a_row_are_no_difference() -> None:
    wider = {row: torch.cat([-numbers(50 + row, 3).abs(), torch.zeros(2)]) for row in (0, 1)}
    assert result(step(update(logprobs=wider))).first is None


def test_an_equal_step_says_what_was_not_compared() -> None:
    bare = update(before={}, gradients={}, after={}, modules=[[]], logprobs={})
    hides = "the training backend does not show them"
    assert Comparison(2, compare(step(bare), step(bare), [], DATA, EXACT), True).verdict == (
        f"Step 2 is equal to that of the run, bit for bit. Not compared: weights before the step ({hides}); "
        f"log-probabilities (the loss takes none of single tokens); gradients ({hides}); "
        f"weights after the step ({hides})."
    )


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda summary: summary["environment"].update(torch="2.14.0"), "torch: 2.13.0 in the run, 2.14.0 now"),
        (lambda summary: summary["layout"].update(dp_shard=2), "ranks: 1 in the run, dp_shard=2 now"),
    ],
)
def test_another_place_is_a_note_and_widens_the_comparison(change: Callable[[dict[str, Any]], None], note: str) -> None:
    now = step()
    summary = deepcopy(dict(now.summary))
    change(summary)
    limits, notes = chosen(None, step(), replace(now, summary=summary), [])
    assert notes == [note] and limits == tolerances("float32")
    assert chosen(0.0, step(), replace(now, summary=summary), [])[0] == EXACT


def test_the_same_place_compares_bits_unless_a_factor_is_given() -> None:
    assert chosen(factor_of("auto"), step(), step(), []) == (EXACT, [])
    assert chosen(factor_of("2"), step(), step(), [])[0] == tolerances("float32", 2.0)
    assert chosen(factor_of("exact"), step(), step(), [])[0] == EXACT
    for wrong in ("-1", "0", "near", "nan", "inf"):
        with pytest.raises(ReplayError, match="must be auto, exact or a number above 0"):
            factor_of(wrong)
    division = [ChangedKey("policy.sequence_packing.enabled", True, False, of_model=True)]
    assert circumstances(step(), step(), division) == ["policy.sequence_packing.enabled: True in the run, False now"]


def test_changed_files_of_the_library_are_listed() -> None:
    now = step()
    summary = {**now.summary, "code": {"losses/divergence.py": "1", "losses/objectives.py": "3", "losses/new.py": "4"}}
    assert code_notes(step(), replace(now, summary=summary)) == [
        "files of nemo_rl that have changed since the run: losses/new.py, losses/objectives.py"
    ]
    assert code_notes(step(), now) == []


def test_people_get_a_table_and_programs_get_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    found = result(step(update(loss=0.5)))
    output = io.StringIO()
    write_text(found, output)
    text = output.getvalue()
    assert "weights after the step" in text and found.verdict in text.replace("\n", " ")
    values = json.loads(json.dumps(found.as_json()))
    assert (values["equal"], values["first"]["name"], values["first"]["stage"]) == (False, "loss", "loss and its terms")
