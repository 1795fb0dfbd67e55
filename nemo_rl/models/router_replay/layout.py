"""Lay the experts of a batch out like the tokens of a microbatch, and count the tokens that have some."""

from collections.abc import Callable, Sequence

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
    """Move the experts of rows to the places of their tokens in the model's input.

    Where rows share a token, it has the experts of the first row that has some.

    Args:
        experts_BTLk: `[B, T, L, k]`.
        lengths: tokens of each row.
        places: maps rows and columns of tokens to their places in the flattened model tokens.
        shape: of the model's tokens, `(b, t)`.

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
    """Return which tokens have experts, `[...]` bool of `[..., L, k]`."""
    return experts[..., 0, 0] != NOT_REPORTED


def require_layers(experts: Tensor, layers: int, of_token: int) -> None:
    """Refuse experts of another model.

    Args:
        experts: `[..., L, k]` as the engine reported them.
        layers: layers with experts of the policy.
        of_token: experts of a token in each of them.

    Raises:
        ConfigError: the numbers differ.
    """
    if tuple(experts.shape[-2:]) != (layers, of_token):
        raise ConfigError(
            f"policy.router_replay.enabled=true: the engine reports {experts.shape[-1]} experts in "
            f"{experts.shape[-2]} layers, but the policy chooses {of_token} in {layers}. Both must compute the same "
            "model: remove differing hf_overrides from policy.generation.vllm_kwargs."
        )


class ReplayCounts:
    """Counts the tokens of an update whose experts were replayed, on all ranks; padding does not count.

    Args:
        device: device on which the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)

    def add(self, experts: Tensor | None, real_tokens: Tensor) -> None:
        """Count the tokens of a microbatch.

        Args:
            experts: `[b, t, L, k]`; None: none were reported.
            real_tokens: `[b, t]` bool, False on padding.
        """
        reported = torch.zeros_like(real_tokens) if experts is None else is_reported(experts) & real_tokens
        self._counts += torch.stack([reported.sum(), real_tokens.sum()])

    def end_update(self) -> dict[str, float]:
        """Return the shares of tokens that were replayed, and that fell back to the routers' choice; collective.

        If several ranks see the same tokens, all counts grow by the same factor.
        """
        dist.all_reduce(self._counts)
        replayed, total = self._counts.tolist()
        self.start_update()
        return {REPLAYED: replayed / total, FELL_BACK: 1.0 - replayed / total} if total else {}

    def start_update(self) -> None:
        """Forget what was counted."""
        self._counts.zero_()
