"""Pass a row's inputs besides token ids from the data processor to the model's forward.

    processor ─► datum["row_inputs"] ─► collate: batch["row_inputs"], a list with one entry a row
                                           │  ranks and microbatches take rows, so they take list entries
                 rollout ─► engine         ▼
                               `forward_arguments`, `position_ids`: keyword arguments of the model's forward

This file makes all decisions about batching these inputs. They do not include token ids, which rollouts extend in
message logs, requests and `input_ids`. Invariant: the model's forward gets the items of all rows concatenated, in the
order of the rows' tokens, whether rows are padded or packed. A batch without such inputs has no key for them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from nemo_rl.distributed.tensor_transport import pack_tensors
from nemo_rl.utils.errors import DataError

if TYPE_CHECKING:
    from nemo_rl.data.images.rows import RowImages

ROW_INPUTS = "row_inputs"
"""Key of a datum (one `RowInputs`), and of a batch (a list of B `RowInputs`)."""
IMAGES = "images"
"""Key of the images in the state of a row that has some."""

TOKEN_ARGUMENTS = frozenset(
    ("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "divided_row")
)
"""Arguments of a model's forward that follow from the layout of the tokens."""
_RESERVED = TOKEN_ARGUMENTS | {
    "attention_mask",
    "cache_position",
    "inputs_embeds",
    "labels",
    "logits_to_keep",
    "past_key_values",
    "use_cache",
}

type PositionRule = Callable[[Tensor, "RowInputs"], Tensor]
"""Function from a row's token ids `[n]` int64 and its inputs to its positions `[n]` or `[d, n]` int64.

The function is called again when a rollout has extended the row. A position may depend only on the tokens up to it. Ray
pickles the function, so it should be a module-level function."""


class RowInput:
    """One input of a row besides its token ids. It must not be changed.

    Args:
        values: the n items of the row, `[n, ...]` on the CPU. n may differ between rows and may be 0. The shape of an
            item and the dtype must be the same in all rows.
        lengths_as: name of the forward's argument for the number of items of each row, `[b]` int64. None if there is
            none.
        leading_axis: whether the forward's argument is `[1, n, ...]`.
    """

    def __init__(self, values: Tensor, lengths_as: str | None = None, *, leading_axis: bool = False) -> None:
        self._values = values
        self.lengths_as = lengths_as
        self.leading_axis = leading_axis

    @property
    def values(self) -> Tensor:
        """Return the items, `[n, ...]` on the CPU. They must not be changed in place."""
        return self._values

    @property
    def kind(self) -> tuple[torch.dtype, tuple[int, ...], str | None]:
        """Dtype, shape of an item, and `lengths_as`, which must be the same in all rows of a batch."""
        return self._values.dtype, tuple(self._values.shape[1:]), self.lengths_as

    def without_items(self) -> "RowInput":
        """Return an input of the same kind with n = 0."""
        dtype, shape, lengths_as = self.kind
        return RowInput(torch.zeros((0, *shape), dtype=dtype), lengths_as, leading_axis=self.leading_axis)

    def require_tensor(self, name: str) -> None:
        """Check the values.

        Raises:
            DataError: they are not a tensor `[n, ...]` on the CPU.
        """
        values = self._values
        if not isinstance(values, Tensor) or values.dim() == 0 or values.device.type != "cpu":
            raise DataError(f"The row input {name!r} must be a tensor [n, ...] on the CPU, got {values!r:.80}.")

    def __str__(self) -> str:
        dtype, shape, _ = self.kind
        return f"{str(dtype).removeprefix('torch.')} [n{''.join(f', {size}' for size in shape)}]"


