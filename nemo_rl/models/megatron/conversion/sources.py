"""Find the tensors of each parameter in a folder's files, and read them as floating-point values.

`sources` finds the tensors. Invariant: every tensor of the files belongs to a parameter or is excluded by a rule, and
every parameter has its tensors. Otherwise an error names the tensors that do not fit.

`DequantizedFiles` reads files with 8-bit or 4-bit weights as floating-point values, which training needs. DeepSeek-V3
is published in float8 with one scale per block of 128 x 128 values, and GPT-OSS with MXFP4 experts. Invariant: only the
blocks that overlap a requested part are read, and the values are those of the dequantisation in `transformers`.

It also gives the tensors of a text model in a checkpoint for images the names of the text model alone (Qwen3.5), and
leaves out the other tensors.

The module does not import megatron.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, override

import torch
from torch import Tensor
from transformers import PretrainedConfig

from nemo_rl.distributed.ranks.tensor_block import TensorBlock, whole_block
from nemo_rl.models.huggingface.tensor_files import TensorFiles
from nemo_rl.models.megatron.conversion.parts import Part, Rule
from nemo_rl.models.megatron.conversion.rules import HEAD, OUTPUT, SCALAR_HEAD, Rules
from nemo_rl.utils.errors import CheckpointError

logger = logging.getLogger(__name__)
_SHOWN = 5


def sources(rules: Rules, files: TensorFiles, folder: Path) -> dict[str, tuple[Part, ...]]:
    """Return the parts of each parameter in these files, except for a scalar head that the files do not contain.

    Raises:
        CheckpointError: a tensor is missing or unknown, or a tied head is not the embedding.
    """
    names = set(files)
    left_out = {*rules.derived(names), *(untrained := rules.untrained_mtp(names))}
    if rules.is_tied and HEAD in names:
        _require_tied(files, rules.embedding)
    for copy, repeated in rules.copies_in_mtp(names).items():
        _require_copy(files, copy, repeated)
        left_out.add(copy)
    if rules.is_tied or rules.has_scalar_head:
        left_out.add(HEAD)
    found = {name: _stored_parts(rule, names) for name, rule in rules.by_parameter.items()}
    if rules.has_scalar_head and SCALAR_HEAD not in names:
        del found[OUTPUT]
    wanted = {part.name for parts in found.values() for part in parts}
    missing, unknown = wanted - names, names - wanted - left_out
    if missing or unknown:
        raise CheckpointError(
            f"The files in {str(folder)!r} are not those of the model that their configuration describes."
            + listed(" Tensors that they lack: ", missing)
            + listed(" Tensors that belong to no parameter: ", unknown)
        )
    if untrained:
        logger.warning(
            "%d tensors of layers for multi-token prediction are left out: they are neither trained nor exported. The "
            "first is %s. policy.megatron_cfg.mtp_num_layers sets how many of these layers are part of the model.",
            len(untrained),
            min(untrained),
        )
    return found


def _stored_parts(rule: Rule, names: set[str]) -> tuple[Part, ...]:
    """Return the parts of a rule in the files: `stacked_parts` if the files have these tensors, or else `parts`."""
    stacked = bool(rule.stacked_parts) and all(part.name in names for part in rule.stacked_parts)
    return rule.stacked_parts if stacked else rule.parts


def _require_tied(files: TensorFiles, embedding: str) -> None:
    if not files.equal(HEAD, embedding):
        raise CheckpointError(
            f"The configuration ties {HEAD} to {embedding}, but the files hold different values for them. Set "
            "tie_word_embeddings=false in config.json or policy.hf_config_overrides for two weights."
        )


def _require_copy(files: TensorFiles, copy: str, repeated: str) -> None:
    if repeated in files and not files.equal(copy, repeated):
        raise CheckpointError(
            f"{copy} is not equal to {repeated}, but Megatron Core's layers for multi-token prediction share it. Set "
            "policy.megatron_cfg.mtp_num_layers=0 to train without these layers."
        )


def listed(title: str, names: Iterable[str]) -> str:
    """Return a title and the first names as a sentence, or an empty text without names."""
    found = sorted(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{title}{', '.join(found[:_SHOWN])}{more}." if found else ""


_FACTORS = "_scale_inv"
_BLOCKS, _EXPONENTS = "_blocks", "_scales"
_BLOCK_SIZE = (128, 128)
_MXFP4_SIZE = 32
"""Number of values with a common exponent (OCP Microscaling Formats 1.0, section 5.2)."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 4-bit codes (section 5.3.3)."""
_EXPONENT_BIAS = 127


