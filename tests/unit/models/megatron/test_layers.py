"""Layers and building: errors of upstream, what each option builds, and what is refused.

Importing megatron takes longer than all checks together, so that one pair of ranks runs them; each is a test here.
"""

import traceback
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_backend import CPU, shared_files, start_groups
from rank_host import limit_waits, needs_megatron
from small_models import hf_config, hf_model
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm
from witness import compare, global_tensors, own_tensors

from nemo_rl.config import MegatronConfig
from nemo_rl.models.attention import Scoring, attend, plan_of_row
from nemo_rl.utils.errors import ConfigError

TP2 = {"tp": 2}
TP2_SP = {"tp": 2, "sp": True}


def chunks_of(
    name: str,
    precision: torch.dtype = torch.float32,
    values: dict[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
):
    """Return this rank's models without values, on new groups."""
    from nemo_rl.models.megatron.model.build import build_chunks

    section = start_groups(**options)
    return build_chunks(hf_config(name, **values or {}), section, precision=precision, device=CPU, seed=seed)


@contextmanager
def replaced(owner: Any, name: str, value: Any):
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def refusal(name: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        chunks_of(name, **options)
    return str(raised.value)


PACKED_ATTENTION: tuple[tuple[str | None, tuple[int, int], bool, bool], ...] = (
    (None, (8, 0), False, False),  # A100
    (None, (8, 9), False, False),  # L40S
    (None, (8, 0), True, True),
    (None, (9, 0), False, True),  # H100
    (None, (10, 0), False, True),
    (None, (12, 0), False, False),
    (None, (12, 0), True, True),
    (None, (7, 5), True, False),
    ("auto", (8, 0), False, False),
    ("fused", (8, 0), True, False),
    ("fused", (9, 0), False, True),
    ("flash", (9, 0), False, False),
    ("unfused", (9, 0), True, False),
    ("local", (8, 0), False, True),
)
"""Choice of a kernel, compute capability of the GPU, whether flash-attn is installed, and whether packed rows run."""


def check_packed_rows_need_an_attention_kernel_of_the_gpu() -> None:
    from nemo_rl.models.megatron.model.build import require_packed_attention

    for chosen, capability, flash, runs in PACKED_ATTENTION:
        try:
            require_packed_attention(chosen, capability, has_flash_attn=flash)
        except ConfigError as refused:
            number = ".".join(map(str, capability))
            assert not runs, (chosen, capability, flash)
            assert f"capability {number} " in str(refused)
            assert "policy.sequence_packing.enabled=false" in str(refused)
        else:
            assert runs, (chosen, capability, flash)


def check_divided_down_projections_give_wrong_gradients() -> None:
    """Check the reason for `PortableLatentAttention`: the comparison finds upstream's layer wrong."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from nemo_rl.models.megatron.conversion import importer
    from nemo_rl.models.megatron.model import layer_spec

    def fill(chunks: Any, *ignored: Any) -> None:
        """The importer refuses such layers."""
        hf = hf_model("deepseek_v3")
        wanted = own_tensors(chunks[0], global_tensors(hf.config, dict(hf.state_dict())))
        for name, tensor in chunks[0].state_dict(keep_vars=True).items():
            if name in wanted:
                tensor.data.copy_(wanted[name])

    with (
        replaced(layer_spec, "PortableLatentAttention", MLASelfAttention),
        replaced(importer, "load_huggingface", fill),
    ):
        logits, gradients, _ = compare("deepseek_v3", packed=False, **TP2_SP)
    assert logits < 1e-5 and gradients > 1e-3
    assert compare("deepseek_v3", packed=False, **TP2_SP)[1] < 1e-5


def check_latent_attention_without_sequence_parallelism_is_wrong() -> None:
    """Check the reason for a refusal, on layers without experts, which Megatron Core would accept."""
    from nemo_rl.models.megatron.model import build as build_file

    dense = {"first_k_dense_replace": 3}
    assert "sequence_parallel=true" in refusal("deepseek_v3", values=dense, **TP2)
    with replaced(build_file, "_refuse_wrong_gradients", lambda fields: None):
        logits, gradients, _ = compare("deepseek_v3", packed=False, values=dense, **TP2)
    assert logits < 1e-5 and gradients > 1e-3


def check_biases_of_experts_are_summed_once() -> None:
    from nemo_rl.models.megatron.model import build as build_file

    with replaced(build_file, "_reduce_experts_once", lambda model: None):
        _, gradients, worst = compare("gpt_oss", packed=False, **TP2_SP)
    assert gradients > 0.9 and worst.endswith("linear_fc2.bias")


def check_divided_experts_with_biases_are_refused() -> None:
    """Check that Megatron Core refuses them: each rank would add the whole bias."""
    assert "only supported when ETP==1" in refusal("gpt_oss", etp=2, **TP2_SP)


def check_recomputation_changes_nothing() -> None:
    for options in ({}, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}):
        for name in ("gemma3_text", "gpt_oss", "deepseek_v3"):
            found = compare(name, packed=True, activation_checkpointing=True, **TP2_SP, **options)
            assert max(found[:2]) < 1e-5, (name, options, found)


def check_tensor_and_context_parallel_experts() -> None:
    """Check experts where ranks divide both tokens and experts."""
    for name in ("qwen3_moe", "deepseek_v3", "gpt_oss"):
        assert max(compare(name, packed=True, cp=2, ep=2)[:2]) < 1e-5


def check_stages_have_their_layers() -> None:
    rank = torch.distributed.get_rank()
    (chunk,) = chunks_of("qwen2", pp=2, num_layers_in_first_pipeline_stage=1)
    assert [layer.layer_number for layer in chunk.decoder.layers] == ([1], [2, 3])[rank]
    assert (chunk.pre_process, chunk.post_process) == (rank == 0, rank == 1)
    assert chunk.config.variable_seq_lengths
    assert hasattr(chunk, "embedding") == (rank == 0) and hasattr(chunk, "output_layer") == (rank == 1)


def check_virtual_stages_are_one_model_each() -> None:
    rank = torch.distributed.get_rank()
    chunks = chunks_of("gpt_oss", values={"num_hidden_layers": 4}, pp=2, vpp=2)
    numbers = [[layer.layer_number for layer in chunk.decoder.layers] for chunk in chunks]
    assert numbers == [[[1], [3]], [[2], [4]]][rank]
    assert [chunk.pre_process for chunk in chunks] == [rank == 0, False]
    assert [chunk.post_process for chunk in chunks] == [False, rank == 1]
    assert [chunk.vp_stage for chunk in chunks] == [0, 1]
    assert not chunks[0].config.batch_p2p_comm, "batched messages between virtual stages cross"


def check_windows_are_those_of_global_layers() -> None:
    """Check windows by global layer number: a stage's first layer is not the model's first."""
    rank = torch.distributed.get_rank()
    (chunk,) = chunks_of("gpt_oss", pp=2, num_layers_in_first_pipeline_stage=1)
    windows = [layer.self_attention.core_attention._window for layer in chunk.decoder.layers]
    assert windows == ([3], [None, 3])[rank]


def check_no_layer_is_upstream_s() -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    for name in ("llama", "qwen3_moe", "deepseek_v3", "gemma3_text", "gpt_oss", "nemotron_h", "qwen3_next"):
        for module in chunks_of(name)[0].modules():
            assert not isinstance(module, DotProductAttention | WrappedTorchNorm | torch.nn.RMSNorm)
            assert not type(module).__module__.startswith("transformer_engine"), type(module)


def check_norms_round_as_transformers() -> None:
    from nemo_rl.models.megatron.model.layers import RMSNorm, WideRMSNorm

    x = torch.randn(5, 64, dtype=torch.bfloat16)
    for kind, centred in ((LlamaRMSNorm, False), (Gemma3RMSNorm, True), (NemotronHRMSNorm, False)):
        theirs = kind(64).to(torch.bfloat16)
        theirs.weight.data.normal_()
        config = SimpleNamespace(
            use_cpu_initialization=True,
            params_dtype=torch.bfloat16,
            sequence_parallel=True,
            layernorm_zero_centered_gamma=centred,
        )
        ours = (WideRMSNorm if kind is NemotronHRMSNorm else RMSNorm)(config, 64, eps=1e-6)
        assert ours.weight.sequence_parallel and ours.weight.float().mean() == (0 if centred else 1)
        ours.load_state_dict(theirs.state_dict())
        assert torch.equal(ours(x), theirs(x))


def check_scans_equal_the_recurrence() -> None:
    """Check chunks of any size against one token after another, in float64."""
    from nemo_rl.models.megatron.model.mamba import chunked_scan

    shape = {"x": (2, 11, 2, 3, 4), "step": (2, 11, 2, 3), "B": (2, 11, 2, 5), "C": (2, 11, 2, 5)}
    given = {name: torch.randn(size, dtype=torch.float64) for name, size in shape.items()}
    given["step"], rate = given["step"].exp(), -torch.rand(2, 3, dtype=torch.float64)
    state, wanted = torch.zeros(2, 2, 3, 4, 5, dtype=torch.float64), []
    for x, step, key, query in zip(*(each.unbind(1) for each in given.values()), strict=True):
        added = step[..., None, None] * x[..., None] * key[:, :, None, None]
        state = (step * rate).exp()[..., None, None] * state + added
        wanted.append((state * query[:, :, None, None]).sum(-1))
    for chunk in (1, 4, 11, 16):
        found = chunked_scan(given["x"], given["step"], rate, given["B"], given["C"], chunk)
        assert torch.allclose(found, torch.stack(wanted, 1), atol=1e-12)


def check_states_of_packed_rows_would_leak() -> None:
    """Check the reason for `SequenceGroups`: the comparison finds states that pass from sequence to sequence."""
    from nemo_rl.models.megatron.model import delta_net, mamba

    for file, name in ((mamba, "nemotron_h"), (delta_net, "qwen3_next")):
        with replaced(file, "sequence_groups", lambda bounds: None):
            logits, gradients, _ = compare(name, packed=True)
        assert logits > 1e-3 and gradients > 1e-3


def check_packed_sequences_of_any_length() -> None:
    """Check sequences of one token, and borders within and after the chunks of 64 tokens that the rule computes."""
    for name in ("qwen3_next", "nemotron_h"):
        for lengths, mesh in (((1, 70, 3, 1), {}), ((3, 65, 1, 1), TP2_SP), ((4, 68, 8), {"cp": 2})):
            assert max(compare(name, packed=True, lengths=lengths, **mesh)[:2]) < 1e-5, (name, lengths)


def check_norms_of_delta_nets_are_summed_over_ranks() -> None:
    """Check the reason for `HeadNorm`: Megatron Core does not sum the gradient without sequence parallelism."""
    from nemo_rl.models.megatron.model import delta_net

    assert max(compare("qwen3_next_dense", packed=True, **TP2)[:2]) < 1e-5
    with replaced(delta_net, "copy_to_tensor_model_parallel_region", lambda weight, group: weight):
        logits, gradients, worst = compare("qwen3_next_dense", packed=True, **TP2)
    assert logits < 1e-5 and gradients > 1e-3 and worst.endswith("out_norm.weight")


def check_norms_of_heads_are_joint() -> None:
    """Check the reason for `JointlyNormedAttention`: the comparison finds norms over a rank's own heads wrong."""
    from nemo_rl.models.megatron.model import layers

    with replaced(layers, "all_reduce", lambda x, group: 2 * x):
        logits, gradients, _ = compare("minimax_m2", packed=False, **TP2_SP)
    assert logits > 1e-3 and gradients > 1e-3


def check_a_few_queries_see_all_cached_keys() -> None:
    """Check queries that are the last tokens of the keys, as in generation."""
    core = chunks_of("gpt_oss")[0].decoder.layers[0].self_attention.core_attention
    core.softmax_offset.data.normal_()
    query, key, value = (torch.randn(9, 2, heads, 32) for heads in (4, 2, 2))
    whole = core(query, key, value, None)
    assert torch.allclose(core(query[-2:], key, value, None), whole[-2:], atol=1e-6)
    scoring = Scoring(32**-0.5, 3, sinks=core.softmax_offset)
    wanted = attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), plan_of_row(9), scoring)
    assert torch.allclose(whole, wanted.permute(2, 0, 1, 3).flatten(2), atol=1e-6)


