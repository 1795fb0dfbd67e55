"""Sample from the policy with engines, and serve rollouts with a group of engines. Re-export the interface.

Importing this package loads no engine. `factory` chooses an engine and builds it in an actor.
"""

from nemo_rl.compat.public_names import public_names
from nemo_rl.models.generation.interfaces import (
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    VersionSpan,
)

__getattr__ = public_names(__name__, {"configure_generation_config": "nemo_rl.models.generation.responses"})

__all__ = [
    "GenerationDatumSpec",
    "GenerationInterface",
    "GenerationOutputSpec",
    "GenerationRequest",
    "GenerationResult",
    "SamplingParams",
    "VersionSpan",
]
