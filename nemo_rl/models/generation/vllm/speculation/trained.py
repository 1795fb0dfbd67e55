"""A draft model that is trained with the policy: its tensors arrive with the policy's in every weight sync.

Either an EAGLE-3 head (`policy.draft`), whose sizes the engine gets from the policy's section, in a folder with a
`config.json` and no weights. Or the policy's layers for multi-token prediction (`policy.megatron_cfg.mtp_num_layers`).
Invariant: after a sync the engine proposes with the tensors that were loaded; a head shares only the embedding with the
policy, those layers also the output head.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from nemo_rl.models.draft.names import PREFIX
from nemo_rl.models.draft.shape import DraftShape

_UNUSED = re.compile(r"model\.layers\.[1-9]\d*\.hidden_norm")
"""Norms that vLLM makes in layers that do not have them."""
_MARK = "trained_with_policy"
"""Key of the `config.json`, and of vLLM's `additional_config` for layers of the policy; weights arrive in syncs."""
TRAINED_LAYERS = {_MARK: True}
"""vLLM's `additional_config` if the policy's layers for multi-token prediction arrive in syncs."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@contextmanager
def described(shape: DraftShape | None) -> Iterator[Path | None]:
    """Write the folder from which vLLM builds a draft model that is trained with the policy, for the block.

    Args:
        shape: sizes of the draft model; None: there is none, and no folder.
    """
    if shape is None:
        yield None
        return
    with TemporaryDirectory() as folder:
        values = shape.config() | {_MARK: True}
        (Path(folder) / "config.json").write_text(json.dumps(values), encoding="utf-8")
        yield Path(folder)


def keep_own_heads() -> None:
    """Let a draft model that is trained with the policy keep its output head; call it before vLLM builds its worker.

    vLLM would give it the policy's head, because no file has one.
    """
    proposer_class: Any = SpecDecodeBaseProposer
    share_head = proposer_class._maybe_share_lm_head
    if getattr(share_head, "spares_trained", False):
        return

    def share_unless_trained(proposer: Any, target: nn.Module) -> None:
        if not getattr(proposer.model.config, _MARK, False):
            share_head(proposer, target)

    share_unless_trained.spares_trained = True  # type: ignore[attr-defined]
    proposer_class._maybe_share_lm_head = share_unless_trained


def trained_draft(worker: Any) -> nn.Module | None:
    """Return the draft model of a worker if it is trained with the policy."""
    draft = getattr(getattr(worker.model_runner, "drafter", None), "model", None)
    if not isinstance(draft, nn.Module):
        return None
    marks = worker.vllm_config.additional_config or {}
    return draft if getattr(draft.config, _MARK, False) or marks.get(_MARK) else None


class OwnModules(nn.Module):
    """The modules of a draft model that are not also modules of the policy's model.

    Args:
        draft: the draft model.
        model: the policy's model.
    """

    def __init__(self, draft: nn.Module, model: nn.Module) -> None:
        super().__init__()
        shared = {id(module) for module in model.modules()}
        named = ((name, module) for name, module in draft.named_modules() if not _UNUSED.fullmatch(name))
        self._own = [(name, module) for name, module in named if id(module) not in shared]

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """See `torch.nn.Module.modules`."""
        return (module for _, module in self._own)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """See `torch.nn.Module.named_modules`; names begin with `PREFIX`."""
        return ((PREFIX + name, module) for name, module in self._own)


def is_for(draft: nn.Module, name: str) -> bool:
    """Return whether a tensor belongs to the draft model, by its name in the stream of weights."""
    if name.startswith(PREFIX):
        return True
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) >= getattr(draft.model, "mtp_start_layer_idx", sys.maxsize)


def load_into_draft(draft: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load tensors that belong to the draft model; not all of them have to be there."""
    load: Any = draft.load_weights
    with disable_mtp_completeness_check():
        load((name.removeprefix(PREFIX), tensor) for name, tensor in tensors)
