"""Weights that stay float32 in a bfloat16 run: computed with, trained, sent and saved in float32, on one rank and two.

The references are transformers' own models in bfloat16 with these weights in float32, and the names that the page of
each architecture gives.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_helpers import VOCAB, WeightedNLL, hf_logprobs, policy_config, random_batch, run_ranks
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.training_backend import DTensorTraining
from nemo_rl.models.huggingface.load import hold_in_float32, stays_float32
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.interfaces import CheckpointPaths

CPU = torch.device("cpu")
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE: dict[str, Any] = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
BIAS, STATE = r"e_score_correction_bias$", r"(A_log|dt_bias|\.D)$"
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v3": (MIXTURE | LATENT, BIAS),
    "glm4_moe": (MIXTURE, BIAS),
    "dots1": (MIXTURE, BIAS),
    "exaone_moe": (MIXTURE | {"num_experts": 16, "mlp_layer_types": ["dense", "sparse"]}, BIAS),
    "ernie4_5_moe": (
        {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
        r"gate\.weight$|moe_statics\." + BIAS,
    ),
    "nemotron_h": (
        {
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "moe"],
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_shared_expert_intermediate_size": 16,
        },
        f"{BIAS}|{STATE}",
    ),
    "falcon_h1": (MAMBA | {"mamba_d_ssm": 64}, STATE),
    "qwen3_next": (
        DELTA
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 16},
        STATE,
    ),
    "jamba": (
        {
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
        STATE,
    ),
}
QUICK = ("deepseek_v3", "ernie4_5_moe", "nemotron_h")
WITHOUT_PACKING = {"sequence_packing": {"enabled": False}}
DATA = random_batch(rows=6, width=24)


def make(model_type: str) -> PreTrainedModel:
    """Make a float32 model whose router biases are large, so that rounding them would choose other experts."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **COMMON | MODELS[model_type][0]))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if re.search(BIAS, name):
                tensor.copy_(6 + 0.05 * torch.randn(tensor.shape))
            elif re.search(STATE, name):
                tensor.add_(0.01 * torch.randn(tensor.shape))  # not numbers that bfloat16 has
    return model.eval()


def names_of(model: PreTrainedModel, model_type: str) -> set[str]:
    return {name for name in model.state_dict() if re.search(MODELS[model_type][1], name)}


def as_transformers(model: PreTrainedModel, model_type: str) -> PreTrainedModel:
    """Round the weights of a float32 model to bfloat16, but for those that have to stay."""
    kept = names_of(model, model_type)
    for name, parameter in model.named_parameters():
        if name not in kept:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def one_update(rank: int, world_size: int, folder: str, save_at: str) -> dict[str, Any]:
    """Score, look at what computes, update, send and save; the results are those of the whole model."""
    config = policy_config(folder, precision="bfloat16", train_micro_batch_size=1, **WITHOUT_PACKING)
    backend = DTensorBackend(config, CPU, init_reference_model=False)
    hf, worker, computes = backend.model.hf, PolicyWorker(backend, config), {}

    def look(module: torch.nn.Module, *_: Any) -> None:
        computes.update({names[id(module)] + name: each.dtype for name, each in module.named_parameters()})

    names = {id(module): f"{name}." for name, module in hf.named_modules()}
    hooks = [layer.register_forward_pre_hook(look) for layer in backend.decoder_layers().values()]
    scored = shard_batch(DATA, world_size, logprob_strategy(config), shares_prompts=False)
    scores = worker.get_logprobs(scored.data[rank], scored.sizes[rank])
    for hook in hooks:
        hook.remove()
    before = {key: whole(value.detach()).clone() for key, value in hf.named_parameters()}
    batch = shard_batch(DATA, world_size, training_strategy(config), shares_prompts=False)
    worker.train(batch.data[rank], batch.sizes[rank], WeightedNLL(), count_valid(DATA))
    after = {key: whole(value.detach()).clone() for key, value in hf.named_parameters()}
    after |= {key: value.clone() for key, value in hf.named_buffers()}
    weights = backend.held_weights(torch.bfloat16)
    values = list(weights.values())
    sent = {each.name: (each.dtype, blocks) for each, blocks in zip(weights.described(), values, strict=True)}
    backend.save(CheckpointPaths(Path(save_at)))
    return {
        "scores": scores,
        "computes": computes,
        "sent": sent,
        "before": before,
        "after": after,
    }