@dataclass(frozen=True, eq=False)
class RowInputs:
    """Model inputs of one row besides its token ids. Copies share the tensors, which must not be changed in place.

    Raises:
        DataError: a name is that of another argument, or a value is not a tensor `[n, ...]` on the CPU.

    Example:
        >>> RowInputs({"pixel_values": RowInput(torch.zeros(2, 3, 8, 8), lengths_as="num_images")})
    """

    inputs: Mapping[str, RowInput] = field(default_factory=dict)
    """Inputs, such as pixel values, by the name of the forward's argument."""
    positions: PositionRule | None = None
    """Function that computes the positions of the tokens. If None, positions are 0 to n - 1."""
    images: "RowImages | None" = None
    """The images from which the other fields are made, or None. Only the images are sent and stored."""

    def __post_init__(self) -> None:
        """Check names and tensors."""
        arguments = self.argument_names
        taken = sorted(name for name in arguments if name in _RESERVED or arguments.count(name) > 1)
        if taken:
            raise DataError(
                f"A row gives the model's arguments {', '.join(dict.fromkeys(taken))} more than once, or the layout "
                "of the tokens makes them. Give each further input its own name."
            )
        for name, given in self.inputs.items():
            given.require_tensor(name)

    def __str__(self) -> str:
        parts = [f"{name} ({given})" for name, given in self.inputs.items()]
        return ", ".join(parts + (["positions of its own"] if self.positions else []))

    def state_dict(self) -> dict[str, Any]:
        """Return the inputs as tensors and plain values for a checkpoint.

        Raises:
            DataError: the row has a position rule, because a checkpoint cannot contain functions.
        """
        if self.images is not None:
            return {IMAGES: self.images.state_dict()}
        if self.positions is not None:
            raise DataError(
                "A row with its own position rule cannot be stored in a checkpoint: the rule is a function."
            )
        return {
            name: [given.values.clone(), given.lengths_as, given.leading_axis] for name, given in self.inputs.items()
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Rebuild the inputs of a row from their `state_dict`. For rows with images, use `images.rows.from_state`."""
        return cls({name: _input(*given) for name, given in state.items()})

    def require(self, token_ids: Tensor) -> None:
        """Check that the tokens of a row are those of its images, if it has images.

        Raises:
            DataError: tokens of an image are missing, or the row has more of them.
        """
        if self.images is not None:
            self.images.ranges(token_ids.tolist())

    @property
    def argument_names(self) -> list[str]:
        """Names of the arguments of the model's forward that the inputs fill."""
        return [*self.inputs, *(given.lengths_as for given in self.inputs.values() if given.lengths_as is not None)]

    def without_items(self) -> "RowInputs":
        """Copy the inputs with n = 0 and without a position rule, for filler rows and for rows that were cut."""
        if self.images is not None:
            return self.images.without_images().row_inputs()
        return RowInputs({name: given.without_items() for name, given in self.inputs.items()})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.images is not None:
            return type(self.images).row_inputs, (self.images,)
        packed = pack_tensors(
            {name: (given.values, given.lengths_as, given.leading_axis) for name, given in self.inputs.items()}
        )
        return _rebuild, (packed, self.positions)


def _input(values: Tensor, lengths_as: str | None = None, leading_axis: bool = False) -> RowInput:
    return RowInput(values, lengths_as, leading_axis=leading_axis)


def _rebuild(packed: dict[str, tuple[Tensor, str | None, bool]], positions: PositionRule | None) -> RowInputs:
    return RowInputs({name: _input(*given) for name, given in packed.items()}, positions)


def row_inputs_of(data: Sequence[Mapping[str, Any]], key: str = ROW_INPUTS) -> dict[str, list[RowInputs]]:
    """Collate the inputs of B data.

    Returns:
        `row_inputs` (a list of B items), or an empty mapping if no datum has inputs.

    Raises:
        DataError: raised by `completed`.
    """
    if not any(datum.get(key) is not None for datum in data):
        return {}
    return {ROW_INPUTS: completed([datum.get(key) for datum in data])}


def completed(column: Sequence[RowInputs | None]) -> list[RowInputs]:
    """Give every row all inputs of the other rows. A row without an input gets it with 0 items.

    All microbatches on all ranks then call the model with the same arguments.

    Raises:
        DataError: rows give an input of one name with different dtypes or shapes.
    """
    kinds: dict[str, tuple[int, RowInput]] = {}
    for row, inputs in enumerate(column):
        for name, given in (inputs.inputs if inputs else {}).items():
            first_row, first = kinds.setdefault(name, (row, given))
            if first.kind != given.kind:
                raise DataError(
                    f"The row input {name!r} is {given} in row {row} and {first} in row {first_row} (lengths_as="
                    f"{given.lengths_as!r} and {first.lengths_as!r}). All rows need the same dtype, shape of an item "
                    "and lengths_as."
                )
    images = next((inputs.images for inputs in column if inputs and inputs.images), None)
    none = RowInputs() if images is None else images.without_images().row_inputs()
    empty = {name: given.without_items() for name, (_, given) in kinds.items()}
    complete = []
    for given_inputs in column:
        own = given_inputs or none
        complete.append(
            own if own.inputs.keys() == empty.keys() else RowInputs(empty | dict(own.inputs), own.positions, own.images)
        )
    return complete


def forward_arguments(column: Sequence[RowInputs]) -> dict[str, Tensor]:
    """Concatenate the inputs of the rows of one forward pass.

    Arguments for images are left out if no row has an image, because models do not accept empty ones.

    Args:
        column: inputs of b rows, as `completed` returns them, in the order of the rows' tokens.

    Returns:
        By argument: inputs `[n_0 + ... + n_(b-1), ...]`, and item counts `[b]` int64 of those with `lengths_as`.
    """
    arguments: dict[str, Tensor] = {}
    if lacks_images(column):
        return arguments
    for name, first in column[0].inputs.items():
        values = [row.inputs[name].values for row in column]
        joined = torch.cat(values)
        arguments[name] = joined[None] if first.leading_axis else joined
        if first.lengths_as is not None:
            arguments[first.lengths_as] = torch.tensor([len(items) for items in values], dtype=torch.int64)
    return arguments


def lacks_images(column: Sequence[RowInputs]) -> bool:
    """Return whether rows of a model that reads images have no image."""
    return bool(column) and all(row.images is not None and not row.images.images for row in column)


def has_position_rule(column: Iterable[RowInputs]) -> bool:
    """Return whether any row has a position rule."""
    return any(row.positions is not None for row in column)


def row_positions(token_ids: Tensor, inputs: RowInputs) -> Tensor:
    """Compute the positions of the n tokens of a row, `[n]` or `[d, n]` int64.

    Raises:
        DataError: the row's rule returns another shape or dtype.
    """
    if inputs.positions is None:
        return torch.arange(len(token_ids))
    positions = inputs.positions(token_ids, inputs)
    if positions.dim() not in (1, 2) or positions.shape[-1] != len(token_ids) or positions.dtype != torch.int64:
        raise DataError(
            f"A position rule must return int64 [n] or [d, n] for the n={len(token_ids)} tokens of a row, got "
            f"{positions.dtype} {list(positions.shape)}."
        )
    return positions


def position_ids(rows: Sequence[Tensor], column: Sequence[RowInputs], width: int, layout: str) -> Tensor:
    """Arrange the positions of rows in the layout of their tokens.

    Args:
        rows: token ids of b rows, each `[n]`.
        width: number of tokens of a padded row, or of the packed row with its filler.
        layout: "right" or "left" for rows that are padded on this side, or "packed" for concatenated rows.

    Returns:
        Positions `[b, width]`, or `[1, width]` if packed, with a first axis d if a rule returns d dimensions. They are
        0 on padding, and count from 0 in the filler after packed rows.

    Raises:
        DataError: rules of different rows have different numbers of dimensions.
    """
    positions = _of_one_shape([row_positions(ids, inputs) for ids, inputs in zip(rows, column, strict=True)])
    if layout == "packed":
        used = sum(len(ids) for ids in rows)
        filler = torch.arange(width - used).expand(*positions[0].shape[:-1], -1)
        return torch.cat([*positions, filler], dim=-1).unsqueeze(-2)
    padding = [(0, width - len(ids)) if layout == "right" else (width - len(ids), 0) for ids in rows]
    padded = [torch.nn.functional.pad(own, pad) for own, pad in zip(positions, padding, strict=True)]
    return torch.stack(padded, dim=-2)


def shared_position_ids(
    rows: Sequence[Tensor], column: Sequence[RowInputs], places: Sequence[Tensor], width: int
) -> Tensor:
    """Arrange the positions of rows in a layout in which rows share tokens.

    Args:
        rows: token ids of b rows, each `[n]`.
        places: index in the layout of each token of each row, `[n]` int64.
        width: number of tokens of the layout.

    Returns:
        Positions `[1, width]`, or `[d, 1, width]` if a rule returns d dimensions. They are 0 in the filler.
    """
    positions = _of_one_shape([row_positions(ids, inputs) for ids, inputs in zip(rows, column, strict=True)])
    arranged = torch.zeros((*positions[0].shape[:-1], width), dtype=torch.int64)
    for own, place in zip(positions, places, strict=True):
        arranged[..., place] = own
    return arranged.unsqueeze(-2)


def _of_one_shape(positions: list[Tensor]) -> list[Tensor]:
    """Repeat positions `[n]` for each of d dimensions if other rows have positions `[d, n]`."""
    sizes = sorted({len(own) for own in positions if own.dim() == 2})
    if not sizes:
        return positions
    if len(sizes) > 1:
        raise DataError(f"Position rules of one batch need the same number of dimensions, got {sizes}.")
    return [own.expand(sizes[0], -1) for own in positions]
