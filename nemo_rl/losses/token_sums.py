"""Compute the losses that clients of the training service name: plain sums over tokens and sequences.

x is the log-probability of a target now, q the one with which it was sampled, A its advantage, w its weight, and
`r = exp(x - q)`. `loss_terms` returns a loss for each target, and a pass adds them up. Nothing is divided, so the sum
over calls is the loss of all their sequences.

| loss | of each target |
|---|---|
| cross_entropy | -w x, with any w, and with one or several targets at each position |
| importance_sampling | -r A |
| ppo | -min(r A, clip(r, low, high) A) (Schulman et al. 2017, arXiv:1707.06347), with absolute bounds |
| cispo | -stop(clip(r, low, high)) x A (MiniMax 2025, arXiv:2506.13585) |
| dro | -(x A - beta / 2 (x - q)^2) (Richemond et al. 2024, arXiv:2405.19107) |
| gspo | ppo with the value exp(mean(x - q)) of the whole response for each r (Zheng et al. 2025, arXiv:2507.18071) |

Invariant: `check_loss_inputs` refuses every input that a loss cannot use, before anything is computed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_rl.losses.reductions import masked_mean
from nemo_rl.utils.errors import DataError, did_you_mean

TARGETS = "target_tokens"
"""Name of the input with the targets, `[N]` or `[N, K]` int64."""
WEIGHTS, LOGPROBS, ADVANTAGES, RATIO_MASK = "weights", "logprobs", "advantages", "sequence_ratio_mask"
"""Names of the inputs of losses, each with the shape of the targets."""

type Inputs = Mapping[str, Tensor]
type Settings = Mapping[str, float]


@dataclass(frozen=True)
class TokenSum:
    """A loss that is a sum over targets."""

    terms: Callable[[Tensor, Inputs, Settings], Tensor]
    """Function from x `[b, T, k]`, the inputs `[b, T, k]` and the settings to the loss of each target."""
    inputs: tuple[str, ...]
    """Names of the inputs besides the targets."""
    settings: Mapping[str, float | None] = field(default_factory=dict)
    """Settings with their defaults. None means that the client has to give the setting."""
    several_targets: bool = False
    """Whether a position may have several targets."""


def _ratio(x: Tensor, inputs: Inputs) -> Tensor:
    """Return `exp(x - q)`, or 1 where the advantage is 0, so that no value of q there can spoil the loss."""
    return torch.where(inputs[ADVANTAGES] != 0, x - inputs[LOGPROBS], 0.0).exp()


def _clipped(ratio: Tensor, settings: Settings) -> Tensor:
    return ratio.clamp(settings[_LOW], settings[_HIGH])


def _cross_entropy(x: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -inputs[WEIGHTS] * x


def _importance_sampling(x: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -_ratio(x, inputs) * inputs[ADVANTAGES]


def _ppo(x: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return _pessimistic(_ratio(x, inputs), inputs, settings)


def _pessimistic(ratio: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    advantages = inputs[ADVANTAGES]
    return -torch.minimum(ratio * advantages, _clipped(ratio, settings) * advantages)


def _cispo(x: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -_clipped(_ratio(x, inputs), settings).detach() * x * inputs[ADVANTAGES]


def _dro(x: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -(x * inputs[ADVANTAGES] - settings["beta"] / 2 * (x - inputs[LOGPROBS]).square())


def _gspo(x: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    differ = (x - inputs[LOGPROBS]).detach().flatten(1)
    of_rows = masked_mean(differ, inputs[RATIO_MASK].flatten(1), dim=1).exp()
    return _pessimistic(of_rows[:, None, None] * (x - x.detach()).exp(), inputs, settings)


_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"
_SAMPLED = (LOGPROBS, ADVANTAGES)
LOSSES: dict[str, TokenSum] = {
    "cross_entropy": TokenSum(_cross_entropy, (WEIGHTS,), several_targets=True),
    "importance_sampling": TokenSum(_importance_sampling, _SAMPLED),
    "ppo": TokenSum(_ppo, _SAMPLED, {_LOW: 0.8, _HIGH: 1.2}),
    "cispo": TokenSum(_cispo, _SAMPLED, {_LOW: 0.0, _HIGH: 4.0}),
    "dro": TokenSum(_dro, _SAMPLED, {"beta": 0.05}),
    "gspo": TokenSum(_gspo, (*_SAMPLED, RATIO_MASK), {_LOW: None, _HIGH: None}),
}
"""Losses by their names."""
_NOT_HERE = {
    "stable_reinforce": "its formula is not published; use importance_sampling or ppo",
    "custom": "the client computes its own loss and sends weights of cross_entropy",
}


def loss_terms(name: str, x: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Return the loss of each target in float64.

    Args:
        name: A name of `LOSSES`.
        x: `[b, T, k]` log-probabilities of targets, 0 on padding. Only x is differentiable.
        inputs: Inputs of the loss, `[b, T, k]`, 0 on padding.
        settings: Result of `check_loss`.
    """
    return LOSSES[name].terms(x.double(), {key: values.double() for key, values in inputs.items()}, settings)