@pytest.mark.parametrize("model_type", MODELS)
def test_the_names_are_those_that_transformers_keeps(model_type: str) -> None:
    model = make(model_type)
    stays = stays_float32(model, torch.bfloat16)
    assert {name for name in model.state_dict() if stays(name)} == names_of(model, model_type) != set()
    assert not any(map(stays_float32(model, torch.float32), model.state_dict()))


@pytest.mark.parametrize(
    "model_type", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)
def test_a_run_in_bfloat16_keeps_them_in_float32(model_type: str, tmp_path: Path) -> None:
    model = make(model_type)
    model.save_pretrained(tmp_path / "model")
    kept = names_of(model, model_type)
    (alone,) = run_ranks(one_update, 1, str(tmp_path / "model"), str(tmp_path / "one"))
    first, second = run_ranks(one_update, 2, str(tmp_path / "model"), str(tmp_path / "two"))
    parameters = {name for name, _ in model.named_parameters()}
    for found in (alone, first, second):
        in_layers = {name for name in kept & parameters if name in found["computes"]}
        assert in_layers == kept & parameters
        others = {found["computes"][name] for name in found["computes"].keys() - kept}
        assert {found["computes"][name] for name in in_layers} <= {torch.float32} and others == {torch.bfloat16}
    trained = [name for name in kept & parameters if model.get_parameter(name).requires_grad]
    for name in trained:
        assert not torch.equal(alone["before"][name], alone["after"][name]), name
        step = alone["after"][name] - alone["before"][name]
        torch.testing.assert_close(first["after"][name] - first["before"][name], step, rtol=0.1, atol=5e-3)
    scores = hf_logprobs(as_transformers(model, model_type), DATA)
    config = policy_config(str(tmp_path / "model"), train_micro_batch_size=1, **WITHOUT_PACKING)
    for parts in ([alone], [first, second]):
        restore = shard_batch(DATA, len(parts), logprob_strategy(config), shares_prompts=False).restore
        found = restore([part["scores"] for part in parts]).double()
        assert float((found - scores).detach().abs().max()) < 2e-2
    check_sent(alone, kept)
    check_exports(tmp_path, kept, MODELS[model_type][1])


def check_exports(folder: Path, kept: set[str], pattern: str) -> None:
    """A checkpoint is in float32; a copy of it in bfloat16 keeps the bits of what stays."""
    (file,) = (folder / "one").rglob("*.safetensors")
    saved = load_file(file)
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    DTensorTraining().write_model(folder / "one", folder / "exported", torch.bfloat16)
    (file,) = (folder / "exported").glob("*.safetensors")
    exported = load_file(file)
    full = {name for name, tensor in exported.items() if tensor.dtype is torch.float32}
    assert len(full) == len(kept) and full == {name for name in saved if re.search(pattern, name)}
    assert all(torch.equal(exported[name], saved[name]) for name in full)
    assert {exported[name].dtype for name in exported.keys() - full} == {torch.bfloat16}


def check_sent(found: dict[str, Any], kept: set[str]) -> None:
    """Check dtype and bits of what is sent; files may have other names for it."""
    ends = {name.rpartition(".")[2] if not name.endswith("gate.weight") else "gate.weight" for name in kept}
    full = {name: blocks for name, (dtype, blocks) in found["sent"].items() if dtype == "float32"}
    assert full and all(name.endswith(tuple(ends)) for name in full)
    assert len(full) == len(kept)
    masters = [found["after"][name] for name in kept]
    for name, blocks in full.items():
        assert all(block.dtype is torch.float32 for block in blocks)
        assert any(_equal(blocks[0], master) for master in masters), name
    assert {dtype for name, (dtype, _) in found["sent"].items() if name not in full} == {"bfloat16"}


def _equal(block: Tensor, master: Tensor) -> bool:
    return block.numel() == master.numel() and torch.equal(block.flatten(), master.flatten())


def test_a_frozen_model_is_held_like_that() -> None:
    model = make("nemotron_h").to(torch.bfloat16)
    hold_in_float32(model, torch.bfloat16)
    dtypes = {name: each.dtype for name, each in model.named_parameters()}
    kept = names_of(model, "nemotron_h") & dtypes.keys()
    assert {dtypes[name] for name in kept} == {torch.float32}
    assert {dtypes[name] for name in dtypes.keys() - kept} == {torch.bfloat16}
