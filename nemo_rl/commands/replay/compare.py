"""Compare a repeated step with the recorded one, part by part, in the order in which a step computes them.

    configuration ─► samples ─► prompts ─► weights ─► modules ─► log-probabilities of policy and reference
    ─► sample mask ─► advantages ─► log-probabilities of the update ─► loss ─► gradients ─► norm and rate ─► new weights

The modules of the first update come before everything that their forward pass computes. The update itself comes later,
but it starts from the weights that the stages before it score with. Invariant: each comparison reports only on its own
part. The first part that differs is the answer, because differences in later parts follow from it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl.algorithms.runtime.step_record import SAMPLED, TOKEN_TENSORS
from nemo_rl.commands.replay.compare_models import gradients, modules, new_weights, norm_and_rate, old_weights
from nemo_rl.commands.replay.findings import DIVISION, NOT_RECORDED, WITHOUT_INFLUENCE, Compared, Difference, Tolerances
from nemo_rl.commands.replay.records import Step
from nemo_rl.config.rules.resume import ChangedKey
from nemo_rl.models.policy.update_records import UpdateRecord

_PLACES = (".model_name", ".tokenizer.name", ".data_path", ".prompt_file", ".system_prompt_file")
"""Suffixes of keys that name files. Files may be elsewhere on other machines, so weights and prompts are compared."""
_SHOWN = 20


def configuration(changed: Sequence[ChangedKey], before: Mapping[str, Any], now: Mapping[str, Any]) -> Compared:
    """Compare the keys that a step's numbers depend on between the run (`before`) and the replay (`now`)."""
    found = [
        Difference(key.key, f"configuration key {key.key} differs: {key.before} in the run, {key.now} now")
        for key in changed
        if _is_compared(key)
    ]
    on_both = _values(before).keys() & _values(now).keys()
    compared = [key for key in on_both if _is_compared(ChangedKey(key, None, None, _is_of_model(key, before)))]
    return Compared("configuration", len({*compared, *(each.name for each in found)}), differences=found)


