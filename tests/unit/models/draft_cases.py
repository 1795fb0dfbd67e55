"""Loss and gradient of a draft model in plain PyTorch, float64, row by row."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from nemo_rl.models.draft.head import DraftHead
from nemo_rl.models.draft.shape import DraftShape, published


class Reference(nn.Module):
    """The head from transformers' Llama parts, for one row, in float64."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        shape = head.shape
        config = LlamaConfig(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            rms_norm_eps=shape.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            attn_implementation="eager",
        )
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        attention = self.layers[0].self_attn
        for projection in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(attention, projection).out_features
            setattr(attention, projection, nn.Linear(2 * shape.hidden_size, rows, bias=False))
        self.layers[0].hidden_norm = LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.fc = nn.Linear(len(shape.tapped_layers) * shape.hidden_size, shape.hidden_size, bias=False)
        self.norm = LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.double()

    def forward(self, tapped_TD: Tensor, embeds_TD: Tensor) -> Tensor:
        layer, length = self.layers[0], len(tapped_TD)
        hidden = self.fc(tapped_TD)[None]
        inputs = torch.cat([layer.input_layernorm(embeds_TD)[None], layer.hidden_norm(hidden)], -1)
        mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        places = self.rotary(hidden, torch.arange(length)[None])
        attended, _ = layer.self_attn(inputs, position_embeddings=places, attention_mask=mask)
        hidden = hidden + attended
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits: Tensor = self.lm_head(self.norm(hidden))[0]
        return logits


def drawn_head(
    model: PreTrainedModel, tapped_layers: Sequence[int], seed: int, ids: Sequence[int] | None = None
) -> DraftHead:
    """Draw a draft model; `ids` are the tokens that it can propose, None: all."""
    shape = DraftShape.for_model(model.config, 1, tapped_layers)
    head = DraftHead(shape if ids is None else replace(shape, draft_vocab_size=len(ids)))
    head.draw(torch.Generator().manual_seed(seed))
    if ids is not None and head.d2t is not None:
        head.d2t.copy_(torch.tensor(ids) - torch.arange(len(ids)))
    return head


def save_head(head: DraftHead, folder: Path) -> str:
    """Save a draft model of one layer as it is published."""
    head.shape.save_config(folder)
    save_file({published(name, 1): tensor for name, tensor in head.state_dict().items()}, folder / "model.safetensors")
    return str(folder)


def reference(
    model: PreTrainedModel, data: Any, tapped_layers: Sequence[int], seed: int, ids: Sequence[int] | None = None
) -> dict[str, Any]:
    """Compute loss, agreement and gradients of the draft model that `seed` draws.

    Args:
        model: the policy's model.
        data: keys of a training batch.
        tapped_layers: see `DraftShape`.
        seed: seed of the weights.
        ids: tokens that the draft model can propose; None: all.
    """
    model = model.double().eval()
    head = drawn_head(model, tapped_layers, seed, ids)
    draft = Reference(head)
    draft.load_state_dict(head.state_dict(), strict=False)
    losses, agreeing = [], []
    for row, length, token_mask, sample_mask in zip(
        data["input_ids"], data["input_lengths"].tolist(), data["token_mask"], data["sample_mask"], strict=True
    ):
        hidden, target = hidden_states(model, row[None, :length])
        tapped = torch.cat([hidden[number] for number in tapped_layers], -1)
        logits = draft(tapped[:-1], hidden[0][1:])
        for place in range(1, length - 1):
            best = int(target[place].argmax())
            if token_mask[place + 1] > 0 and sample_mask > 0 and (ids is None or best in ids):
                wanted = target[place] if ids is None else target[place, list(ids)]
                losses.append(-(wanted.softmax(-1) * logits[place - 1].log_softmax(-1)).sum())
                agreeing.append(float(wanted.argmax() == logits[place - 1].argmax()))
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = {name: value.grad for name, value in draft.named_parameters() if value.grad is not None}
    weights = {name: value.detach() for name, value in draft.named_parameters()}
    return {
        "loss": loss.item(),
        "agreement": sum(agreeing) / len(agreeing),
        "gradients": gradients,
        "weights": weights,
    }


@torch.no_grad()
def hidden_states(model: PreTrainedModel, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the embedding and the `[T, D]` output of each layer for a row `[1, T]`, and the logits `[T, V]`."""
    kept: list[Tensor] = []
    # transformers returns the last hidden state after the norm; a tap is before it.
    handle = model.model.layers[-1].register_forward_hook(
        lambda module, inputs, output: kept.append(output[0] if isinstance(output, tuple) else output)
    )
    output = model(ids, output_hidden_states=True, use_cache=False)
    handle.remove()
    return [each[0] for each in (*output.hidden_states[:-1], kept[0])], output.logits[0]
