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
from typing import Any, override

import torch
from torch import nn
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu.spec_decode.eagle import utils as eagle_utils

from nemo_rl.models.draft.names import PREFIX
from nemo_rl.models.draft.shape import DraftShape
from nemo_rl.utils.errors import GenerationError

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

    vLLM would give it the policy's head, because no file has one. Both of vLLM's model runners are changed: the first
    shares heads in its proposers, the second, which GPUs have, in a function. The second would also compare values, and
    weights that no file has are all equal.
    """
    proposer_class: Any = SpecDecodeBaseProposer
    of_second_runner: Any = eagle_utils
    share_head, should_share = proposer_class._maybe_share_lm_head, of_second_runner._should_share
    if getattr(should_share, "spares_trained", False):
        return

    def share_unless_trained(proposer: Any, target: nn.Module) -> None:
        if not getattr(proposer.model.config, _MARK, False):
            share_head(proposer, target)

    def should_share_unless_trained(draft: nn.Module, flag: str, own: Any, target: Any) -> bool:
        if getattr(getattr(draft, "config", None), _MARK, False):
            return flag != "has_own_lm_head"
        return bool(should_share(draft, flag, own, target))

    should_share_unless_trained.spares_trained = True  # type: ignore[attr-defined]
    proposer_class._maybe_share_lm_head = share_unless_trained
    of_second_runner._should_share = should_share_unless_trained


def trained_draft(worker: Any) -> nn.Module | None:
    """Return the draft model of a worker if it is trained with the policy.

    Raises:
        GenerationError: the worker should have one, but vLLM does not give it.
    """
    config = worker.vllm_config
    of_draft = getattr(config.speculative_config, "draft_model_config", None)
    marks = config.additional_config or {}
    if not marks.get(_MARK) and not getattr(getattr(of_draft, "hf_config", None), _MARK, False):
        return None
    draft = worker.get_draft_model()
    if isinstance(draft, nn.Module):
        return draft
    if not get_pp_group().is_last_rank:  # only the last stage proposes
        return None
    runner = type(worker.model_runner)
    raise GenerationError(
        f"The draft model is trained with the policy, but vLLM's {runner.__module__}.{runner.__qualname__} gives none "
        "to load its weights into. Remove policy.generation.vllm_kwargs.speculative_config, or report this with your "
        "version of vLLM."
    )


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

    @override
    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
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
