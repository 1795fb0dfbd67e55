"""Measure how the tokens of an update are spread over the experts.

Counts include all ranks and no padding, so they do not depend on how rows are divided into microbatches or among
ranks. The auxiliary losses are Megatron Core's own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from nemo_rl.models.megatron.inputs import Division, RankInputs
from nemo_rl.models.training.expert_load import load_metrics


def routers(chunks: Sequence[Any], *, with_mtp: bool = False) -> list[TopKRouter]:
    """Return the routers of this rank's layers, if asked with those for multi-token prediction."""
    found = (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter))
    return [router for router in found if with_mtp or not router.is_mtp_layer]


class ExpertLoad:
    """Records the routing of one optimizer update.

    Args:
        chunks: chunks of this rank; all ranks have the same number of layers and experts in their configuration.
        division: division of a row's tokens, which says which tokens this rank's routers see.
        device: device on which the model computes.
        each_layer: also report the load of each layer.
    """

    def __init__(
        self, chunks: Sequence[Any], division: Division, device: torch.device, *, each_layer: bool = False
    ) -> None:
        config = chunks[0].config
        self._each_layer = each_layer
        self._division = division
        self._real_N: Tensor | None = None
        self._counts = torch.zeros(config.num_layers, config.num_moe_experts or 0, dtype=torch.int64, device=device)
        for router in routers(chunks):
            router.register_forward_hook(partial(self._count, router.layer_number - 1))

    @contextmanager
    def watching(self, inputs: RankInputs) -> Iterator[None]:
        """Record the routers' decisions while the block runs a microbatch, but not in a later recomputation."""
        self._real_N = inputs.between_layers(self._division).t().flatten()
        try:
            yield
        finally:
            self._real_N = None

    @torch.no_grad()
    def _count(self, layer: int, router: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
        """Count the choices of a router; `output` is weights and choices, both `[N, E]`."""
        if self._real_N is not None:
            self._counts[layer] += (output[1].bool() & self._real_N[:, None]).sum(0)

    def end_update(self) -> dict[str, float]:
        """Return `expert_load.load_metrics` of the update, equal on all ranks; collective."""
        dist.all_reduce(self._counts)
        metrics = load_metrics(self._counts.cpu(), each_layer=self._each_layer)
        self._counts.zero_()
        return metrics
