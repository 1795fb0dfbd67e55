"""Linear layers that Megatron Core lacks: whole on every rank, with their own output, with a norm behind."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_rl.models.megatron.layers.norm import parameter_device


class ReplicatedLinear(nn.Module):
    """A linear layer without bias that all tensor-parallel ranks have whole.

    Args:
        inputs: width of the input.
        outputs: width of the output.
        config: dtype, initialisation and sequence parallelism.
    """

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(outputs, inputs, dtype=config.params_dtype, device=parameter_device(config))
        )
        if config.perform_initialization:
            assert config.init_method is not None
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """`[..., inputs]` to `[..., outputs]`, and no bias, as Megatron Core's linear layers answer."""
        return F.linear(x, self.weight), None


class ExpertRowParallelLinear(RowParallelLinear):
    """A row-parallel layer of an expert, to whose output its bias may be added in place.

    Megatron Core's layer gives its input's storage back where one rank has all of an expert, and autograd forbids
    writing into what a custom function gives back.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `RowParallelLinear`."""
        out, bias = super().forward(x)
        return out if bias is None else out.clone(), bias


@cache
def with_norm_behind(linear: type[nn.Module], norm: Any) -> type[nn.Module]:
    """A class of linear layers whose output is normalised, as Gemma 3 does before it adds to the residual stream.

    Args:
        linear: a row-parallel linear class of Megatron Core or Transformer Engine.
        norm: what makes the norm; its weight is `post_layernorm.weight` of the layer.
    """

    class NormBehind(linear):  # type: ignore[valid-type,misc]
        norm_behind = (linear, norm)

        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.post_layernorm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            out, bias = super().forward(x)
            assert bias is None, "a bias would have to be added before the norm"
            return self.post_layernorm(out), None

    return NormBehind
