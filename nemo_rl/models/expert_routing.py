"""Arrange recorded experts for replay (`policy.router_replay`), and measure the distribution of tokens over experts.

The experts of a batch get the layout of a microbatch's tokens, and tokens with recorded experts are counted. All
training backends measure the distribution of tokens over the experts of a layer in the same way.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl.data.routed_experts import NOT_REPORTED
from nemo_rl.utils.errors import ConfigError

REPLAYED = "moe/replayed_token_share"
FELL_BACK = "moe/fallback_token_share"


def laid_out(
    experts_BTLk: Tensor, lengths: Sequence[int], places: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, int]
) -> Tensor:
    """Move the experts of rows to the positions of their tokens in the model's input.

    If rows share a token, it gets the experts of the first row that has experts for it.

    Args:
        experts_BTLk: `[B, T, L, k]`.
        lengths: Number of tokens of each row.
        places: Function from rows and columns of tokens to their indices in the flattened model tokens.
        shape: Shape `(b, t)` of the model's tokens.

    Returns:
        `[b, t, L, k]` of the same dtype, `NOT_REPORTED` on padding.
    """
    flat = experts_BTLk.new_full((shape[0] * shape[1], *experts_BTLk.shape[2:]), NOT_REPORTED)
    for row in reversed(range(len(lengths))):
        own = experts_BTLk[row, : lengths[row]]
        columns = is_reported(own).nonzero()[:, 0]
        flat[places(torch.full_like(columns, row), columns)] = own[columns]
    return flat.unflatten(0, shape)


def is_reported(experts: Tensor) -> Tensor:
    """Return which tokens have reported experts, `[...]` bool for experts `[..., L, k]`."""
    return experts[..., 0, 0] != NOT_REPORTED


def require_layers(experts: Tensor, layers: int, of_token: int) -> None:
    """Refuse experts of another model.

    Args:
        experts: `[..., L, k]` as the engine reported them.
        layers: Number of layers with experts in the policy.
        of_token: Number of experts of a token in each of these layers.

    Raises:
        ConfigError: The numbers differ.
    """
    if tuple(experts.shape[-2:]) != (layers, of_token):
        raise ConfigError(
            f"policy.router_replay.enabled=true: the engine reports {experts.shape[-1]} experts in "
            f"{experts.shape[-2]} layers, but the policy chooses {of_token} in {layers}. Both must compute the same "
            "model: remove differing hf_overrides from policy.generation.vllm_kwargs."
        )


class ReplayCounts:
    """Counter of an update's tokens whose experts were replayed, on all ranks and without padding.

    Args:
        device: device on which the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)

    def add(self, experts: Tensor | None, real_tokens: Tensor) -> None:
        """Count the tokens of a microbatch.

        Args:
            experts: `[b, t, L, k]`. None if no experts were reported.
            real_tokens: `[b, t]` bool, False on padding.
        """
        reported = torch.zeros_like(real_tokens) if experts is None else is_reported(experts) & real_tokens
        self._counts += torch.stack([reported.sum(), real_tokens.sum()])

    def end_update(self) -> dict[str, float]:
        """Return the shares of tokens with replayed experts and with the router's own choice. The call is collective.

        If several ranks have the same tokens, all counts grow by the same factor, so the shares stay the same.
        """
        dist.all_reduce(self._counts)
        replayed, total = self._counts.tolist()
        self.start_update()
        return {REPLAYED: replayed / total, FELL_BACK: 1.0 - replayed / total} if total else {}

    def start_update(self) -> None:
        """Reset the counts."""
        self._counts.zero_()


def load_metrics(counts: Iterable[Tensor], *, each_layer: bool = False) -> dict[str, float]:
    """Compute metrics from the numbers of tokens of each expert, summed over all ranks.

    Args:
        counts: `[E]` numbers of tokens of each expert, for each layer. Layers without any token are skipped.
        each_layer: Whether to also return the three numbers of each layer, as `moe/layer_<n>/load_max` and so on, where
            `n` is the layer's position in `counts`, from 0.

    Returns:
        `moe/load_max`, the largest number of tokens of an expert divided by the mean of its layer, in the worst layer.
        `moe/unused_experts`, the share of experts without a token, as a mean over layers. `moe/load_entropy`, the
        entropy of the distribution over experts, 1 if all have the same load, as a mean over layers. Empty if no layer
        has tokens.
    """
    numbered = {number: layer.double() for number, layer in enumerate(counts) if layer.any()}
    if not numbered:
        return {}
    alone: dict[str, float] = {}
    if each_layer:
        for number, layer in numbered.items():
            alone |= {f"moe/layer_{number}/{name[4:]}": value for name, value in load_metrics([layer]).items()}
    layers = list(numbered.values())
    return alone | {
        "moe/load_max": max((layer.max() / layer.mean()).item() for layer in layers),
        "moe/unused_experts": _mean([(layer == 0).double().mean().item() for layer in layers]),
        "moe/load_entropy": _mean([_entropy(layer) for layer in layers]),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _entropy(counts: Tensor) -> float:
    """Compute the entropy divided by its largest value, `log E`."""
    shares = counts / counts.sum()
    return torch.special.entr(shares).sum().item() / math.log(len(counts)) if len(counts) > 1 else 1.0
