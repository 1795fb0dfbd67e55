"""Linear layers that Megatron Core lacks: whole on every rank, with a copied output, with a norm on the output."""

from functools import cache
from typing import Any, override

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_rl.models.megatron.layers.norm import parameter_device


class ReplicatedLinear(nn.Module):
    """A linear layer without bias that is whole on every tensor-parallel rank.

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
        """Map `[..., inputs]` to `[..., outputs]`; return None as the bias, as Megatron Core's linear layers do."""
        return F.linear(x, self.weight), None


class ExpertRowParallelLinear(RowParallelLinear):
    """A row-parallel layer of an expert whose bias may be added to its output in place.

    If one rank holds a whole expert, Megatron Core's layer returns the output of a custom autograd function that shares
    its input's storage, and autograd forbids in-place changes of such an output.
    """

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(x)
        return out if bias is None else out.clone(), bias


@cache
def with_output_norm(linear: type[nn.Module], norm: Any) -> type[nn.Module]:
    """Return a class of linear layers with a norm on the output, as in Gemma 3 before the residual addition.

    Args:
        linear: a row-parallel linear class of Megatron Core or Transformer Engine.
        norm: class of the norm; its weight is `post_layernorm.weight` of the layer.
    """

    class WithOutputNorm(linear):  # type: ignore[valid-type,misc]
        output_norm = (linear, norm)

        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.post_layernorm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            out, bias = super().forward(x)
            assert bias is None, "a bias would have to be added before the norm"
            return self.post_layernorm(out), None

    return WithOutputNorm