def configuration_notes(
    changed: Sequence[ChangedKey], before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[str]:
    """Yield notes on keys whose values alone are not a difference, from the arguments of `configuration`."""
    idle = [key.key for key in changed if _is_no_difference(key)]
    if idle:
        yield f"keys that are no difference by themselves have changed: {_listed(idle)}"
    known = tuple(f"{key.key}." for key in changed)

    def lacks(keys: Iterable[str], others: Mapping[str, Any]) -> list[str]:
        return [key for key in keys if key not in others and not f"{key}.".startswith(known)]

    old, new = _values(before), _values(now)
    if only_then := lacks(old, new):
        yield f"keys that only the version of the run has: {_listed(only_then)}"
    if only_now := lacks(new, old):
        yield f"keys that only this version has: {_listed(only_now)}"


def _is_compared(key: ChangedKey) -> bool:
    return key.about != DIVISION and not _is_no_difference(key)


def _is_no_difference(key: ChangedKey) -> bool:
    """Return whether a key affects only things that are compared anyway: recorded rewards, or the content of files."""
    return key.about in WITHOUT_INFLUENCE or key.key.startswith("env.") or key.key.endswith(_PLACES)


def _is_of_model(key: str, config: Mapping[str, Any]) -> bool:
    section = config.get(key.partition(".")[0])
    return isinstance(section, Mapping) and "model_name" in section


def _values(section: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the values of a configuration by dotted path, with a list as one value."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= _values(value, f"{path}{name}.") if isinstance(value, Mapping) else {f"{path}{name}": value}
    return found


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


_IN_SHORT = {
    "idx": "its row of the data",
    "group": "its prompt",
    "sample": "its number among the samples of the prompt",
    "branch": "its conversation",
    "task_name": "its environment",
    "images": "the hashes of its images",
    "input_ids": "its tokens",
    "token_mask": "which of its tokens count",
    "generation_logprobs": "the engine's log-probabilities",
    "reward": "its reward",
    "penalized_reward": "its reward after penalties",
    "outcome": "its outcome",
}
_TENSORS = {
    "prev_logprobs": "The samples and the weights are equal, so the forward pass of the model differs.",
    "reference_policy_logprobs": "The samples are equal, so the reference weights or their forward pass differ.",
    "teacher_logprobs": "The samples are equal, so a teacher, its prompt or its forward pass differs.",
    "sample_mask": "The samples are equal, so what leaves samples out of the loss differs.",
    "advantages": (
        "Samples, masks and log-probabilities are equal, so what makes advantages of rewards differs: "
        "nemo_rl/algorithms/credit."
    ),
}
_ASK_FOR_MODULES = (
    "The record has no outputs of modules: repeat the step with --add-modules where it is equal, then here again, to "
    "learn which module it is."
)
_FORWARD = "Samples and weights are equal, so the model's forward pass differs."
_AFTER_MODULES = "The outputs of modules are equal, so what makes log-probabilities of the last one differs."
_LOSS = "Its inputs are equal, so the loss function itself differs: the keys of loss_fn, or nemo_rl/losses."
_UPDATES = (
    "policy.train_global_batch_size or what divides rows into updates differs (nemo_rl/experience/rows.py), or which "
    "rows have a token that counts."
)


def samples(recorded: Step, repeated: Step) -> Compared:
    """Compare the rows of the batch: sample, tokens and reward of each."""
    before, now = recorded.summary["samples"], repeated.summary["samples"]
    found = [
        Difference(sample_name(row), f"{sample_name(row)} differs from the record: {_changes(row, other)}")
        for row, other in zip(before, now, strict=False)
        if _changes(row, other)
    ]
    if len(before) != len(now):
        found.append(Difference("rows", f"the rollouts have {len(now)} rows, the record says {len(before)}"))
    cause = "The file of rollouts was changed after the run, or another version lays rows out differently."
    return Compared("samples", len(before), differences=found, cause=cause)


def sample_name(row: Mapping[str, Any]) -> str:
    """Return a readable name of a row."""
    branch = "" if row["branch"] is None else f", conversation {row['branch']}"
    return f"sample {row['sample']} of prompt {row['group']}{branch}"


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe in which way a row differs, or return "" if it does not."""
    return ", ".join(
        said if name in SAMPLED else f"{said} is {now.get(name)}, recorded {before.get(name)}"
        for name, said in _IN_SHORT.items()
        if before.get(name) != now.get(name)
    )


def token_tensors(
    recorded: Step, repeated: Step, limits: Tolerances, of_modules: Compared | None
) -> Iterator[Compared]:
    """Compare the tensors that the run's stages computed for tokens and rows, after the modules (`of_modules`)."""
    for name in TOKEN_TENSORS:
        before, now = recorded.tensors.get(name), repeated.tensors.get(name)
        title, cause = name.replace("_", " "), _TENSORS[name]
        if before is None and now is None:
            continue
        if before is None or now is None:
            text = f"{title}: only {'the run' if now is None else 'the replay'} computed them"
            yield Compared(title, 1, "absolute", [Difference(title, text)])
            continue
        limit = limits.logprobs if name.endswith("logprobs") else limits.advantages
        if name == "prev_logprobs" and of_modules is not None and of_modules.skipped == NOT_RECORDED:
            cause = f"{cause} {_ASK_FOR_MODULES}"
        rows = recorded.summary["samples"]
        yield _of_tokens(title, dict(enumerate(before)), dict(enumerate(now)), rows, limit, cause, first=0)


def logprobs(recorded: Step, repeated: Step, update: int, limits: Tolerances, of_modules: Compared) -> Compared:
    """Compare the log-probabilities that an update computed, after the modules (`of_modules`)."""
    before, now = recorded.updates[update].logprobs, repeated.updates[update].logprobs
    title, rows = f"log-probabilities{of_update(recorded, update)}", recorded.summary["samples"]
    if not before and not now:
        return Compared(title, skipped="the loss takes none of single tokens")
    cause = _AFTER_MODULES if of_modules.skipped is None else _FORWARD
    if of_modules.skipped == NOT_RECORDED:
        cause = f"{cause} {_ASK_FOR_MODULES}"
    return _of_tokens(title, before, now, rows, limits.logprobs, cause, first=1)


def _of_tokens(
    title: str,
    before: Mapping[int, Tensor],
    now: Mapping[int, Tensor],
    rows: Sequence[Mapping[str, Any]],
    limit: float,
    cause: str,
    first: int,
) -> Compared:
    """Compare one value for each token of each row, the first of which belongs to the token at position `first`."""
    found: list[Difference] = []
    largest, compared = 0.0, 0
    for row in sorted(before.keys() | now.keys()):
        name = sample_name(rows[row]) if row < len(rows) else f"row {row}"
        if row not in before or row not in now:
            has = "the replay" if row not in before else "the run"
            found.append(Difference(name, f"{title} of {name}: only {has} computed them"))
            continue
        old, new = _same_width(before[row], now[row])
        compared += len(old)
        apart = (old.double() - new.double()).abs().nan_to_num(nan=float("inf"))
        apart[(old == new) | (old.isnan() & new.isnan())] = 0.0
        largest = max(largest, float(apart.max())) if len(old) else largest
        wrong = (apart > limit).nonzero()
        if len(wrong):
            place = int(wrong[0])
            of_token = f" of token {place + first}" if before[row].dim() else ""
            text = f"{title}{of_token} of {name}: {old[place]:.8g} in the run, {new[place]:.8g} now"
            found.append(Difference(name, text, float(apart.max())))
    return Compared(title, compared, "absolute", found, limit, largest, cause)


def _same_width(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of a row in both tensors, with the shorter one padded with zeros."""
    pair = [torch.atleast_1d(old), torch.atleast_1d(new)]
    width = max(map(len, pair))
    old, new = (torch.nn.functional.pad(values, (0, width - len(values))) for values in pair)
    return old, new


def loss(recorded: Step, repeated: Step, update: int, limits: Tolerances) -> Compared:
    """Compare the loss of an update and, before it, the terms of the loss."""
    before = _terms(recorded.updates[update], of_microbatches=limits.is_exact)
    now = _terms(repeated.updates[update], of_microbatches=limits.is_exact)
    found, largest = [], 0.0
    for name in [*before, *(name for name in now if name not in before)]:
        said = name if name.startswith("loss") else f"loss term {name}"
        if name not in before or name not in now:
            found.append(Difference(name, f"{said}: only {'the replay' if name in now else 'the run'} computed it"))
            continue
        size = abs(before[name] - now[name]) / max(abs(before[name]), 1.0)
        same = before[name] == now[name] or (before[name] != before[name] and now[name] != now[name])
        size = 0.0 if same else size if size == size else float("inf")
        largest = max(largest, size)
        if size > limits.loss:
            text = f"{said} differs: {before[name]:.8g} in the run, {now[name]:.8g} now"
            found.append(Difference(name, text, size))
    title = f"loss and its terms{of_update(recorded, update)}"
    return Compared(title, len(before), "relative", found, limits.loss, largest, _LOSS)


def _terms(update: UpdateRecord, *, of_microbatches: bool) -> dict[str, float]:
    """Return the terms of a loss, then the loss, and with `of_microbatches` also the loss of each microbatch."""
    losses = {
        f"loss of microbatch {number} of data-parallel rank {rank}": value
        for rank, of_rank in enumerate(update.microbatch_losses)
        for number, value in enumerate(of_rank)
    }
    terms = {name: value for name, value in {**update.metrics, **update.model_metrics}.items() if name != "loss"}
    return {**terms, **(losses if of_microbatches else {}), "loss": update.loss}


def of_update(step: Step, update: int) -> str:
    """Return the name of an update for titles, or "" if the step has one update."""
    return f" (update {update + 1})" if len(step.updates) > 1 else ""


def compare(
    recorded: Step, repeated: Step, changed: Sequence[ChangedKey], data: Compared, limits: Tolerances
) -> list[Compared]:
    """Compare all parts of a step.

    Args:
        repeated: the repeated step.
        changed: keys of the configuration that differ.
        data: the comparison of the prompts with the data.
        limits: the largest differences that count as equal.
    """
    keys = configuration(changed, recorded.summary["config"], repeated.summary["config"])
    stages = [keys, samples(recorded, repeated), data, old_weights(recorded, repeated)]
    of_modules = [
        modules(before, now, of_update(recorded, update), limits)
        for update, (before, now) in enumerate(zip(recorded.updates, repeated.updates, strict=False))
    ]
    stages += of_modules[:1]
    stages += token_tensors(recorded, repeated, limits, of_modules[0] if of_modules else None)
    if len(recorded.updates) != len(repeated.updates):
        counts = f"the run made {len(recorded.updates)} updates, the replay {len(repeated.updates)}"
        return [*stages, Compared("updates", 1, differences=[Difference("updates", counts)], cause=_UPDATES)]
    for update, (before, now) in enumerate(zip(recorded.updates, repeated.updates, strict=True)):
        title, its_modules = of_update(recorded, update), of_modules[update]
        stages += [
            *([its_modules] if update else []),
            logprobs(recorded, repeated, update, limits, its_modules),
            loss(recorded, repeated, update, limits),
            gradients(before, now, title, limits),
            norm_and_rate(before, now, title, limits),
            new_weights(before, now, title, limits),
        ]
    return stages
