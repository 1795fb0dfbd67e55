"""A DeepSeek-V3 or GLM-4.5 with layers for multi-token prediction, made of transformers' layers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

_FIRST, _FILE = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
_INDEX = "model.safetensors.index.json"


class Depth(nn.Module):
    """One layer for multi-token prediction, like the last layer of the model."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        config, (norm, layer) = hf.config, (type(part) for part in (hf.model.norm, hf.model.layers[-1]))
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (norm(size, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = layer(config, config.num_hidden_layers - 1)

    def forward(self, embeds: Tensor, hidden: Tensor, rotary: Any) -> Tensor:
        """Combine `[1, T, D]` embeddings of further tokens and hidden states."""
        joined = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], -1))
        length = joined.shape[1]
        mask = torch.full((length, length), float("-inf"), dtype=joined.dtype).triu(1)[None, None]
        return self.norm(self.layer(joined, attention_mask=mask, position_embeddings=rotary))


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
                parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else scale * noise)
            for depth in self.depths:
                bias = depth.layer.mlp.gate.e_score_correction_bias
                bias.data = 0.1 * torch.randn(bias.shape, generator=gen)

    def hidden_of_depths(self, ids_T: Tensor, num_depths: int, *, repeated: bool = False) -> list[Tensor]:
        """Return the hidden states of the model `[T, D]` and of each depth d `[T - d, D]`."""
        hidden = self.hf.model(input_ids=ids_T[None], use_cache=False).last_hidden_state
        found = [hidden[0]]
        for depth in range(num_depths):
            length = len(ids_T) - depth - 1
            embeds = self.hf.model.embed_tokens(ids_T[depth + 1 :])[None]
            rotary = self.hf.model.rotary_emb(embeds, torch.arange(length)[None])
            hidden = self.depths[0 if repeated else depth](embeds, hidden[:, :length], rotary)
            found.append(hidden[0])
        return found

    def hub_tensors(self, tensors: dict[str, Tensor], *, copies: bool = True) -> dict[str, Tensor]:
        """Return those of the layers for multi-token prediction under the names of the hub, experts one by one."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if not name.startswith("depths."):
                continue
            _, depth, rest = name.split(".", 2)
            prefix = f"model.layers.{self.config.num_hidden_layers + int(depth)}."
            if rest.startswith("layer.mlp.experts."):
                for expert, own in enumerate(tensor):
                    parts = zip(("gate_proj", "up_proj"), own.chunk(2), strict=True)
                    pairs = list(parts) if "gate_up" in rest else [("down_proj", own)]
                    found |= {f"{prefix}mlp.experts.{expert}.{part}.weight": value for part, value in pairs}
            elif rest == "norm.weight":
                found[f"{prefix}shared_head.norm.weight"] = tensor
            else:
                found[prefix + rest.removeprefix("layer.")] = tensor
            if copies:
                found[f"{prefix}embed_tokens.weight"] = tensors["hf.model.embed_tokens.weight"]
                found[f"{prefix}shared_head.head.weight"] = tensors["hf.lm_head.weight"]
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