def check_dtypes_follow_the_precision() -> None:
    from nemo_rl.models.megatron.conversion.importer import load_huggingface

    (chunk,) = chunks_of("deepseek_v3", torch.bfloat16)
    assert {parameter.dtype for parameter in chunk.parameters()} == {torch.bfloat16}
    assert chunk.decoder.layers[1].mlp.router.expert_bias.dtype is torch.float32
    assert chunk.config.bf16 and chunk.config.pipeline_dtype is torch.bfloat16
    for name, kept in {"nemotron_h": {"A_log", "D", "dt_bias"}, "qwen3_next": {"A_log", "dt_bias"}}.items():
        with shared_files(hf_model(name, dtype=torch.bfloat16)) as folder:
            (chunk,) = chunks_of(name, torch.bfloat16)
            load_huggingface([chunk], hf_config(name), folder)
        wide = {name.split(".")[-1] for name, each in chunk.named_parameters() if each.dtype is torch.float32}
        assert wide == kept


def check_embeddings_are_scaled_as_rounded_by_transformers() -> None:
    (chunk,) = chunks_of("gemma3_text", torch.bfloat16, {"hidden_size": 72})
    ids = torch.arange(6)[None]
    chunk.embedding.word_embeddings.weight.data.normal_()
    scale = torch.tensor(72**0.5).bfloat16()
    assert scale.item() != 72**0.5
    wanted = chunk.embedding.word_embeddings.weight[ids[0]] * scale
    assert torch.equal(chunk.embedding(ids, ids)[:, 0], wanted)


