"""Compare a repeated step with the recorded one, part by part, in the order in which a step computes them.

    configuration ─► samples ─► data ─► weights ─► advantages ─► modules, log-probabilities ─► loss ─► gradients
    ─► new weights

Invariant: each stage is compared independently of the others. The first stage with a difference shows the cause,
because later ones are computed from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl.algorithms.runtime.step_record import SAMPLED
from nemo_rl.config.rules.resume import ChangedKey
from nemo_rl.models.policy.update_records import UpdateRecord
from nemo_rl.replay.compare_models import gradients, modules, new_weights, old_weights
from nemo_rl.replay.findings import Difference, Stage
from nemo_rl.replay.records import Step
from nemo_rl.replay.tolerances import DIVISION, WITHOUT_INFLUENCE, Tolerances

_IN_SHORT = {
    "input_ids": "its tokens",
    "token_mask": "which of its tokens count",
    "generation_logprobs": "the engine's log-probabilities",
    "reward": "its reward",
    "penalized_reward": "its reward after penalties",
    "outcome": "its outcome",
}
_PLACES = (".model_name", ".tokenizer.name", ".data_path", ".prompt_file", ".system_prompt_file")
"""Ends of the keys that name files. Paths may differ on another machine; weights and prompts are compared instead."""
_TENSORS = {
    "advantages": "The samples are equal, so the code that computes advantages from rewards differs: "
    "nemo_rl/algorithms/credit.",
    "prev_logprobs": "The samples and the weights are equal, so the model's forward pass differs.",
    "reference_policy_logprobs": "The samples are equal, so the reference weights or the forward pass differ.",
    "sample_mask": "The samples are equal, so the code that leaves samples out of the loss differs.",
}
_FORWARD = (
    "Samples and weights are equal, so the model's forward pass differs. The record has no outputs of modules. To find "
    "the module, repeat the step with --add-modules on a machine where it is equal, then repeat it here."
)
_LOSS = "Its inputs are equal, so the loss function itself differs: the keys of loss_fn, or nemo_rl/losses."


def configuration(changed: Sequence[ChangedKey], num_keys: int) -> Stage:
    """Compare the keys that the numbers of a step depend on.

    Args:
        changed: all keys that differ.
        num_keys: number of keys that were compared.
    """
    counted = [key for key in changed if key.about != DIVISION and not _is_no_difference(key)]
    found = [
        Difference(key.key, f"configuration key {key.key} differs: {key.before} in the run, {key.now} now")
        for key in counted
    ]
    return Stage("configuration", num_keys, differences=found)


def _num_keys(section: Any) -> int:
    return sum(map(_num_keys, section.values())) if isinstance(section, Mapping) else 1


def without_influence(changed: Sequence[ChangedKey]) -> list[str]:
    """Return the names of changed keys that do not change the numbers of a step."""
    return [key.key for key in changed if _is_no_difference(key)]


def _is_no_difference(key: ChangedKey) -> bool:
    """Return whether a step does not read a key, or only something that is compared anyway, such as files."""
    return key.about in WITHOUT_INFLUENCE or key.key.startswith("env.") or key.key.endswith(_PLACES)


def samples(recorded: Step, repeated: Step) -> Stage:
    """Compare the rows of the batch: the sampled tokens, and the rewards."""
    before, now = recorded.summary["samples"], repeated.summary["samples"]
    found = [
        Difference(sample_name(row), f"{sample_name(row)} differs from the record: {_changes(row, other)}")
        for row, other in zip(before, now, strict=False)
        if _changes(row, other)
    ]
    if len(before) != len(now):
        found.append(Difference("rows", f"the rollouts have {len(now)} rows, the record says {len(before)}"))
    cause = "The file of rollouts was changed after the run, or another version lays rows out differently."
    return Stage("samples", len(before), differences=found, cause=cause)


def sample_name(row: Mapping[str, Any]) -> str:
    """Return a readable name of a row."""
    branch = "" if row["branch"] is None else f", conversation {row['branch']}"
    return f"sample {row['sample']} of prompt {row['group']}{branch}"


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe in which way a row differs; "" if it does not."""
    return ", ".join(
        said if name in SAMPLED else f"{said} is {now[name]}, recorded {before[name]}"
        for name, said in _IN_SHORT.items()
        if before[name] != now[name]
    )


def token_tensors(recorded: Step, repeated: Step, limits: Tolerances) -> Iterator[Stage]:
    """Compare the values that the stages of the run computed for each token or row."""
    for name, cause in _TENSORS.items():
        before, now = recorded.tensors.get(name), repeated.tensors.get(name)
        title = name.replace("_", " ")
        if before is None and now is None:
            continue
        if before is None or now is None:
            yield Stage(title, skipped=f"only {'the run' if now is None else 'the replay'} computed them")
            continue
        limit = limits.logprobs if name.endswith("logprobs") else limits.advantages
        rows = recorded.summary["samples"]
        yield _of_tokens(title, dict(enumerate(before)), dict(enumerate(now)), rows, limit, cause, first=0)


