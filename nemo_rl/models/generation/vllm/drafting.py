"""Handle draft models of a running engine: load synced weights, and count proposals.

A draft model that is trained with the policy gets its tensors together with the policy's in every weight sync. It is
one of two kinds. An EAGLE-3 head (`policy.draft`) has sizes from the policy's section, is described to the engine by a
folder with a `config.json` and no weights, and shares only the embedding with the policy. The other kind, the policy's
layers for multi-token prediction (`policy.megatron_cfg.mtp_num_layers`), also shares the output head. Invariant: after
a sync the engine proposes with the tensors that were loaded.

The module also counts proposed and accepted tokens, and keeps a request's proposals independent of other requests.
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

from nemo_rl.models.draft.shape import PREFIX, DraftShape
from nemo_rl.models.generation.engine_load import SpeculationCounts
from nemo_rl.utils.errors import GenerationError

_UNUSED = re.compile(r"model\.layers\.[1-9]\d*\.hidden_norm")
"""Names of norms that vLLM adds to layers, but that checkpoints do not contain."""
_MARK = "trained_with_policy"
"""Key that marks a draft model whose weights come from syncs instead of files."""
TRAINED_LAYERS = {_MARK: True}
"""vLLM's `additional_config` if the policy's layers for multi-token prediction arrive in syncs."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@contextmanager
def described(shape: DraftShape | None) -> Iterator[Path | None]:
    """Write the folder from which vLLM builds a draft model that is trained with the policy, for a block.

    Args:
        shape: Sizes of the draft model. If None, there is no draft model and no folder.
    """
    if shape is None:
        yield None
        return
    with TemporaryDirectory() as folder:
        values = shape.config() | {_MARK: True}
        (Path(folder) / "config.json").write_text(json.dumps(values), encoding="utf-8")
        yield Path(folder)


def keep_own_heads() -> None:
    """Let a draft model that is trained with the policy keep its output head. Call this before vLLM builds its worker.

    vLLM would give it the policy's head, because no file contains its head. Both of vLLM's model runners are changed.
    The first runner shares heads in its proposers. The second runner, which runs on GPUs, shares heads in a function if
    their values are equal. Heads that are in no file are always equal at the start.
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
    """Return the draft model of a worker if it is trained with the policy, or None.

    Raises:
        GenerationError: The worker should have such a model, but vLLM does not provide it.
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
    """The modules of a draft model that are not shared with the policy's model.

    Args:
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
        """Yield modules under names that begin with `PREFIX` (`torch.nn.Module.named_modules`)."""
        return ((PREFIX + name, module) for name, module in self._own)


def is_for(draft: nn.Module, name: str) -> bool:
    """Return whether a tensor belongs to the draft model, by its name in the weight stream."""
    if name.startswith(PREFIX):
        return True
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) >= getattr(draft.model, "mtp_start_layer_idx", sys.maxsize)


def load_into_draft(draft: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load some tensors of the draft model."""
    load: Any = draft.load_weights
    with disable_mtp_completeness_check():
        load((name.removeprefix(PREFIX), tensor) for name, tensor in tensors)


class SpeculationWatch:
    """Count the results of speculative decoding in the steps of an engine."""

    def __init__(self, scheduler: Any):
        self._counts = SpeculationCounts()
        self._update = scheduler.update_from_output
        scheduler.update_from_output = self._counted

    def _counted(self, scheduled: Any, output: Any) -> Any:
        proposals = scheduled.scheduled_spec_decode_tokens
        rows = [
            (len(tokens), len(proposals.get(request_id, ())))
            for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=False)
            if tokens
        ]
        verified = [(sampled, proposed) for sampled, proposed in rows if proposed]
        self._counts = self._counts.plus(
            SpeculationCounts(
                len(rows),
                sum(sampled for sampled, _ in rows),
                len(verified),
                sum(proposed for _, proposed in verified),
                sum(sampled - 1 for sampled, _ in verified),
            )
        )
        return self._update(scheduled, output)

    def take(self) -> SpeculationCounts:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, SpeculationCounts()
        return counts


def propose_to_the_end(worker: Any) -> None:
    """Make vLLM propose tokens for every request with space for them, in vLLM's worker on CPUs.

    vLLM stops proposing for all requests as soon as one request is near the end of the context, so other requests would
    depend on it. Both proposers stop at the end of the context by themselves.
    """
    runner = worker.model_runner
    runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens


def models_of(worker: Any) -> nn.ModuleList:
    """Return the model of a worker and its draft model, if it has one."""
    models = (worker.get_model(), worker.get_draft_model())
    return nn.ModuleList([model for model in models if isinstance(model, nn.Module)])
