"""A model that is built without weights and then reads its part equals that of `from_pretrained`, bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from architectures import (
    _COMMON,
    PACKS,
    REFUSED_AT_LOAD,
    REFUSED_BY_PROBE,
    SPECIAL,
    WAY_OUT,
    random_model,
)
from policy_helpers import policy_config, process_group, run_ranks, save_tiny_model, tiny_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from nemo_rl.distributed.ranks.placements import as_sharded, held_here
from nemo_rl.distributed.ranks.tensor_block import block_here
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.checkpoints.lazy_weights import weights_left_in_files
from nemo_rl.models.dtensor.checkpoints.model_files import weights_by_name
from nemo_rl.models.huggingface.load import load_causal_lm, load_scoring_model
from nemo_rl.models.huggingface.probe_model import small_probe_model
from nemo_rl.models.huggingface.tensor_files import TensorFiles
from nemo_rl.utils.errors import CheckpointError, ConfigError

CPU = torch.device("cpu")
IDS = (torch.arange(24) * 7 + 3)[None] % 97
ALL = (*PACKS, *REFUSED_AT_LOAD, *REFUSED_BY_PROBE)
LORA = {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4}}}


def _backend(folder, **values) -> DTensorBackend:
    return DTensorBackend(policy_config(str(folder), **values), CPU, init_optimizer=False, init_reference_model=False)


@torch.no_grad()
def _logits(model) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("model_type", ALL)
def test_every_architecture_equals_from_pretrained(model_type, tmp_path) -> None:
    random_model(model_type).save_pretrained(tmp_path)
    with process_group():
        ours = _backend(tmp_path).model.hf
        theirs = load_causal_lm(str(tmp_path))
        assert [*weights_by_name(ours)] == [*weights_by_name(theirs)]
        for name, buffer in theirs.named_buffers():
            assert torch.equal(ours.get_buffer(name), buffer), name
        assert torch.equal(_logits(ours), _logits(theirs))


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "deepseek_v3"])
def test_no_weight_is_read_while_the_model_is_built(model_type, tmp_path) -> None:
    random_model(model_type).save_pretrained(tmp_path)
    with weights_left_in_files() as lazy_weights:
        hf = load_causal_lm(str(tmp_path))
    assert lazy_weights.files == [tmp_path / "model.safetensors"]
    assert all(weight.is_meta for weight in weights_by_name(hf).values())
    assert not any(buffer.is_meta for name, buffer in hf.named_buffers() if "rotary" in name)
    assert not any(weight.is_meta for weight in load_causal_lm(str(tmp_path)).parameters()), "outside of the block"


def _ranks_load(rank: int, world_size: int, folder: str, values: dict) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)  # random initialization may not depend on it
    return {name: tensor.clone() for name, tensor in _backend(folder, **values).iterate_weights()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_ranks_read_their_shards_of_several_files_in_bfloat16(precision, tmp_path) -> None:
    model = random_model("qwen3_moe").to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    want = {name: value for file in tmp_path.glob("*.safetensors") for name, value in load_file(file).items()}
    for weights in run_ranks(_ranks_load, 3, str(tmp_path), {"precision": precision}):
        assert weights.keys() == want.keys()
        assert all(torch.equal(weights[name], value.float()) for name, value in want.items())


def test_a_randomly_initialized_head_equals_transformers_on_every_rank(tmp_path) -> None:
    folder = save_tiny_model(tmp_path)
    want = load_scoring_model(folder).state_dict()
    values = {"reward_model_cfg": {"enabled": True, "reward_model_type": "bradley_terry"}}
    for weights in run_ranks(_ranks_load, 2, folder, values):
        assert "score.weight" in weights
        assert all(torch.equal(value, want[name]) for name, value in weights.items())


def test_adapters_start_with_equal_values_with_and_without_weights(tmp_path) -> None:
    folder = save_tiny_model(tmp_path)
    with process_group():
        weights = dict(_backend(folder, **LORA).model.hf.named_parameters())
    assert weights["model.layers.0.mlp.up_proj.lora_A"].abs().max() > 0
    assert weights["model.layers.0.mlp.up_proj.lora_B"].abs().max() == 0
    for shared in run_ranks(_lora_locals, 2, folder):
        for name, (value, start) in shared.items():
            assert torch.equal(value, weights[name].detach()[start : start + len(value)]), name


def _lora_locals(rank: int, world_size: int, folder: str) -> dict[str, tuple[torch.Tensor, int]]:
    named = _backend(folder, **LORA).model.hf.named_parameters()
    return {name: (held_here(p).detach().clone(), rank * -(-len(p) // world_size)) for name, p in named}


def test_weights_that_are_tied_stay_tied_whichever_name_the_file_has(tmp_path) -> None:
    tiny_model("qwen2", tie=True).save_pretrained(tmp_path / "a")
    tensors = load_file(tmp_path / "a/model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    contents = {
        "head": {**tensors, "lm_head.weight": embedding},
        "both": {**tensors, "lm_head.weight": embedding.clone(), "model.embed_tokens.weight": embedding},
        "different": {**tensors, "lm_head.weight": embedding + 1, "model.embed_tokens.weight": embedding},
    }
    for name, content in contents.items():
        shutil.copytree(tmp_path / "a", tmp_path / name)
        save_file(content, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        theirs = load_causal_lm(str(tmp_path / name))
        with process_group():
            ours = _backend(tmp_path / name).model.hf
        tied = ours.lm_head.weight is ours.model.embed_tokens.weight
        assert tied is (theirs.lm_head.weight is theirs.model.embed_tokens.weight) is (name != "different")
        assert torch.equal(_logits(ours), _logits(theirs)), name


def test_models_without_safetensors_are_read_whole(tmp_path, caplog) -> None:
    model = tiny_model("qwen2").eval()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with process_group():
        assert torch.equal(_logits(_backend(tmp_path).model.hf), _logits(model))
    assert "not in safetensors: every rank reads the whole model" in caplog.text


def test_files_that_contradict_the_configuration_are_named(tmp_path) -> None:
    save_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    with process_group():
        (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
        shapes = r"mlp\.\w+_proj\.weight has shape \(\d+, \d+\), but \(\d+, \d+\) in .*model\.safetensors"
        with pytest.raises(CheckpointError, match=shapes):
            _backend(tmp_path)
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:5000])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
            _backend(tmp_path)


def test_overrides_reach_the_lazy_model(tmp_path) -> None:
    folder = save_tiny_model(tmp_path)
    with process_group():
        assert _backend(folder, hf_config_overrides={"rms_norm_eps": 0.5}).model.hf.model.norm.variance_epsilon == 0.5


PLACEMENTS = [[Shard(0), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(1), Replicate()]]


def _places(rank: int, world_size: int, folder: str) -> None:
    """Check any placements on two axes, uneven ones too: each rank reads what `distribute_tensor` gives it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensors = TensorFiles([Path(folder) / "model.safetensors"])
    for name in tensors:
        whole = tensors.read(name)
        for placements in PLACEMENTS if whole.dim() == 2 else [[Shard(0), Replicate()]]:
            want = distribute_tensor(whole, mesh, placements)
            assert torch.equal(tensors.read(name, block_here(want)), want.to_local())
    for divided in (Shard(0), Shard(1)):
        layer, whole = nn.Linear(6, 6, bias=False), torch.arange(36.0).view(6, 6)
        layer.weight = as_sharded(nn.Parameter(whole), divided, mesh["tp"])
        fully_shard(layer, mesh=mesh["dp"])
        assert torch.equal(block_here(layer.weight).of(whole), held_here(layer.weight))


