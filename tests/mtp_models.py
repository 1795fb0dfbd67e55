"""DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5 and Nemotron-H with layers for multi-token prediction.

They are made of transformers' layers. Names of Qwen's and Nemotron's are those that vLLM reads.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

_FIRST, _FILE = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
_INDEX = "model.safetensors.index.json"
_QWEN = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
}


def places_of_layers(config: Any) -> list[int]:
    """Return the numbers of the model's layers that are like those of a depth."""
    if config.model_type != "nemotron_h":
        return [config.num_hidden_layers - 1]
    return [config.layers_block_type.index(kind) for kind in ("full_attention", "moe")]


class Depth(nn.Module):
    """One layer for multi-token prediction, like the last layer of the model."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        config, nemotron = hf.config, hf.config.model_type == "nemotron_h"
        norm = type(hf.model.norm_f if nemotron else hf.model.norm)
        size, eps = config.hidden_size, config.layer_norm_epsilon if nemotron else config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (norm(size, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(type(hf.model.layers[-1])(config, place) for place in places_of_layers(config))

    def forward(self, embeds: Tensor, hidden: Tensor, rotary: Any) -> Tensor:
        """Combine `[1, T, D]` embeddings of further tokens and hidden states."""
        joined = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], -1))
        length = joined.shape[1]
        mask = torch.full((length, length), float("-inf"), dtype=joined.dtype).triu(1)[None, None]
        given = {} if rotary is None else {"position_embeddings": rotary}
        for layer in self.layers:
            joined = layer(joined, attention_mask=mask, **given)
        return self.norm(joined)


class WithMTP(nn.Module):
    """The model.

    Args:
        hf: the model without these layers.
        num_depths: number of layers for multi-token prediction.
        seed: of their values.
        scale: of their matrices.
    """

    def __init__(self, hf: Any, num_depths: int = 1, seed: int = 1, scale: float = 0.1) -> None:
        super().__init__()
        self.hf, self.config = hf, hf.config
        self.config.num_nextn_predict_layers = num_depths
        self.depths = nn.ModuleList(Depth(hf) for _ in range(num_depths))
        gen = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.depths.parameters():
                noise = torch.randn(parameter.shape, generator=gen)
                centre = 0.0 if hf.config.model_type.startswith(("qwen3_next", "qwen3_5")) else 1.0
                parameter.copy_(centre + 0.1 * noise if parameter.dim() == 1 else scale * noise)
            for name, bias in self.depths.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    bias.data = 0.1 * torch.randn(bias.shape, generator=gen)

    def hidden_of_depths(self, ids_T: Tensor, num_depths: int, *, repeated: bool = False) -> list[Tensor]:
        """Return the hidden states of the model `[T, D]` and of each depth d `[T - d, D]`."""
        hidden = self.hf.model(input_ids=ids_T[None], use_cache=False).last_hidden_state
        found = [hidden[0]]
        for depth in range(num_depths):
            length = len(ids_T) - depth - 1
            embeds = self.hf.get_input_embeddings()(ids_T[depth + 1 :])[None]
            rotary = self._rotary(embeds, torch.arange(length)[None])
            hidden = self.depths[0 if repeated else depth](embeds, hidden[:, :length], rotary)
            found.append(hidden[0])
        return found

    def _rotary(self, embeds: Tensor, positions: Tensor) -> Any:
        if self.config.model_type == "nemotron_h":
            return None
        return self.hf.model.rotary_emb(embeds, positions)

    def hub_tensors(self, tensors: dict[str, Tensor], *, copies: bool = True) -> dict[str, Tensor]:
        """Return those of the layers for multi-token prediction under the names of the hub, experts one by one."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if name.startswith("depths."):
                depth, rest = name.removeprefix("depths.").split(".", 1)
                found |= self._named(int(depth), rest, tensor)
        if copies and self._numbered:
            for depth in range(len(self.depths)):
                prefix = f"model.layers.{self.config.num_hidden_layers + depth}."
                found[f"{prefix}embed_tokens.weight"] = tensors["hf.model.embed_tokens.weight"]
                found[f"{prefix}shared_head.head.weight"] = tensors["hf.lm_head.weight"]
        return found

    @property
    def _numbered(self) -> bool:
        """Whether these layers have numbers after those of other layers."""
        return not self.config.model_type.startswith(("nemotron", "qwen3_next", "qwen3_5"))

    def _named(self, depth: int, rest: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return a tensor of a depth under its names of the hub."""
        nemotron = self.config.model_type == "nemotron_h"
        place, name = rest.removeprefix("layers.").split(".", 1) if rest.startswith("layers.") else ("", rest)
        if self._numbered:
            prefix = f"model.layers.{self.config.num_hidden_layers + depth}."
            name = "shared_head.norm.weight" if rest == "norm.weight" else name
        elif nemotron:
            prefix = f"mtp.layers.{place or (1 if rest == 'norm.weight' else 0)}."
            name = "final_layernorm.weight" if rest == "norm.weight" else name
        else:
            prefix = "mtp.layers.0." if place else "mtp."
            name = name if place else _QWEN.get(name, name)
        if ".experts." not in f".{name}":
            return {prefix + name: tensor}
        block, _, which = name.partition(".experts.")
        found = {}
        for expert, own in enumerate(tensor):
            gated = zip(("gate_proj", "up_proj"), own.chunk(2), strict=True)
            pairs = list(gated) if "gate_up" in which else [(which, own)]
            found |= {f"{prefix}{block}.experts.{expert}.{part}.weight": value for part, value in pairs}
        return found

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder as the hub has it."""
        self.hf.save_pretrained(folder)
        own = {
            name: tensor.detach().clone().contiguous() for name, tensor in self.hub_tensors(self.state_dict()).items()
        }
        save_file(own, Path(folder) / _FILE)
        first = Path(folder) / _FIRST
        (Path(folder) / "model.safetensors").rename(first)
        with safe_open(first, "pt") as file:
            where = dict.fromkeys(file.keys(), _FIRST) | dict.fromkeys(own, _FILE)
        (Path(folder) / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
