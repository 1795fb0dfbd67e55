"""Convert a hub model to a checkpoint of this backend, in one process without a GPU.

The Megatron Core model is built without values, to find the names and shapes of its tensors. torch's writer requests
one tensor after another, and each tensor is read from the hub's files at its request. Runs do not need this conversion,
because every rank reads the hub's files directly.

Invariant: every tensor of the files is in the checkpoint, unless a rule excludes it. Every tensor of the checkpoint
comes from the files. At most two parameters are in memory.
"""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from transformers import PretrainedConfig

from nemo_rl.config import MegatronConfig, PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.files.manifest import write_manifest
from nemo_rl.host.waiting_log import StillWaiting
from nemo_rl.models.huggingface.comparison import is_classifier
from nemo_rl.models.huggingface.folders import TOKENIZER_FILES, require_empty
from nemo_rl.models.huggingface.load import load_model_config, names_of_scores, torch_dtype
from nemo_rl.models.huggingface.tensor_files import model_folder, weight_files
from nemo_rl.models.megatron.checkpoints import ITERATION
from nemo_rl.models.megatron.checkpoints.folder import block_rows, by_parameter, hub_tensors_of
from nemo_rl.models.megatron.conversion.parts import Part
from nemo_rl.models.megatron.conversion.rules import Rules, rules_for
from nemo_rl.models.megatron.conversion.sources import DequantizedFiles, listed, sources
from nemo_rl.models.megatron.model.families import text_part
from nemo_rl.models.megatron.parallel import start_model_parallel, stop_model_parallel
from nemo_rl.utils.errors import CheckpointError

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_SECTIONS: dict[str, Any] = {"dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True}}
_GENERATION_CONFIG = "generation_config.json"
_HALVES = {"_w": 0, "_v": 1}
"""Suffixes of the stored names of gate and up, with their indices in the parameter that contains both."""


def import_huggingface(model_name: str, target: Path, dtype: str | None = None) -> int:
    """Write a step folder without optimizer (`config.yaml` and `policy/weights`), in a separate process.

    Args:
        model_name: hub id or local folder.
        target: a new or empty folder.
        dtype: dtype of the weights; if None, the dtype of the model's configuration.

    Returns:
        Number of hub tensors in the checkpoint.

    Raises:
        CheckpointError: the target already holds files, or the model's files do not fit its configuration.
        ConfigError: the model is unknown, or Megatron Core cannot train it.
    """
    require_empty(target)
    config, folder = text_part(load_model_config(model_name)), model_folder(model_name)
    described = {"model_name": model_name} | _SECTIONS
    policy = PolicyConfig.build(**described, generation=None)
    rules = rules_for(config, has_scalar_head=is_classifier(config))
    files = DequantizedFiles(weight_files(folder), config)
    values, weights = _Values(rules, files, sources(rules, files, folder)), target / "policy" / "weights"
    with _one_rank(policy.megatron_cfg, ParallelLayout.of(policy, 1)), values.progress(weights) as progress:
        from nemo_rl.models.megatron.checkpoints.torch_dist import prepare

        precision = torch_dtype(dtype or str(config.dtype or "float32").removeprefix("torch."))
        state = _state(config, policy.megatron_cfg, precision)

        def value(name: str, like: Tensor) -> Tensor:
            found = values.of(name, like)
            progress.look()
            return found

        prepare(weights / ITERATION, state, late=value)(None)
    values.require_all()
    config.dtype = precision
    _write_other_files(folder, config, target, described)
    exported = [name for name, _, _ in hub_tensors_of(weights, config, meta=True)]
    logger.info("%s holds the %d tensors of %s.", weights, len(exported), model_name)
    return len(exported)


class _Values:
    """Read each tensor of a checkpoint from the hub's files when it is written."""

    def __init__(self, rules: Rules, files: DequantizedFiles, stored: dict[str, tuple[Part, ...]]) -> None:
        self._rules, self._files, self._stored = rules, files, stored
        wanted = [name for name in stored if not rules.by_parameter[name].copy_of_tied]
        self._missing = {(name, part.name) for name in wanted for part in stored[name]}

    def of(self, name: str, like: Tensor) -> Tensor:
        """Read the values of a tensor of the checkpoint."""
        from nemo_rl.models.megatron.conversion.holdings import Groups
        from nemo_rl.models.megatron.conversion.importer import fill, require_shapes

        (parameter,) = by_parameter([name])
        if parameter not in self._stored:
            raise CheckpointError(f"The files have no tensor for {parameter}.")
        rule, parts, half = self._rules.by_parameter[parameter], self._stored[parameter], _HALVES.get(name[-2:])
        block = block_rows(name, rule.layout)
        num_rows = len(like) if half is None else 2 * len(like)
        num_rows = num_rows if block is None else block[0]
        whole = torch.empty(num_rows, *like.shape[1:], dtype=like.dtype)
        require_shapes(whole, rule, parts, self._files, num_shards=1)
        asked = dict(enumerate(parts)) if half is None else {half: parts[half]}
        fill(whole, rule, asked, self._files, Groups.current())
        self._missing -= {(parameter, part.name) for part in asked.values()}
        if block is not None:
            return whole[block[1]]
        return whole if half is None else whole.chunk(2)[half]

    def progress(self, weights: Path) -> StillWaiting:
        """Return a log of progress until all tensors of the files are written."""
        total = len(self._missing)
        return StillWaiting(
            f"the writing of {weights}", "tensors are written", lambda: total - len(self._missing), total
        )

    def require_all(self) -> None:
        """Raise a CheckpointError if a tensor of the files was not written."""
        if self._missing:
            names = {name for _, name in self._missing}
            raise CheckpointError("Megatron Core's model has no place for tensors of the files" + listed(": ", names))


@contextmanager
def _one_rank(section: MegatronConfig, layout: ParallelLayout) -> Iterator[None]:
    """Run a block with Megatron Core's process groups for only this process."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            start_model_parallel(layout, section, _CPU)
            yield
        finally:
            stop_model_parallel()
            dist.destroy_process_group()


def _state(config: PretrainedConfig, section: MegatronConfig, precision: torch.dtype) -> Any:
    """Return the sharded state of the whole model. Its names and shapes are meaningful, but not its values."""
    from nemo_rl.models.megatron.checkpoints.run_state import model_state
    from nemo_rl.models.megatron.model.build import build_chunks
    from nemo_rl.models.megatron.scoring import give_scalar_head

    chunks = build_chunks(config, section, precision=precision, device=_CPU)
    if is_classifier(config):
        give_scalar_head(chunks, seed=0, num_outputs=len(names_of_scores(config)))
    return model_state(chunks)


def _write_other_files(folder: Path, config: PretrainedConfig, target: Path, policy: dict[str, Any]) -> None:
    """Write the model's configuration and tokenizer, a run's config.yaml, and the manifest."""
    weights = target / "policy" / "weights"
    config.save_pretrained(weights)
    for name in (*TOKENIZER_FILES, _GENERATION_CONFIG):
        if (folder / name).exists():
            shutil.copyfile(folder / name, weights / name)
    (target / "config.yaml").write_text(yaml.safe_dump({"policy": policy}), encoding="utf-8")
    write_manifest(target)
