"""A model's tensors in Megatron Core's names and a rank's share of them, independent of the library's conversion.

Imports megatron inside functions only: the pytest process stays free of it, and of the patches of a CPU run.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from rank_backend import CPU, shared_files, start_groups
from small_models import VOCAB, hf_model
from torch import Tensor
from transformers import PreTrainedModel

LENGTHS = (8, 12, 4)
"""Of the sequences of a batch; multiples of twice the ranks that divide them."""


class Sequences:
    """The sequences of a batch as rows or packed, and this context-parallel rank's part of them."""

    def __init__(self, packed: bool, lengths: Sequence[int] = LENGTHS) -> None:
        from megatron.core import parallel_state

        gen = torch.Generator().manual_seed(2)
        self.ids = [torch.randint(0, VOCAB, (length,), generator=gen) for length in lengths]
        self.cotangents = [torch.randn(length, VOCAB, generator=gen) for length in lengths]
        self.packed, self._lengths = packed, lengths
        self._ranks = parallel_state.get_context_parallel_world_size()
        self._rank = parallel_state.get_context_parallel_rank()

    def lay_out(self, sequences: Sequence[Tensor]) -> Tensor:
        """Return `[b, t, ...]` of this rank: rows padded with zeros on the right, or one packed row."""
        if self.packed:
            return torch.cat([self._own(sequence) for sequence in sequences])[None]
        padded = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
        return torch.stack([self._own(row) for row in padded])

    def _own(self, sequence: Tensor) -> Tensor:
        if self._ranks == 1:
            return sequence
        chunks = sequence.chunk(2 * self._ranks)
        return torch.cat([chunks[self._rank], chunks[-1 - self._rank]])

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of GPTModel's forward."""
        from megatron.core.packed_seq_params import PackedSeqParams

        ids = self.lay_out(self.ids)
        arguments = {"input_ids": ids, "position_ids": torch.zeros_like(ids), "attention_mask": None}
        if self.packed:
            bounds = torch.tensor([0, *self._lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            longest = max(self._lengths)
            sizes = {"max_seqlen_q": longest, "max_seqlen_kv": longest, "total_tokens": sum(self._lengths)}
            arguments["packed_seq_params"] = PackedSeqParams("thd", bounds, bounds, **sizes)
        return arguments


def reference(model: PreTrainedModel, sequences: Sequences) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return each sequence's logits alone, and the gradient of their product with the cotangents, by global name."""
    model.zero_grad()
    logits = [model(ids[None]).logits[0] for ids in sequences.ids]
    sum((one * cotangent).sum() for one, cotangent in zip(logits, sequences.cotangents, strict=True)).backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    return [one.detach() for one in logits], global_tensors(model.config, gradients)


_HEADS = ("score.weight", "lm_head.weight", "model.embed_tokens.weight", "model.embeddings.weight")


def global_tensors(config: Any, tensors: dict[str, Tensor | None]) -> dict[str, Any]:
    """Return tensors of a Hugging Face model in global names; the two halves of a gated layer as a pair."""
    tensors = {key: torch.zeros(0) if value is None else value for key, value in tensors.items()}
    embedding, norm = ([key for key in tensors if key.startswith(f"model.{name}")] for name in ("embed", "norm"))
    out: dict[str, Any] = {
        "embedding.word_embeddings.weight": tensors[embedding[0]],
        "decoder.final_layernorm.weight": tensors[norm[0]],
        "output_layer.weight": next(tensors[name] for name in _HEADS if name in tensors),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        found = _block(config, layer, own) if "norm.weight" in own else _layer(config, own)
        out |= {f"decoder.layers.{layer}.{key}": value for key, value in found.items()}
    return out


def _block(config: Any, layer: int, own: dict[str, Tensor]) -> dict[str, Any]:
    """Return the tensors of a layer of Nemotron-H, which has one norm and one block."""
    kind = config.layers_block_type[layer]
    name = {"full_attention": "self_attn.", "linear_attention": "mamba."}.get(kind, "mlp.")
    tensors = {key.replace("mixer.", name): value for key, value in own.items()}
    norm = tensors.pop("norm.weight")
    tensors["post_attention_layernorm.weight" if name == "mlp." else "input_layernorm.weight"] = norm
    if kind == "linear_attention":
        inner, state = config.mamba_num_heads * config.mamba_head_dim, config.n_groups * config.ssm_state_size
        mixer = {key.removeprefix("mamba."): value for key, value in tensors.items() if key.startswith("mamba.")}
        convolution = {key: value for key, value in mixer.items() if key.startswith("conv1d")}
        mixer = {key: value for key, value in mixer.items() if key not in convolution}
        mixer["in_proj.weight"] = mixer["in_proj.weight"].split([inner, inner, state, state, config.mamba_num_heads])
        mixer |= {key.replace(".", "_"): value.split([inner, state, state]) for key, value in convolution.items()}
        return {"input_layernorm.weight": norm} | {f"self_attention.{key}": value for key, value in mixer.items()}
    out = _layer(config, tensors)
    for place in ("mlp.", "mlp.shared_experts."):
        if f"{place}up_proj.weight" in tensors:
            out[f"{place}linear_fc1.weight"] = tensors[f"{place}up_proj.weight"]
    stacks = (tensors.get(f"mlp.experts.{key}_proj", ()) for key in ("up", "down"))
    for expert, (up, down) in enumerate(zip(*stacks, strict=True)):
        prefix = f"mlp.experts.local_experts.{expert}."
        out |= {f"{prefix}linear_fc1.weight": up, f"{prefix}linear_fc2.weight": down}
    return out


_RENAMED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.sinks": "self_attention.core_attention.softmax_offset",
    "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
    "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
    "self_attn.q_a_layernorm.weight": "self_attention.q_layernorm.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
    "self_attn.kv_a_layernorm.weight": "self_attention.kv_layernorm.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.down_proj.bias": "mlp.linear_fc2.bias",
    "mlp.shared_experts.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    "mlp.shared_expert.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
}
_GEMMA_NORMS = {
    "post_attention_layernorm.weight": "self_attention.linear_proj.post_layernorm.weight",
    "pre_feedforward_layernorm.weight": "pre_mlp_layernorm.weight",
    "post_feedforward_layernorm.weight": "mlp.linear_fc2.post_layernorm.weight",
}


def _layer(config: Any, own: dict[str, Tensor]) -> dict[str, Any]:
    gemma = "pre_feedforward_layernorm.weight" in own
    norms = _GEMMA_NORMS if gemma else {"post_attention_layernorm.weight": "pre_mlp_layernorm.weight"}
    out: dict[str, Any] = {new: own[old] for old, new in (_RENAMED | norms).items() if old in own}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in own:
            parts = [own[f"self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
            groups = [part.unflatten(0, (config.num_key_value_heads, -1)) for part in parts]
            if hasattr(config, "linear_num_key_heads"):  # queries and gates of each head
                groups[0] = groups[0].unflatten(1, (-1, 2, config.head_dim)).transpose(1, 2).flatten(1, 3)
            out[f"self_attention.linear_qkv.{kind}"] = torch.cat(groups, 1).flatten(0, 1)
        for old in ("mlp.", "mlp.shared_experts.", "mlp.shared_expert."):
            if f"{old}gate_proj.{kind}" in own:
                new = old.replace("expert.", "experts.")
                out[f"{new}linear_fc1.{kind}"] = own[f"{old}gate_proj.{kind}"], own[f"{old}up_proj.{kind}"]
    return out | _experts(own) | _delta_net(config, own)


def _delta_net(config: Any, own: dict[str, Tensor]) -> dict[str, Any]:
    """Return the tensors of a gated delta net, with the blocks that ranks divide one by one."""
    mixer = {key.removeprefix("linear_attn."): each for key, each in own.items() if key.startswith("linear_attn.")}
    if not mixer:
        return {}
    keys = config.linear_num_key_heads
    key, value = keys * config.linear_key_head_dim, config.linear_num_value_heads * config.linear_value_head_dim
    if "in_proj_qkvz.weight" in mixer:
        fused = [mixer[f"in_proj_{name}.weight"].unflatten(0, (keys, -1)) for name in ("qkvz", "ba")]
        sizes = [size // keys for size in (key, key, value, value)]
        blocks = [*fused[0].split(sizes, 1), *fused[1].chunk(2, 1)]
        projected = tuple(block.flatten(0, 1) for block in blocks)
    else:
        parts = [mixer[f"in_proj_{name}.weight"] for name in ("z", "b", "a")]
        projected = (*mixer["in_proj_qkv.weight"].split([key, key, value]), *parts)
    names = {"norm.weight": "out_norm.weight"} | {name: name for name in ("A_log", "dt_bias", "out_proj.weight")}
    out: dict[str, Any] = {f"self_attention.{new}": mixer[old] for old, new in names.items() if old in mixer}
    out["self_attention.in_proj.weight"] = projected
    if "conv1d.weight" in mixer:
        out["self_attention.conv1d.weight"] = mixer["conv1d.weight"].split([key, key, value])
    return out


def _experts(own: dict[str, Tensor]) -> dict[str, Any]:
    if "mlp.experts.gate_up_proj" not in own:
        return {}
    out: dict[str, Any] = {}
    interleaved = "mlp.experts.gate_up_proj_bias" in own
    for expert, (both, down) in enumerate(
        zip(own["mlp.experts.gate_up_proj"], own["mlp.experts.down_proj"], strict=True)
    ):
        name = f"mlp.experts.local_experts.{expert}."
        if interleaved:
            bias = own["mlp.experts.gate_up_proj_bias"][expert]
            out[f"{name}linear_fc1.weight"] = both[:, ::2].t(), both[:, 1::2].t()
            out[f"{name}linear_fc1.bias"] = bias[::2], bias[1::2]
            out[f"{name}linear_fc2.weight"] = down.t()
            out[f"{name}linear_fc2.bias"] = own["mlp.experts.down_proj_bias"][expert]
        else:
            out[f"{name}linear_fc1.weight"] = both.chunk(2)
            out[f"{name}linear_fc2.weight"] = down
    return out


def own_tensors(model: Any, tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Return this rank's share of global tensors, by the names that a bare GPTModel saves."""
    from megatron.core import parallel_state

    first_expert = parallel_state.get_expert_model_parallel_rank() * (model.config.num_moe_experts or 0)
    first_expert //= parallel_state.get_expert_model_parallel_world_size()
    numbers = {str(place): layer.layer_number - 1 for place, layer in enumerate(model.decoder.layers)}
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor is None:  # extra state of linear layers
            continue
        of_rank = re.sub(r"(?<=decoder\.layers\.)\d+", lambda match: str(numbers[match[0]]), name)
        of_rank = re.sub(r"(?<=local_experts\.)\d+", lambda match: str(int(match[0]) + first_expert), of_rank)
        found[name] = _share(tensor, tensors[of_rank], expert=".local_experts." in name)
    return found


def _share(parameter: Tensor, whole: Any, *, expert: bool) -> Tensor:
    from megatron.core import parallel_state as ps

    ranks, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
    if expert:
        ranks, rank = ps.get_expert_tensor_parallel_world_size(), ps.get_expert_tensor_parallel_rank()

    def cut(tensor: Tensor) -> Tensor:
        divided = ranks > 1 and getattr(parameter, "tensor_model_parallel", False)
        return tensor.chunk(ranks, parameter.partition_dim)[rank] if divided else tensor

    return torch.cat([cut(part) for part in whole]) if isinstance(whole, tuple) else cut(whole)


def difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)).item()


def chunks_of(model: PreTrainedModel, **megatron: Any) -> list[Any]:
    """Make the bare GPTModels of this rank on new groups, with the weights that the importer reads from files."""
    from nemo_rl.models.megatron.conversion.importer import load_huggingface
    from nemo_rl.models.megatron.model.build import build_chunks

    section = start_groups(**megatron)
    chunks = build_chunks(model.config, section, precision=torch.float32, device=CPU)
    with shared_files(model) as folder:
        load_huggingface(chunks, model.config, folder)
    return list(chunks)


def compare(
    name: str,
    *,
    packed: bool,
    values: dict[str, Any] | None = None,
    lengths: Sequence[int] = LENGTHS,
    **megatron: Any,
) -> tuple[float, float, str]:
    """Largest difference of the logits from Hugging Face, that of a gradient, and whose; of this rank's part.

    Args:
        name: one of `small_models.MODELS`.
        packed: rather than padded.
        values: of the Hugging Face configuration.
        lengths: of the sequences, multiples of twice the context-parallel ranks.
        **megatron: of the section, see `rank_backend.policy_of`.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from nemo_rl.models.megatron.model.build import unwrap

    model = hf_model(name, **values or {})
    (chunk,) = chunks_of(model, **megatron)
    sequences = Sequences(packed, lengths)
    wanted_logits, wanted_gradients = reference(model, sequences)
    wrapped = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(), chunk)
    assert unwrap(wrapped) is chunk
    logits = wrapped(**sequences.arguments())
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    cotangent = sequences.lay_out(sequences.cotangents).chunk(tp, -1)[rank]
    # Data-parallel ranks have the same batch here, and gradients are summed over them.
    (logits * cotangent).sum().div(parallel_state.get_data_parallel_world_size()).backward()
    finalize_model_grads([wrapped], None)
    real = sequences.lay_out([torch.ones_like(ids) for ids in sequences.ids]).bool()
    gradients, worst = largest_gradient_difference([chunk], wanted_gradients)
    wanted_own = sequences.lay_out(wanted_logits).chunk(tp, -1)[rank]
    return difference(logits[real], wanted_own[real]), gradients, worst


def largest_gradient_difference(chunks: Sequence[Any], wanted: dict[str, Any]) -> tuple[float, str]:
    """Return the largest difference of summed gradients from those of the whole model, and its global name."""
    differences = {}
    for chunk in chunks:
        model = getattr(chunk, "module", chunk)
        own = own_tensors(model, wanted | _no_gradients(model))
        differences |= {key: difference(p.main_grad, own[key]) for key, p in model.named_parameters()}
    worst = max(differences, key=lambda key: differences[key])
    return differences[worst], worst


@torch.no_grad()
def largest_difference(chunks: Sequence[Any], hf: PreTrainedModel) -> float:
    """Return the largest relative difference of weights from a Hugging Face model's, in the model's precision."""
    whole, found = global_tensors(hf.config, dict(hf.state_dict())), []
    for chunk in chunks:
        model = getattr(chunk, "module", chunk)
        own = own_tensors(model, whole)
        found += [difference(p.double(), own[key].double()) for key, p in model.named_parameters()]
    return max(found)


def _no_gradients(chunk: Any) -> dict[str, Tensor]:
    numbers = range(chunk.config.num_layers)
    return {f"decoder.layers.{number}.mlp.router.expert_bias": torch.zeros(0) for number in numbers}
