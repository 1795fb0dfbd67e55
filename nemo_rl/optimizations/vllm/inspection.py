"""Inspect a model's class in the engine's own process."""

from collections.abc import Iterable

from vllm.model_executor.models.registry import ModelRegistry


def inspect_here(architectures: Iterable[str]) -> None:
    """Let vLLM inspect these model classes in this process, before anything asks for their configuration.

    vLLM starts a Python process for each architecture that is new to the machine, to keep CUDA out of the parent
    process. Without CUDA that process only repeats all imports, 10 s on a fresh machine.

    Args:
        architectures: names of classes, from the model's configuration; those that vLLM does not know are skipped.
    """
    for architecture in architectures:
        entry = ModelRegistry.models.get(architecture)
        if entry is not None:
            ModelRegistry.register_model(architecture, entry.load_model_cls())
