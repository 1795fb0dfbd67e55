"""Find the tensors in a folder's files that make up each parameter.

Does not import megatron. Invariant: every tensor of the files belongs to a parameter or is left out by a rule, and
every parameter has its tensors; otherwise an error names those that do not fit.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from nemo_rl.models.huggingface.tensor_files import TensorFiles
from nemo_rl.models.megatron.conversion.parts import Part, Rule
from nemo_rl.models.megatron.conversion.rules import EMBEDDING, HEAD, OUTPUT, SCALAR_HEAD, Rules
from nemo_rl.utils.errors import CheckpointError

logger = logging.getLogger(__name__)
_SHOWN = 5


def sources(rules: Rules, files: TensorFiles, folder: Path) -> dict[str, tuple[Part, ...]]:
    """Return the parts of each parameter in these files; a scalar head that the files lack is left out.

    Raises:
        CheckpointError: a tensor is missing or unknown, or a tied head is not the embedding.
    """
    names = set(files)
    left_out = {*rules.derived(names), *(untrained := rules.untrained_mtp(names))}
    if rules.is_tied and HEAD in names:
        _require_tied(files)
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
    """Return the rule's stacked parts if the files hold them, else its plain parts."""
    stacked = bool(rule.stacked_parts) and all(part.name in names for part in rule.stacked_parts)
    return rule.stacked_parts if stacked else rule.parts


def _require_tied(files: TensorFiles) -> None:
    if not files.equal(HEAD, EMBEDDING):
        raise CheckpointError(
            f"The configuration ties {HEAD} to {EMBEDDING}, but the files hold different values for them. Set "
            "tie_word_embeddings=false in config.json or policy.hf_config_overrides for two weights."
        )


def _require_copy(files: TensorFiles, copy: str, repeated: str) -> None:
    if repeated in files and not files.equal(copy, repeated):
        raise CheckpointError(
            f"{copy} is not equal to {repeated}, but Megatron Core's layers for multi-token prediction share it. Set "
            "policy.megatron_cfg.mtp_num_layers=0 to train without these layers."
        )


def listed(title: str, names: Iterable[str]) -> str:
    """Return a title and the first names as a sentence; empty if there are no names."""
    found = sorted(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{title}{', '.join(found[:_SHOWN])}{more}." if found else ""
