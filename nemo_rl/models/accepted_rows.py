"""Describe which rows a training backend or an engine accepts, and refuse all other rows with a message.

Backends describe this in `TrainingBackend.accepted_rows`, engines in `generation.registry`. Invariant: an input of a
row is never passed to a model that ignores it.
"""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from nemo_rl.data.model_rows import RowInputs
from nemo_rl.utils.errors import ConfigError

WHO_ACCEPTS = (
    "Rows with further inputs, or with positions of their own, are accepted by policy.dtensor_cfg without pipeline and "
    "context parallelism and by policy.generation.backend=hf. Rows with images are also accepted by vllm."
)


@dataclass(frozen=True)
class AcceptedRows:
    """Rows that a backend or an engine accepts. Token ids with positions 0 to n - 1 are always accepted."""

    reader: str
    """Reader of the rows, for messages: the configuration key that chose it, or a class name."""
    inputs: bool = False
    """Whether further inputs are accepted. The model's forward must have parameters with their names."""
    positions: bool = False
    """Whether rows with their own position rule are accepted."""
    images: bool = False
    """Whether rows with images (`data.images.rows`) are accepted."""

    def refusal(self, row: RowInputs) -> str | None:
        """Return why a row is refused, or None if it is accepted."""
        if row.images is not None and self.images:
            return None
        if (self.inputs or not row.inputs) and (self.positions or row.positions is None):
            return None
        takes = ["token ids"] + ["further inputs"] * self.inputs + ["positions of their own"] * self.positions
        return f"A row has {row}, but {self.reader} accepts {' and '.join(takes)} only. {WHO_ACCEPTS}"

    def require(self, rows: Iterable[RowInputs]) -> None:
        """Refuse rows that are not accepted.

        Raises:
            ConfigError: A row is refused. The message names its inputs, the reader, and what accepts such rows.
        """
        for row in rows:
            reason = self.refusal(row)
            if reason is not None:
                raise ConfigError(reason)


def require_parameters(module: nn.Module, names: Iterable[str]) -> None:
    """Check that a module's forward has parameters with these names, because many forwards ignore unknown arguments.

    Raises:
        ConfigError: A parameter is missing.
    """
    known = inspect.signature(type(module).forward).parameters
    missing = [name for name in names if name not in known]
    if missing:
        raise ConfigError(
            f"Rows have the inputs {', '.join(missing)}, but {type(module).__name__}.forward has no such parameters. "
            f"It has {', '.join(name for name in known if name != 'self')}. Use a model that reads them, or a data "
            "processor that does not make them."
        )
