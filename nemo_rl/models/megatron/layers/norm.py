"""RMS normalisation that supports sequence parallelism."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


def parameter_device(config: TransformerConfig) -> torch.device:
    """Return the device on which Megatron Core makes the parameters of a model with this configuration."""
    return torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device())


class RMSNorm(nn.Module):
    """Normalisation `x / rms(x) * w`, or `* (1 + w)` if the configuration centres the weight at zero.

    Computes in float32 or wider and rounds like transformers: `w * (x / rms(x)).to(dtype)`, but the whole product in
    float32 for `1 + w`. Under sequence parallelism each rank normalises its own tokens and has a partial gradient of
    the weight, which Megatron Core sums over the tensor-parallel ranks if the parameter is marked for it.

    Args:
        config: dtype of the weight, sequence parallelism, and centre of the weight.
        hidden_size: width of the input.
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self._eps, self._centred_at_zero = eps, config.layernorm_zero_centered_gamma
        fill = torch.zeros if self._centred_at_zero else torch.ones
        self.weight = nn.Parameter(fill(hidden_size, dtype=config.params_dtype, device=parameter_device(config)))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., hidden_size]` along the last dimension."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        if self._centred_at_zero:
            return (wide * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)
        return self.weight * wide.to(x.dtype)