def check_loss(name: str, settings: Mapping[str, float]) -> dict[str, float]:
    """Check a loss and its settings, and return all of its settings.

    Raises:
        DataError: The loss or a setting is unknown, a needed setting is missing, or a value cannot be used.
    """
    if name in _NOT_HERE:
        raise DataError(f"The loss {name!r} is not available here: {_NOT_HERE[name]}.")
    if name not in LOSSES:
        raise DataError(f"There is no loss {name!r}. Losses: {', '.join(LOSSES)}.{did_you_mean(name, LOSSES)}")
    known = LOSSES[name].settings
    for key, value in settings.items():
        if key not in known:
            allowed = f"It has {', '.join(known)}." if known else "It has none."
            raise DataError(f"The loss {name!r} has no setting {key!r}. {allowed}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(f"The setting {key}={value!r} of the loss {name!r} has to be a finite number.")
    whole = {key: settings.get(key, default) for key, default in known.items()}
    missing = [key for key, value in whole.items() if value is None]
    if missing:
        raise DataError(f"The loss {name!r} needs the settings {', '.join(missing)}, which have no default.")
    checked = {key: float(value) for key, value in whole.items() if value is not None}
    if _LOW in checked and checked[_LOW] > checked[_HIGH]:
        raise DataError(f"The loss {name!r} got {_LOW}={checked[_LOW]:g} above {_HIGH}={checked[_HIGH]:g}.")
    return checked


def check_loss_inputs(
    name: str, num_tokens: int, inputs: Mapping[str, NDArray[np.generic]], vocab_size: int
) -> tuple[int, ...]:
    """Check the inputs of a loss for one sequence, and return the shape of its targets.

    Args:
        name: A name of `LOSSES`.
        num_tokens: Number of tokens of the sequence.
        inputs: Named inputs. Inputs that the loss does not use are not checked.
        vocab_size: Number of token ids.

    Raises:
        DataError: An input is missing, has another shape than the targets, or holds values that cannot be used.
    """
    loss = LOSSES[name]
    missing = [key for key in (TARGETS, *loss.inputs) if key not in inputs]
    if missing:
        raise DataError(f"The loss {name!r} needs the inputs {', '.join(missing)}, and got {', '.join(inputs)}.")
    targets = inputs[TARGETS]
    if not np.issubdtype(targets.dtype, np.integer):
        raise DataError(f"{TARGETS} has to hold integers, not {targets.dtype}.")
    if targets.ndim not in (1, 2) or len(targets) != num_tokens or targets.size == 0:
        raise DataError(f"{TARGETS} has the shape {targets.shape} for {num_tokens} tokens. It has to be [N] or [N, K].")
    if targets.ndim == 2 and not loss.several_targets:
        raise DataError(f"The loss {name!r} takes one target at each position, and {TARGETS} is {targets.shape}.")
    ids = targets.astype(np.int64)
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)].flat[0]
        raise DataError(f"{TARGETS} holds {wrong}, and token ids are 0 to {vocab_size - 1}.")
    for key in loss.inputs:
        _check_numbers(key, inputs[key], targets.shape)
    return targets.shape


def _check_numbers(key: str, values: NDArray[np.generic], shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise DataError(f"{key} has the shape {values.shape}, and {TARGETS} has {shape}. They have to be equal.")
    if not np.issubdtype(values.dtype, np.number) or np.iscomplexobj(values):
        raise DataError(f"{key} has to hold numbers, not {values.dtype}.")
    if not np.isfinite(values.astype(np.float64)).all():
        raise DataError(f"{key} holds NaN or infinity. All values have to be finite.")
    if key == RATIO_MASK and bool((values.astype(np.float64) < 0).any()):
        raise DataError(f"{key} holds negative values. It has 1 on the tokens of the response, and 0 elsewhere.")