def check_routers_can_be_frozen() -> None:
    (chunk,) = chunks_of("gpt_oss", freeze_moe_router=True)
    frozen = [name for name, parameter in chunk.named_parameters() if not parameter.requires_grad]
    kinds = {name.split(".mlp.")[-1] for name in frozen}
    assert kinds == {"router.weight", "router.bias"} and len(frozen) == 6


def check_options_reach_the_configuration() -> None:
    options = {"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "aux_loss", "moe_router_dtype": "fp64"}
    overrides = {"layernorm_epsilon": 0.25}
    (chunk,) = chunks_of("deepseek_v3", model_overrides=overrides, **options)
    config = chunk.config
    assert {key: getattr(config, key) for key in options} == options and config.layernorm_epsilon == 0.25
    assert config.moe_router_bias_update_rate == 0.0, "upstream's default moves the bias by 1e-3 in each step"
    assert config.calculate_per_token_loss and config.moe_router_enable_expert_bias


def check_wrong_options_are_refused() -> None:
    message = refusal("llama", model_overrides={"layernorm_epsilo": 1.0})
    assert "model_overrides.layernorm_epsilo is no field" in message and "layernorm_epsilon" in message
    assert "batch_p2p_comm cannot be set" in refusal("llama", model_overrides={"batch_p2p_comm": True})
    assert "transformer-engine" in refusal("llama", transformer_impl="transformer_engine")
    assert "Megatron Core refuses" in refusal(
        "llama", model_overrides={"num_attention_heads": 3, "bf16": True, "fp16": True}
    )


def check_float8_needs_transformer_engine() -> None:
    """Check the refusal, that Megatron Core takes the fields, and that copies of the weights are freed."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo_rl.models.megatron.model.build import _float8
    from nemo_rl.models.megatron.model.layers import free_float8_copies

    section = {"enabled": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"}
    assert "fp8_cfg.enabled=true needs a GPU and the package transformer-engine" in refusal("llama", fp8_cfg=section)
    options = MegatronConfig.build(fp8_cfg=section)
    fields = _float8(options, "transformer_engine")
    assert fields == {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": False}
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, **fields)
    assert config.fp8 == "hybrid" and config.fp8_recipe == "tensorwise"
    assert _float8(MegatronConfig.build(), "local") == {}
    layer = torch.nn.Linear(2, 2)
    layer._fp8_workspaces = {"weight": torch.ones(2)}
    free_float8_copies([torch.nn.Sequential(layer, torch.nn.ReLU())])
    assert layer._fp8_workspaces == {}


def check_packed_rows_name_the_sequence_of_each_token() -> None:
    """Check against Megatron Core's computation on the device."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from nemo_rl.models.megatron.inputs import _packed_parameters

    bounds = [0, 5, 7, 11]
    cumulative = torch.tensor(bounds, dtype=torch.int32)
    want = PackedSeqParams("thd", cumulative, cumulative, total_tokens=11).seq_idx
    found = _packed_parameters(bounds, CPU)
    assert found.total_tokens == 11 and found.seq_idx.dtype == want.dtype and torch.equal(found.seq_idx, want)


def check_random_weights_follow_the_seed() -> None:
    random = {"perform_initialization": True}
    first, second, third = (chunks_of("llama", seed=seed, model_overrides=random)[0].state_dict() for seed in (3, 3, 4))
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    assert torch.equal(first[name], second[name]) and not torch.equal(first[name], third[name])


def check_checkpoints_know_what_is_divided() -> None:
    """Check that names and shapes of a sharded checkpoint are those of the whole model, on any mesh."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    for name in ("gemma3_text", "gpt_oss", "deepseek_v3", "minimax_m2", "nemotron_h", "qwen3_next"):
        shapes = []
        for tp in (1, 2):
            sharded = chunks_of(name, tp=tp, sp=tp == 2)[0].sharded_state_dict()
            tensors = [one for one in sharded.values() if isinstance(one, ShardedTensor)]
            shapes.append({one.key: one.global_shape for one in tensors})
        assert shapes[0] == shapes[1] and len(shapes[0]) > 5
    sharded = chunks_of("gpt_oss", **TP2_SP)[0].sharded_state_dict()
    sinks = sharded["decoder.layers.0.self_attention.core_attention.softmax_offset"]
    assert sinks.global_shape[-1] == 4 and sinks.local_shape == (2,)


CHECKS: dict[str, Callable[[], None]] = {
    name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")
}


def _run_all(rank: int, world_size: int) -> dict[str, str | None]:
    limit_waits(60.0)
    failures: dict[str, str | None] = dict.fromkeys(CHECKS)
    for name, check in CHECKS.items():
        try:
            check()
        except (Exception, pytest.fail.Exception):
            failures[name] = traceback.format_exc()
    return failures


@pytest.fixture(scope="module")
def failures(host) -> list[dict[str, str | None]]:
    """Return the failure of each check by rank, or None."""
    return host.run(_run_all, 2)


@needs_megatron
@pytest.mark.parametrize("name", CHECKS)
def test_each_layer_and_builder_case_passes(failures, name):
    for of_rank in failures:
        assert of_rank[name] is None, of_rank[name]
