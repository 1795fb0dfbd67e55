"""Run vLLM as an engine. Only this folder imports vllm. The public names are in `generation.batches`."""

from nemo_rl.compat.public_names import public_names

_BATCHES = "nemo_rl.models.generation.batches"
__getattr__ = public_names(__name__, {"VllmConfig": _BATCHES, "VllmGeneration": _BATCHES})
