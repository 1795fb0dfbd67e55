"""Measure the load of experts in Megatron Core, and make routers replay recorded choices.

`ExpertLoad` measures the distribution of an update's tokens over the experts. Counts include all ranks and exclude
padding, so they do not depend on how rows are divided into microbatches or among ranks. The auxiliary losses are those
of Megatron Core.

`MegatronReplayedRouters` makes routers choose recorded experts. Each router asks its attribute `router_replay` for the
choice of experts. Megatron Core's own `RouterReplay` needs recorded experts for every token. `_LayerReplay` replaces
it, and lets the router choose for tokens without recorded experts. Megatron Core computes the weights of the chosen
experts from the router's own scores. Invariant: for a token without recorded experts the router's own choice stays, bit
for bit. Source of the method: Rollout Routing Replay (Ma et al. 2025, arXiv:2510.11370).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from nemo_rl.models.expert_routing import ReplayCounts, load_metrics, require_layers
from nemo_rl.models.megatron.inputs import RankInputs, TokenDivision
from nemo_rl.utils.errors import ConfigError


def routers(chunks: Sequence[Any], *, with_mtp: bool = False) -> list[TopKRouter]:
    """Return the routers of this rank's layers. If `with_mtp` is True, include multi-token-prediction layers."""
    found = (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter))
    return [router for router in found if with_mtp or not router.is_mtp_layer]


class ExpertLoad:
    """Count the tokens of each expert during an optimizer update.

    Args:
        chunks: chunks of this rank, with the configuration of the whole model.
        division: division of a row's tokens, which determines the tokens of this rank's routers.
        each_layer: whether to report the load of each layer too.
    """

    def __init__(
        self, chunks: Sequence[Any], division: TokenDivision, device: torch.device, *, each_layer: bool = False
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
        """Record the routers' decisions while the block runs a microbatch, but not in recomputations."""
        self._real_N = inputs.between_layers(self._division).t().flatten()
        try:
            yield
        finally:
            self._real_N = None

    @torch.no_grad()
    def _count(self, layer: int, router: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
        """Count the choices of a router. `output` has its weights and its choices, both `[N, E]`."""
        if self._real_N is not None:
            self._counts[layer] += (output[1].bool() & self._real_N[:, None]).sum(0)

    def end_update(self) -> dict[str, float]:
        """Return `expert_routing.load_metrics` of the update, equal on all ranks. The call is collective."""
        dist.all_reduce(self._counts)
        metrics = load_metrics(self._counts.cpu(), each_layer=self._each_layer)
        self._counts.zero_()
        return metrics


_CHOOSES_OTHERWISE = ("sinkhorn", "quantile_balancing")


class MegatronReplayedRouters:
    """Routers of this rank's layers, which choose the recorded experts of the current microbatch.

    The recorded experts of a microbatch are used until the next forward pass. A layer that is recomputed in the
    backward pass therefore gets the experts of its own microbatch only if there is no forward pass in between, that is,
    without pipeline stages.

    Args:
        chunks: chunks of this rank.
        division: division of a row's tokens, which determines the tokens of this rank's routers.

    Raises:
        ConfigError: the model has no experts, or its routers choose them in a way that cannot be replayed.
    """

    def __init__(self, chunks: Sequence[Any], division: TokenDivision, device: torch.device) -> None:
        config = chunks[0].config
        _require_replayable(config)
        self.counts = ReplayCounts(device)
        """Counter of an update's tokens, with and without recorded experts."""
        self._division, self._of_token = division, config.moe_router_topk
        layers = _layers_with_experts(config)
        self._num_layers = len(layers)
        self._of_layer: list[tuple[int, _LayerReplay]] = []
        for router in routers(chunks):
            replay = _LayerReplay()
            router.router_replay = replay
            self._of_layer.append((layers.index(router.layer_number - 1), replay))

    def use(self, inputs: RankInputs) -> None:
        """Replay the experts of a microbatch until the next call.

        Raises:
            ConfigError: the recorded experts are those of another model.
        """
        experts = inputs.experts_between_layers(self._division)
        if experts is not None:
            require_layers(experts, self._num_layers, self._of_token)
            experts = experts.transpose(0, 1).flatten(0, 1).long()  # routers see `[t, b]`
        for layer, replay in self._of_layer:
            replay.experts = None if experts is None else experts[:, layer]

    def count(self, inputs: RankInputs) -> None:
        """Count the tokens of a microbatch for the metrics of an update."""
        self.counts.add(inputs.routed_experts, inputs.real_tokens)

    def stop(self) -> None:
        """Stop the replay, so that routers choose the experts themselves."""
        for _, replay in self._of_layer:
            replay.experts = None


class _LayerReplay:
    """The `router_replay` object of one router."""

    def __init__(self) -> None:
        self.experts: Tensor | None = None
        """`[N, k]` int64 recorded experts of the router's tokens, -1 where none are; None if nothing is replayed."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the chosen experts `[N, k]` and their scores (see Megatron Core's `RouterReplay`)."""
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.experts is None:
            return values, own
        chosen = torch.where(self.experts < 0, own, self.experts)
        return scores.gather(1, chosen), chosen


def _layers_with_experts(config: Any) -> list[int]:
    """Return the numbers of the layers with experts, from 0."""
    every = config.moe_layer_freq
    has_experts = every if isinstance(every, list) else [number % every == 0 for number in range(config.num_layers)]
    return [number for number, has in enumerate(has_experts) if has]


def _require_replayable(config: Any) -> None:
    problem = None
    if not config.num_moe_experts:
        problem = "the model has no experts"
    elif config.moe_router_fusion:
        problem = "moe_router_fusion chooses experts in a fused kernel"
    elif config.moe_router_load_balancing_type in _CHOOSES_OTHERWISE:
        problem = f"moe_router_load_balancing_type={config.moe_router_load_balancing_type} chooses experts otherwise"
    if problem is not None:
        raise ConfigError(
            f"policy.router_replay.enabled=true with policy.megatron_cfg: {problem}. Change that key, or set "
            "policy.router_replay.enabled=false."
        )