def test_shards_of_all_placements_are_read(tmp_path) -> None:
    run_ranks(_places, 4, save_tiny_model(tmp_path))


@pytest.mark.parametrize("model_type", [*PACKS, *REFUSED_BY_PROBE])
def test_the_probe_model_behaves_like_the_model(model_type, tmp_path) -> None:
    random_model(model_type).save_pretrained(tmp_path)
    with process_group():
        if model_type in REFUSED_BY_PROBE:
            with pytest.raises(ConfigError, match=f"(?s){REFUSED_BY_PROBE[model_type]}.*{WAY_OUT}"):
                _backend(tmp_path, sequence_packing={"enabled": True})
        else:
            _backend(tmp_path, sequence_packing={"enabled": True})


def _refused(rank: int, world_size: int, folder: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        _backend(folder, sequence_packing={"enabled": True})
    return str(refusal.value)


def test_all_ranks_raise_the_same_error(tmp_path) -> None:
    random_model("stablelm").save_pretrained(tmp_path)
    said = run_ranks(_refused, 2, str(tmp_path))
    assert said[0] == said[1] and "differ from those of the same sequences padded" in said[0]


def test_a_probe_model_is_small_and_has_every_kind_of_layer() -> None:
    with torch.device("meta"):
        large = random_model_on_meta(
            "deepseek_v3", hidden_size=1024, num_hidden_layers=8, vocab_size=50_000, intermediate_size=4096
        )
    before = torch.get_rng_state()
    probe_model = small_probe_model(large)
    assert torch.equal(torch.get_rng_state(), before)
    assert [type(layer.mlp).__name__ for layer in probe_model.model.layers] == ["DeepseekV3MLP", "DeepseekV3MoE"]
    assert sum(p.numel() for p in probe_model.parameters()) < 0.1 * sum(p.numel() for p in large.parameters())
    assert torch.isfinite(_logits(probe_model)).all()
    assert all(
        torch.equal(a, b) for a, b in zip(probe_model.parameters(), small_probe_model(large).parameters(), strict=True)
    )


def test_an_encoder_is_refused_by_name() -> None:
    config = AutoConfig.for_model(
        "bert", vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with pytest.raises(ConfigError, match="BertForSequenceClassification has no list of decoder layers: BertEmbedd"):
        small_probe_model(AutoModelForSequenceClassification.from_config(config))


def random_model_on_meta(model_type: str, **overrides):
    config = AutoConfig.for_model(model_type, **_COMMON | SPECIAL[model_type] | overrides)
    return AutoModelForCausalLM.from_config(config)


def test_a_base_model_without_its_prefix_is_found(tmp_path) -> None:
    """Files of GPT-2 name the layers of the body alone: `h.0`, not `transformer.h.0`."""
    model = random_model("gpt2")
    model.config.save_pretrained(tmp_path)
    body = {name: tensor.contiguous() for name, tensor in model.transformer.state_dict().items()}
    save_file(body, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.manual_seed(3)  # the head is randomly initialized
    theirs = load_causal_lm(str(tmp_path))
    with process_group():
        torch.manual_seed(3)
        ours = _backend(tmp_path).model.hf
    assert torch.equal(_logits(ours), _logits(theirs))
    assert torch.equal(ours.transformer.h[1].mlp.c_fc.weight, body["h.1.mlp.c_fc.weight"])


def test_a_reward_model_is_read_from_its_own_checkpoint(tmp_path) -> None:
    score = AutoModelForSequenceClassification.from_config(tiny_model("qwen2", num_labels=1).config)
    score.save_pretrained(tmp_path)
    values = {"reward_model_cfg": {"enabled": True, "reward_model_type": "bradley_terry"}}
    with process_group():
        assert torch.equal(_backend(tmp_path, **values).model.hf.score.weight, score.score.weight)
