"""Read the data and the loss of forward_backward, and write its output.

Invariant: a `TrainingDatum` that leaves this file has tokens of the vocabulary, finite numbers, and inputs with the
shapes that its loss needs. What is wrong is named in the error, with the number of the datum.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rl.serving.interfaces import LossSpec, ModelLimits, PassResult, RequestError, TrainingDatum
from nemo_rl.serving.wire.messages import DTYPES, ForwardBackwardOutput
from nemo_rl.serving.wire.tensors import read_tensor, values_of, write_batch

_RATIO = ("target_tokens", "logprobs", "advantages")
_CLIP = ("clip_low_threshold", "clip_high_threshold")
LOSSES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cross_entropy": (("target_tokens", "weights"), ()),
    "importance_sampling": (_RATIO, ()),
    "ppo": (_RATIO, _CLIP),
    "cispo": (_RATIO, _CLIP),
    "dro": (_RATIO, ("beta",)),
    "gspo": ((*_RATIO, "sequence_ratio_mask"), _CLIP),
}
"""Inputs and settings of each loss."""
_REFUSED = {
    "stable_reinforce": "stable_reinforce is not published, so this service cannot compute it. "
    "Use loss_fn=importance_sampling, ppo or cispo.",
    "custom": "Losses do not run in this service (the flag custom_loss_server_side is off). Use "
    "forward_backward_custom with a Python function, which runs in your program.",
}


@dataclass(frozen=True, eq=False)
class PassCall:
    """Arguments of `AdapterModels.run_pass`."""

    data: list[TrainingDatum]
    """Sequences with the inputs of the loss."""
    loss: LossSpec
    """The loss."""
    backward: bool
    """Whether gradients are added."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(len(datum.token_ids) for datum in self.data)


def read_pass(message: Any, limits: ModelLimits, most_tokens: int) -> PassCall:
    """Read a message `ForwardBackwardRequest`.

    Args:
        limits: of the base model.
        most_tokens: largest number of tokens of the request.

    Raises:
        RequestError: something in the message is wrong.
    """
    loss = LossSpec(_loss_name(message.loss_fn), _settings(message))
    if not message.data:
        raise RequestError("data is empty; give at least one datum.")
    data = [_read_datum(datum, f"data[{place}]", loss.name, limits) for place, datum in enumerate(message.data)]
    call = PassCall(data, loss, backward=not message.forward_only)
    if call.num_tokens > most_tokens:
        raise RequestError(
            f"The request has {call.num_tokens} tokens; {most_tokens} are allowed (service.max_request_tokens). "
            "Send the data in several calls."
        )
    return call


def write_output(result: PassResult) -> bytes:
    """Return the bytes of a message `ForwardBackwardOutput`.

    A record has the outputs of consecutive sequences, as long as the last sizes of their arrays are equal.
    """
    message = ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for shapes, group in groupby(result.outputs, key=_trailing_shapes):
        outputs = list(group)
        record = message.loss_fn_outputs.add(num_datums=len(outputs))
        for name, _ in shapes:
            write_batch(record.fields[name], [output[name] for output in outputs])
    for name, value in result.metrics.items():
        message.metrics[name] = value
    return bytes(message.SerializeToString())


def _trailing_shapes(output: dict[str, NDArray[np.float32]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, output[name].shape[1:]) for name in sorted(output))


def _loss_name(name: str) -> str:
    if name in _REFUSED:
        raise RequestError(_REFUSED[name])
    if name not in LOSSES:
        raise RequestError(f"There is no loss {name!r}. Use one of {', '.join(LOSSES)}.")
    return name


def _settings(message: Any) -> dict[str, float]:
    """Return the settings of a loss. Newer clients write them in two fields."""
    settings: dict[str, float] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise RequestError(f"The setting {name} of the loss {message.loss_fn} is a text; it must be a number.")
        settings[name] = value.number
    known = LOSSES[message.loss_fn][1]
    for name, number in settings.items():
        if name not in known:
            allowed = ", ".join(known) or "none"
            raise RequestError(f"The loss {message.loss_fn} has no setting {name!r}; it has {allowed}.")
        if not np.isfinite(number):
            raise RequestError(f"The setting {name} of the loss {message.loss_fn} is {number}; it must be finite.")
    return settings


def _read_datum(message: Any, place: str, loss: str, limits: ModelLimits) -> TrainingDatum:
    tokens = read_tokens((_tokens_of(chunk, place) for chunk in message.model_input), place, limits)
    needed, given = LOSSES[loss][0], message.loss_fn_inputs
    missing = [name for name in needed if name not in given]
    unknown = [name for name in given if name not in needed]
    if missing or unknown:
        found = f"lacks {', '.join(missing)}" if missing else f"has the unknown input {unknown[0]!r}"
        raise RequestError(f"{place} {found}; the loss {loss} needs {', '.join(needed)}.")
    inputs = {name: _read_input(given[name], f"{place}.{name}", name) for name in needed}
    _check_shapes(inputs, len(tokens), place, loss)
    targets = inputs["target_tokens"]
    if targets.size and (targets.min() < 0 or targets.max() >= limits.vocab_size):
        raise RequestError(f"{place}.target_tokens has an id outside 0..{limits.vocab_size - 1}.")
    return TrainingDatum(tokens, inputs)


def _read_input(message: Any, what: str, name: str) -> NDArray[Any]:
    """Return an input of a loss: int64 for targets, else float32."""
    values = read_tensor(message, what)
    if name == "target_tokens":
        if values.dtype.kind != "i":
            raise RequestError(f"{what} has the type float32; token ids are int64.")
        return values.astype(np.int64)
    numbers = values.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise RequestError(f"{what} has a value that is NaN or infinite.")
    return numbers


def _check_shapes(inputs: dict[str, NDArray[Any]], length: int, place: str, loss: str) -> None:
    """Check that inputs are `[N]`, or `[N, K]` for cross-entropy, for `N` tokens."""
    shape = inputs["target_tokens"].shape
    may_have_columns = loss == "cross_entropy" and len(shape) == 2 and shape[1] > 0
    for name, values in inputs.items():
        if values.shape[:1] != (length,) or values.shape != shape or not (len(shape) == 1 or may_have_columns):
            allowed = f"[{length}]" + (f" or [{length}, K]" if loss == "cross_entropy" else "")
            raise RequestError(
                f"{place}.{name} has the shape {list(values.shape)}; with {length} tokens, all inputs of the loss "
                f"{loss} must have the same shape {allowed}."
            )


def _tokens_of(chunk: Any, place: str) -> NDArray[Any]:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        what = {"image": "an image", "dmel": "audio"}.get(kind, "nothing")
        raise RequestError(f"A chunk of {place} has {what}; this service reads text chunks only.")
    return values_of(chunk.encoded_text.tokens, DTYPES["int32"], f"A chunk of {place}")


def read_tokens(chunks: Iterable[NDArray[Any] | Sequence[int]], place: str, limits: ModelLimits) -> NDArray[np.int32]:
    """Join the tokens of chunks, and check them against the limits of the model.

    Args:
        place: of the tokens in the request, for the error.

    Raises:
        RequestError: there is no token, too many tokens, or a token that the vocabulary lacks.
    """
    parts = [np.asarray(chunk, np.int64) for chunk in chunks]
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if not tokens.size:
        raise RequestError(f"{place} has no token.")
    if tokens.size > limits.max_context:
        raise RequestError(f"{place} has {tokens.size} tokens; the model reads at most {limits.max_context}.")
    if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
        raise RequestError(f"{place} has a token outside 0..{limits.vocab_size - 1}.")
    return tokens.astype(np.int32)
