"""Log the updates of each model as a run, which `nemo_rl report` and `nemo_rl watch` read.

A model has the folder `<service.log_dir>/<id>/exp_001`, and a line in its `metrics.jsonl` for each update: the loss per
token and the number of tokens of the passes since the update before, and what the update returned.

Commands that are executed again after the end of a process are not logged again, but an update whose result was not
stored may have two lines. The last one counts.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_rl.serving.interfaces import PassResult, TrainingDatum
from nemo_rl.serving.store.tenants import Tenant
from nemo_rl.utils.log_backends.jsonl import JsonlLogger

logger = logging.getLogger(__name__)


class RunLog:
    """The metrics of all models.

    Args:
        folder: folder with a run for each model. None writes nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._sums: dict[str, dict[str, float]] = {}
        """By model: sums of the metrics of passes since its last update."""

    def add_pass(self, tenant: Tenant, data: Sequence[TrainingDatum], result: PassResult) -> None:
        """Add a pass with gradients."""
        sums = self._sums.setdefault(tenant.id, defaultdict(float))
        sums["num_sequences"] += len(data)
        sums["num_tokens"] += sum(len(datum.token_ids) for datum in data)
        sums["loss"] += result.metrics["loss:sum"]

    def forget_passes(self, tenant: Tenant) -> None:
        """Drop what was added since the last update."""
        self._sums.pop(tenant.id, None)

    def write_update(self, tenant: Tenant, metrics: Mapping[str, float]) -> None:
        """Write the line of an update. A full disk costs the line, not the update."""
        sums = self._sums.pop(tenant.id, {})
        if self._folder is None:
            return
        numbers = {**metrics, **sums}
        if sums:
            numbers["loss"] = sums["loss"] / sums["num_tokens"]
        try:
            folder = self._folder / tenant.id.replace(":", "-") / "exp_001"
            folder.mkdir(parents=True, exist_ok=True)
            log = JsonlLogger(folder)
            try:
                log.log_metrics(numbers, tenant.num_updates + 1, "train")
            finally:
                log.close()
        except OSError as error:
            logger.warning("The metrics of %s were not logged: %s", tenant.id, error)
