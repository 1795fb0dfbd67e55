"""Describe the distribution that engines sample a policy's answers from."""

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_logprobs import SamplingDensity


def sampling_density(config: PolicyConfig) -> SamplingDensity:
    """Return the density that `policy.generation` samples from; the plain softmax without that section."""
    generation = config.generation
    if generation is None:
        return SamplingDensity()
    top_k = generation.top_k if generation.top_k is not None and generation.top_k > 0 else None
    return SamplingDensity(generation.temperature, top_k, generation.top_p)