def logprobs(recorded: Step, repeated: Step, update: int, limits: Tolerances, *, knows_modules: bool) -> Stage:
    """Compare the log-probabilities that an update computed."""
    before, now = recorded.updates[update].logprobs, repeated.updates[update].logprobs
    cause = "The module above is the first that differs." if knows_modules else _FORWARD
    rows = recorded.summary["samples"]
    return _of_tokens(f"log-probabilities{of_update(recorded, update)}", before, now, rows, limits.logprobs, cause, 1)


def _of_tokens(
    title: str,
    before: Mapping[int, Tensor],
    now: Mapping[int, Tensor],
    rows: Sequence[Mapping[str, Any]],
    limit: float,
    cause: str,
    first: int,
) -> Stage:
    """Compare one value of each token of each row; `first` is the position of the token that has the first value."""
    found: list[Difference] = []
    largest, compared = 0.0, 0
    for row in sorted(before.keys() & now.keys()):
        old, new = torch.atleast_1d(before[row]), torch.atleast_1d(now[row])
        width = min(len(old), len(new))
        old, new = old[:width], new[:width]
        compared += width
        apart = (old.double() - new.double()).abs().nan_to_num(nan=float("inf"))
        apart[(old == new) | (old.isnan() & new.isnan())] = 0.0
        largest = max(largest, float(apart.max())) if width else largest
        wrong = (apart > limit).nonzero()
        if len(wrong):
            place = int(wrong[0])
            of_token = f" of token {place + first}" if before[row].dim() else ""
            text = f"{title}{of_token} of {sample_name(rows[row])}: {old[place]:.8g} in the run, {new[place]:.8g} now"
            found.append(Difference(sample_name(rows[row]), text, float(apart.max())))
    return Stage(title, compared, "absolute", found, limit, largest, cause)


def loss(recorded: Step, repeated: Step, update: int, limits: Tolerances) -> Stage:
    """Compare the loss of an update and its terms; the terms come first, because the loss is computed from them."""
    before = _terms(recorded.updates[update], of_microbatches=limits.is_exact)
    now = _terms(repeated.updates[update], of_microbatches=limits.is_exact)
    found, largest = [], 0.0
    for name in (name for name in before if name in now):
        size = abs(before[name] - now[name]) / max(abs(before[name]), 1.0)
        same = before[name] == now[name] or (before[name] != before[name] and now[name] != now[name])
        size = 0.0 if same else size if size == size else float("inf")
        largest = max(largest, size)
        if size > limits.loss:
            text = f"loss term {name} differs: {before[name]:.8g} in the run, {now[name]:.8g} now"
            found.append(Difference(name, text.removeprefix("loss term " if name.startswith("loss") else ""), size))
    title = f"loss and its terms{of_update(recorded, update)}"
    return Stage(title, len(before), "relative", found, limits.loss, largest, _LOSS)


def _terms(update: UpdateRecord, *, of_microbatches: bool) -> dict[str, float]:
    """Return the terms of a loss, then the loss; with `of_microbatches` also the loss of each microbatch."""
    losses = {
        f"loss of microbatch {number} of data-parallel rank {rank}": value
        for rank, of_rank in enumerate(update.microbatch_losses)
        for number, value in enumerate(of_rank)
    }
    terms = {name: value for name, value in update.metrics.items() if name != "loss"}
    return {**terms, **(losses if of_microbatches else {}), "loss": update.loss}


def of_update(step: Step, update: int) -> str:
    """Return the name of an update for titles; "" if the step has one update."""
    return f" (update {update + 1})" if len(step.updates) > 1 else ""


def compare(
    recorded: Step, repeated: Step, changed: Sequence[ChangedKey], data: Stage, limits: Tolerances
) -> list[Stage]:
    """Compare all parts of a step.

    Args:
        recorded: the step of the run.
        repeated: the step now.
        changed: keys of the configuration that differ.
        data: the comparison of the prompts with the data.
        limits: the largest differences that count as equal.
    """
    stages = [configuration(changed, _num_keys(recorded.summary["config"])), samples(recorded, repeated), data]
    if len(recorded.updates) != len(repeated.updates):
        counts = f"the run made {len(recorded.updates)} updates, the replay {len(repeated.updates)}"
        return [*stages, Stage("updates", 1, differences=[Difference("updates", counts)])]
    stages += [old_weights(recorded, repeated), *token_tensors(recorded, repeated, limits)]
    for update in range(len(recorded.updates)):
        title = of_update(recorded, update)
        of_modules = modules(recorded.updates[update], repeated.updates[update], title, limits)
        stages += [
            of_modules,
            logprobs(recorded, repeated, update, limits, knows_modules=of_modules.skipped is None),
            loss(recorded, repeated, update, limits),
            gradients(recorded.updates[update], repeated.updates[update], title, limits),
            new_weights(recorded.updates[update], repeated.updates[update], title, limits),
        ]
    return stages
