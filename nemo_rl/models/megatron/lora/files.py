"""Write adapters of Megatron Core's layers in the format of the PEFT library, under Hugging Face names.

A layer of Megatron Core may stack several hub layers (query, key and value; gate and up). These share its A, and each
has its own rows of B. A checkpoint holds base and adapters in its tensors, from which a run resumes, and a copy of the
adapter in `adapter/` for other libraries. Invariant: base plus `adapter/` is the merged model.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from nemo_rl.config.schema.model.megatron import MegatronPeftConfig
from nemo_rl.files.regular_file import read_text
from nemo_rl.models.huggingface.peft_folder import ADAPTER_FOLDER, CONFIG_FILE, peft_config, peft_key, write_adapter
from nemo_rl.models.megatron.conversion.exporter import held_tensors
from nemo_rl.models.megatron.conversion.holdings import Groups
from nemo_rl.models.megatron.conversion.parts import Part, Rule
from nemo_rl.models.megatron.conversion.rules import Rules, rules_for
from nemo_rl.models.megatron.lora.modules import adapted_modules
from nemo_rl.models.training.checkpoint_writes import Keep, Write, as_it_is
from nemo_rl.utils.errors import CheckpointError
from nemo_rl.weight_sync.exchange import everywhere
from nemo_rl.weight_sync.holdings import ReadableWeights


def save_adapter(
    chunks: Sequence[nn.Module],
    hf_config: PretrainedConfig,
    config: MegatronPeftConfig,
    base_name: str,
    names: Sequence[str],
    weights_path: Path,
    keep: Keep = as_it_is,
) -> Write:
    """Prepare to write the adapter; all ranks take part, rank 0 writes.

    Args:
        chunks: the rank's virtual stages, wrapped or not.
        hf_config: Hugging Face configuration of the model.
        config: configuration section of the adapters.
        base_name: `policy.model_name`.
        names: names of the adapted layers, from `apply_lora`.
        weights_path: weights folder of the checkpoint.
        keep: applied to every tensor that will be written.
    """
    rules = rules_for(hf_config)
    tensors = {
        peft_key(name): keep(f"adapter.{name}", tensor) for name, tensor in _hub_adapters(chunks, rules, names).items()
    }
    hub = dict.fromkeys(name for layer in names for name in _hub_layers(rules.by_parameter[f"{layer}.weight"]))
    fused = any(rule.expert is not None for rule in rules.by_parameter.values())
    described = peft_config(config, base_name, list(hub), fused_experts=fused)
    return partial(write_adapter, weights_path / ADAPTER_FOLDER, tensors, described)


def check_adapter(weights_path: Path, config: MegatronPeftConfig) -> None:
    """Refuse a checkpoint whose use of LoRA, or whose LoRA dimension or alpha, differs from the configuration.

    Raises:
        CheckpointError: names the keys to set.
    """
    file = weights_path / ADAPTER_FOLDER / CONFIG_FILE
    if file.exists() != config.enabled:
        how, asked = ("with", "true") if file.exists() else ("without", "false")
        raise CheckpointError(
            f"{weights_path} was written {how} LoRA. Set policy.megatron_cfg.peft.enabled={asked} to resume, or start "
            "a new run from its model: export the checkpoint with examples/converters/convert_megatron_to_hf.py and "
            "set policy.model_name to that folder."
        )
    if not config.enabled:
        return
    described = json.loads(read_text(file))
    before = (described["r"], described["lora_alpha"])
    if before != (config.dim, config.alpha):
        raise CheckpointError(
            f"{weights_path} was written with policy.megatron_cfg.peft.dim={before[0]} and alpha={before[1]}, and this "
            f"run has dim={config.dim} and alpha={config.alpha}. Set them to the former."
        )


def _hub_layers(rule: Rule) -> list[str]:
    """Return the hub layers that make up the weight of a layer."""
    return [part.name.removesuffix(".weight") for part in rule.parts]


@torch.no_grad()
def _hub_adapters(chunks: Sequence[nn.Module], rules: Rules, names: Sequence[str]) -> dict[str, Tensor]:
    """Gather A and B of each hub layer to the CPU, as `<layer>.lora_A` and `<layer>.lora_B`; collective."""
    modules = adapted_modules(chunks)
    held: dict[str, Tensor] = {}
    for name, module in modules.items():
        held |= {f"{name}.lora_A": module.lora_A, f"{name}.lora_B": module.lora_B}
    own: dict[str, Rule] = {}
    for name in names:
        weight = rules.by_parameter[f"{name}.weight"]
        a, b = f"{name}.lora_A", f"{name}.lora_B"
        own[a] = Rule(a, (Part(a),), dim=1 if weight.dim == 1 else None)
        own[b] = Rule(
            b,
            tuple(Part(f"{layer}.lora_B") for layer in _hub_layers(weight)),
            weight.layout,
            dim=0 if weight.dim == 0 else None,
        )
    device = next(chunks[0].parameters()).device
    weights = held_tensors(held, replace(rules, by_parameter=own), Groups.current(), device=device)
    whole = everywhere(ReadableWeights(weights, device), dist.group.WORLD)
    found = {name: tensor.to("cpu", copy=True) for name, tensor in whole}
    for name in names:
        shared, layers = found.pop(f"{name}.lora_A"), _hub_layers(rules.by_parameter[f"{name}.weight"])
        found |= {f"{layer}.lora_A": shared.clone() for layer in layers}
    return found
