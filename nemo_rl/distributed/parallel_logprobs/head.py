"""The output head of a model: a linear layer, whole or the rows that this rank holds, and what follows it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl.distributed.ranks.collectives import Group

_CHUNK_SIZE, _CHUNK_SIZE_GPU = 512, 2048


def default_chunk_size(*, on_gpu: bool) -> int:
    """Tokens per chunk of logits: 512 on CPUs, 2048 on GPUs.

    With 152 thousand tokens of vocabulary 2048 rows of logits are 1.2 GB in float32; a GPU's memory is written a
    quarter as often for the head's gradient as with 512, and holds three or four such tensors at the peak.
    """
    return _CHUNK_SIZE_GPU if on_gpu else _CHUNK_SIZE


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to the output of its linear head: `y = cap tanh(scale x / cap)`, without a cap `y = scale x`.

    Attributes:
        scale: logit multiplier (Cohere, Granite, Falcon-H1).
        cap: bound of soft-capping (Gemma 2, arXiv:2408.00118, section 2); None has no bound.
    """

    scale: float = 1.0
    cap: float | None = None

    def apply_(self, x_nV: Tensor) -> Tensor:
        """`y` of `x`, in its place."""
        if self.scale != 1.0:
            x_nV = x_nV.mul_(self.scale)
        return x_nV if self.cap is None else x_nV.div_(self.cap).tanh_().mul_(self.cap)

    def backward_(self, grad_nV: Tensor, y_nV: Tensor) -> Tensor:
        """The gradient in `x` in place of that in `y`: `dy/dx = scale (1 - (y / cap)^2)`; overwrites `y`."""
        if self.cap is not None:
            grad_nV = grad_nV.mul_(y_nV.div_(self.cap).square_().neg_().add_(1.0))
        return grad_nV if self.scale == 1.0 else grad_nV.mul_(self.scale)


PLAIN = LogitTransform()


@dataclass(frozen=True)
class OutputHead:
    """The head as one rank has it.

    Attributes:
        weight_VD: its rows; with a group contiguous blocks of equal size in rank order.
        bias_V: bias of these rows, or None.
        transform: what follows the linear layer.
        group: the ranks that divide the vocabulary; None: this rank has all of it.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    transform: LogitTransform = PLAIN
    group: Group = None

    @property
    def first_id(self) -> int:
        """The token id of the first row here."""
        return 0 if self.group is None else self.group.rank() * self.weight_VD.shape[0]

    def logits(self, h_nD: Tensor) -> Tensor:
        """`[n, V]` logits of the rows here, in float32 or wider; memory of their own."""
        if h_nD.is_cuda and h_nD.dtype in (torch.bfloat16, torch.float16):
            x_nV = torch.mm(h_nD, self.weight_VD.t(), out_dtype=torch.float32)
        else:
            x_nV = widen(h_nD @ self.weight_VD.t())
        if self.bias_V is not None:
            x_nV = x_nV + self.bias_V.to(x_nV.dtype)
        return self.transform.apply_(x_nV)

    def locate(self, ids_Nk: Tensor) -> tuple[Tensor, Tensor | None]:
        """Columns of these ids in the logits here, and whether they are here (None: all are); 0 where they are not."""
        if self.group is None:
            return ids_Nk, None
        columns_Nk = ids_Nk - self.first_id
        here_Nk = (columns_Nk >= 0) & (columns_Nk < self.weight_VD.shape[0])
        return columns_Nk.where(here_Nk, 0), here_Nk


def widen(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in its own dtype if that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
