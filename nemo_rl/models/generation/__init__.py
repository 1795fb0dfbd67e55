"""Sample from the policy with engines, and serve rollouts with a group of engines. Re-export the interface.

Importing this package loads no engine. `factory` chooses an engine and builds it in an actor.
"""

from nemo_rl.models.generation.configure import configure_generation_config
from nemo_rl.models.generation.interfaces import (
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    VersionSpan,
)

__all__ = [
    "GenerationDatumSpec",
    "GenerationInterface",
    "GenerationOutputSpec",
    "GenerationRequest",
    "GenerationResult",
    "SamplingParams",
    "VersionSpan",
    "configure_generation_config",
]
