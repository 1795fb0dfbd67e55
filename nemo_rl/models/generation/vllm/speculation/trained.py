"""A draft model that is trained with the policy: its tensors arrive with the policy's in every weight sync.

The engine gets its sizes from the policy's section, in a folder with a `config.json` and no weights. Invariant: after a
sync the engine proposes with the tensors that were loaded, and shares only the embedding with the policy.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from nemo_rl.models.draft.names import PREFIX
from nemo_rl.models.draft.shape import DraftShape

_UNUSED = re.compile(r"model\.layers\.[1-9]\d*\.hidden_norm")
"""Norms that vLLM makes in layers that do not have them."""
_MARK = "trained_with_policy"
"""Key of the `config.json` that says that weights arrive in syncs."""


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
    return draft if isinstance(draft, nn.Module) and getattr(draft.config, _MARK, False) else None


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


def load_into_draft(draft: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load the tensors whose names begin with `PREFIX`."""
    load: Any = draft.load_weights
    load((name.removeprefix(PREFIX), tensor) for name, tensor in tensors if name.startswith(PREFIX))