_OF_TEXT, _OF_IMAGES = "model.language_model.", "model.visual."


def _text_names(stored: Iterable[str]) -> dict[str, str]:
    """Return the names of a text model's tensors, with their names in the files.

    In files for images, the text model has a prefix, and tensors of the vision tower are left out.
    """
    stored = list(stored)
    if not any(name.startswith(_OF_TEXT) for name in stored):
        return {name: name for name in stored}
    kept = [name for name in stored if not name.startswith(_OF_IMAGES)]
    if len(kept) < len(stored):
        logger.info(
            "%d tensors for images are left out: the text model is trained and exported alone.", len(stored) - len(kept)
        )
    return {name.replace(_OF_TEXT, "model.", 1): name for name in kept}


class DequantizedFiles(TensorFiles):
    """Read tensors of files as dequantized weights, without the tensors of scales.

    Args:
        files: as in `TensorFiles`.
        hf_config: configuration of the model; `quantization_config.weight_block_size` is the size of float8 blocks.
        file_of: see `TensorFiles`.
    """

    def __init__(
        self, files: Iterable[Path], hf_config: PretrainedConfig, file_of: Mapping[str, Path] | None = None
    ) -> None:
        super().__init__(files, file_of)
        self._stored = _text_names(self._names)
        """Name in the files, by name."""
        self.file_of |= {name: self.file_of[stored] for name, stored in self._stored.items()}
        described: Any = getattr(hf_config, "quantization_config", None) or {}
        described = described if isinstance(described, dict) else described.to_dict()
        self._block_size: tuple[int, int] = tuple(described.get("weight_block_size") or _BLOCK_SIZE)
        stored = self._stored.keys()
        self._float8 = {name for name in stored if name + _FACTORS in stored}
        stems = {name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)}
        self._mxfp4 = {stem for stem in stems if stem + _EXPONENTS in stored}
        self.file_of |= {name: self.file_of[name + _BLOCKS] for name in self._mxfp4}

    def __iter__(self) -> Iterator[str]:
        hidden = {name + _FACTORS for name in self._float8}
        hidden |= {name + suffix for name in self._mxfp4 for suffix in (_BLOCKS, _EXPONENTS)}
        yield from (name for name in self._stored if name not in hidden)
        yield from self._mxfp4

    @override
    def _slice(self, name: str) -> Any:
        return super()._slice(self._stored.get(name, name))

    def like(self, name: str) -> Tensor:
        """Return a meta tensor of the stored shape. Dequantised tensors are float32."""
        if name in self._mxfp4:
            experts, rows, groups, half = super().like(name + _BLOCKS).shape
            return torch.empty(experts, groups * half * 2, rows, device="meta")
        found = super().like(name)
        return found.float() if name in self._float8 else found

    @override
    def read(self, name: str, block: TensorBlock | None = None) -> Tensor:
        if name not in self._float8 and name not in self._mxfp4:
            return super().read(name, block)
        block = whole_block(self.like(name).shape) if block is None else block
        return self._from_mxfp4(name, block) if name in self._mxfp4 else self._from_float8(name, block)

    def _from_float8(self, name: str, block: TensorBlock) -> Tensor:
        values = super().read(name, block).float()
        rows, columns = (
            torch.arange(start, start + size) // of_factor
            for start, size, of_factor in zip(block.starts, block.shape, self._block_size, strict=True)
        )
        return values * super().read(name + _FACTORS).float()[rows][:, columns]

    def _from_mxfp4(self, name: str, block: TensorBlock) -> Tensor:
        """Read `[experts, columns, rows]` from `[experts, rows, groups, 16]` bytes, which hold two columns per byte."""
        (expert, column, row), (experts, columns, rows) = block.starts, block.shape
        group, skipped = divmod(column, _MXFP4_SIZE)
        groups = TensorBlock((expert, row, group), (experts, rows, -(-(column + columns) // _MXFP4_SIZE) - group))
        packed = super().read(name + _BLOCKS, TensorBlock((*groups.starts, 0), (*groups.shape, _MXFP4_SIZE // 2)))
        exponents = super().read(name + _EXPONENTS, groups).int() - _EXPONENT_BIAS
        pairs = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
        values = torch.ldexp(torch.tensor(_E2M1)[pairs.int()], exponents[..., None]).flatten(-2)
        return values[..., skipped : skipped + columns].transpose(1, 2)
