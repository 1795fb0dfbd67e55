"""A small valid configuration and variations of it."""

import copy
from typing import Any

MINIMAL: dict[str, Any] = {
    "policy": {"model_name": "gpt2", "train_global_batch_size": 64},
    "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 8, "val_period": 0},
    "data": {"train": {"dataset_name": "arithmetic", "num_samples": 100}},
    "env": {"math": {"num_workers": 1}},
    "cluster": {"device": "cpu"},
}


def with_values(**sections: dict[str, Any]) -> dict[str, Any]:
    """Return MINIMAL with keys of some sections changed."""
    content = copy.deepcopy(MINIMAL)
    for name, values in sections.items():
        content.setdefault(name, {}).update(values)
    return content
