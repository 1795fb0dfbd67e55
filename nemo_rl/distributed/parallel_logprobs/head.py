"""Apply a model's output head: a linear layer (whole, or this rank's rows) and the function after it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl.distributed.ranks.collectives import Group

_CHUNK_SIZE, _CHUNK_SIZE_GPU = 512, 2048


def default_chunk_size(*, on_gpu: bool) -> int:
    """Return the number of tokens per chunk of logits: 512 on CPUs, 2048 on GPUs.

    With a vocabulary of 152 thousand, 2048 rows of logits take 1.2 GB in float32, and three or four such tensors exist
    at the peak. With 2048 rows, the head's gradient is written to GPU memory a quarter as often as with 512.
    """
    return _CHUNK_SIZE_GPU if on_gpu else _CHUNK_SIZE


@dataclass(frozen=True)
class LogitTransform:
    """Function after a model's linear head: `y = cap tanh(scale x / cap)`, or `y = scale x` without a cap."""

    scale: float = 1.0
    """Logit multiplier (Cohere, Granite, Falcon-H1)."""
    cap: float | None = None
    """Bound of soft-capping (Gemma 2, arXiv:2408.00118, section 2). If None, there is no bound."""

    def apply_(self, x_nV: Tensor) -> Tensor:
        """Compute `y` from `x`, in place."""
        if self.scale != 1.0:
            x_nV = x_nV.mul_(self.scale)
        return x_nV if self.cap is None else x_nV.div_(self.cap).tanh_().mul_(self.cap)

    def backward_(self, grad_nV: Tensor, y_nV: Tensor) -> Tensor:
        """Turn the gradient in `y` in place into one in `x`: `dy/dx = scale (1 - (y / cap)^2)`, overwriting `y`."""
        if self.cap is not None:
            grad_nV = grad_nV.mul_(y_nV.div_(self.cap).square_().neg_().add_(1.0))
        return grad_nV if self.scale == 1.0 else grad_nV.mul_(self.scale)


PLAIN = LogitTransform()


class HeadUpdate(NamedTuple):
    """A low-rank update of the head's product: `u B^T` is added to `h W^T`, with `u = scaling h A^T`."""

    inner_NR: Tensor
    """u, the scaled product of hidden states and A."""
    weight_VR: Tensor
    """B."""

    def rows(self, part: slice) -> "HeadUpdate":
        """Return the update of some tokens."""
        return HeadUpdate(self.inner_NR[part], self.weight_VR)

    def product(self) -> Tensor:
        """Return `u B^T` in the dtype of u."""
        return self.inner_NR @ self.weight_VR.t()


@dataclass(frozen=True)
class OutputHead:
    """This rank's part of the output head."""

    weight_VD: Tensor
    """This rank's rows. In a group, these are contiguous blocks of equal size in rank order."""
    bias_V: Tensor | None = None
    """Bias of these rows, or None without a bias."""
    transform: LogitTransform = PLAIN
    """Function applied after the linear layer."""
    group: Group = None
    """The ranks that divide the vocabulary. None if this rank has the whole vocabulary."""

    @property
    def first_id(self) -> int:
        """Token id of this rank's first row."""
        return 0 if self.group is None else self.group.rank() * self.weight_VD.shape[0]

    def logits(self, h_nD: Tensor, update: HeadUpdate | None = None) -> Tensor:
        """Compute the `[n, V]` logits of this rank's rows as a new tensor, in float32 or wider.

        Args:
            h_nD: hidden states.
            update: update of the product for these tokens, or None.
        """
        if h_nD.is_cuda and h_nD.dtype in (torch.bfloat16, torch.float16):
            x_nV = torch.mm(h_nD, self.weight_VD.t(), out_dtype=torch.float32)
        else:
            x_nV = widen(h_nD @ self.weight_VD.t())
        if self.bias_V is not None:
            x_nV = x_nV + self.bias_V.to(x_nV.dtype)
        if update is not None:
            x_nV = x_nV + widen(update.product())
        return self.transform.apply_(x_nV)

    def locate(self, ids_Nk: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return each id's column in this rank's logits, or 0, with a mask of the ids of this rank (None for all)."""
        if self.group is None:
            return ids_Nk, None
        columns_Nk = ids_Nk - self.first_id
        here_Nk = (columns_Nk >= 0) & (columns_Nk < self.weight_VD.shape[0])
        return columns_Nk.where(here_Nk, 0), here_Nk


def widen(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or in its own dtype if that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def scalar_outputs(hidden_KD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return the outputs of a head for scores, differentiable in all arguments.

    Args:
        hidden_KD: `[K, D]` hidden states.
        weight_ND: `[N, D]`.
        bias_N: `[N]`.

    Returns:
        `[K]` for a head with one output, otherwise `[K, N]`, float32 (float64 for float64 inputs).
    """
    if weight_ND.shape[0] == 1:
        outputs = torch.mv(widen(hidden_KD), widen(weight_ND)[0])  # FSDP warns about views
    else:
        outputs = widen(hidden_KD) @ widen(weight_ND).t()
    return outputs if bias_N is None else outputs + widen(bias_N)


def initial_head(hidden_size: int, seed: int, num_outputs: int = 1) -> Tensor:
    """Return the initial weight `[N, D]` of a new head for scores, float32 on the CPU and equal on every rank.

    The standard deviation is `1 / (D + 1)`, so that outputs of hidden states with elements of about 1 have a standard
    deviation of about `1 / sqrt(D)`. A new critic's values are then small compared with rewards of 1, for any width of
    the model.

    Args:
        hidden_size: D.
        num_outputs: N.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((num_outputs, hidden_size), generator=generator) / (hidden_size + 1)
