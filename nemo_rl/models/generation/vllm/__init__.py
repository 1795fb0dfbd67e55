"""Run vLLM as an engine. All imports of vllm are in this folder, and the public names in `generation.batches`."""

from nemo_rl.compat.public_names import public_names

_BATCHES = "nemo_rl.models.generation.batches"
__getattr__ = public_names(__name__, {"VllmConfig": _BATCHES, "VllmGeneration": _BATCHES})
