"""Small models of Megatron Core in ranks that save and load them, and the host process that these ranks are forks of.

Layers and conversion are a witness of their own: nothing here is the library's but what reads and writes checkpoints.
Importing this module imports no megatron.
"""

import multiprocessing
import re
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from policy_helpers import run_ranks
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from nemo_rl.models.interfaces import CheckpointPaths

VOCAB, ROWS, LENGTH = 64, 4, 16
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


class Host:
    """A process that has imported Megatron Core; it forks the ranks, and the process of the tests stays as it is."""

    def __init__(self) -> None:
        fork = multiprocessing.get_context("fork")
        self._here, there = fork.Pipe()
        self._process = fork.Process(target=_serve, args=(there,), daemon=False)
        self._process.start()

    def run(self, fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
        """What `fn(rank, num_ranks, *args)` returns, by rank."""
        self._here.send((fn, num_ranks, args))
        worked, result = self._here.recv()
        assert worked, result
        return result

    def stop(self) -> None:
        self._here.send(None)
        self._process.join(timeout=5)
        self._process.kill()  # a rank that failed may keep it waiting


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    _pretend_cuda()
    while (asked := pipe.recv()) is not None:
        try:
            pipe.send((True, run_ranks(asked[0], asked[1], *asked[2])))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


@dataclass(frozen=True)
class Mesh:
    """How ranks divide a model; the rest of them is data parallel."""

    kind: str = "llama"
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    sp: bool = False
    distributed: bool = False
    dtype: torch.dtype = torch.float32
    optimizer: str = "adam"
    num_layers: int | None = None


def hf_config(mesh: Mesh) -> PretrainedConfig:
    sizes = {**_SIZES, "num_hidden_layers": mesh.num_layers or _SIZES["num_hidden_layers"]}
    if mesh.kind == "llama":
        return LlamaConfig(**sizes, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    if mesh.kind == "qwen2":
        return Qwen2Config(**sizes, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"])
    assert mesh.kind == "qwen3_moe"
    return Qwen3MoeConfig(**sizes, **_EXPERTS, head_dim=16, mlp_only_layers=[0], architectures=["Qwen3MoeForCausalLM"])


class Run:
    """A model in training on this rank; megatron's groups are made for it anew.

    Attributes:
        chunks: wrapped virtual stages.
        optimizer: Megatron Core's.
        scheduler: of it.
    """

    def __init__(self, mesh: Mesh, seed: int = 0) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        self.mesh, self.hf_config = mesh, hf_config(mesh)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=mesh.tp,
            pipeline_model_parallel_size=mesh.pp,
            virtual_pipeline_model_parallel_size=mesh.vpp,
            expert_model_parallel_size=mesh.ep,
            expert_tensor_parallel_size=mesh.etp,
        )
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        bare = _build(mesh, self.hf_config)
        _fill(bare, mesh, seed)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=mesh.distributed)
        self.chunks = [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in bare]
        with _CudaNames():
            settings = OptimizerConfig(
                optimizer=mesh.optimizer,
                lr=1e-2,
                min_lr=1e-4,
                weight_decay=0.1,
                sgd_momentum=0.9,
                clip_grad=1.0,
                bf16=mesh.dtype is torch.bfloat16,
                params_dtype=mesh.dtype,
                use_distributed_optimizer=mesh.distributed,
            )
            self.optimizer: Any = get_megatron_optimizer(settings, self.chunks)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, 0.0, 1e-2, 1e-4, 2, 20, "cosine", 0.1, 0.1, 20, "constant"
        )
        self.scheduler.step(increment=0)

    def update(self, step: int) -> float:
        """One optimizer update; the loss of the batch, on all ranks."""
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        ids = (ids + torch.randint(0, 2, ids.shape)) % VOCAB  # draws from the process's generator, as dropout does
        dist.broadcast(ids, 0)
        share = parallel_state.get_data_parallel_world_size()
        mine = ids.chunk(share)[parallel_state.get_data_parallel_rank()]
        count, losses = ROWS * (LENGTH - 1), []

        def forward(rows: Any, chunk: Any) -> Any:
            row = next(rows)[None]
            places = torch.arange(LENGTH)[None]
            logits = chunk(row, places, None)
            return logits, lambda logits: _loss(logits, row, count, losses)

        config = self.chunks[0].module.config
        config.finalize_model_grads_func = lambda chunks, num_tokens=None, **rest: finalize_model_grads(
            chunks, None, **rest
        )
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with _CudaNames():
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=[iter(mine) for _ in self.chunks] if len(self.chunks) > 1 else iter(mine),
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(mine),
                seq_length=LENGTH,
                micro_batch_size=1,
                forward_only=False,
            )
            self.optimizer.step()
        self.scheduler.step(increment=1)
        total = torch.tensor(float(sum(losses)))
        dist.all_reduce(total)
        return total.item() / self.mesh.tp

    def state(self) -> dict[str, Any]:
        """Copies of every bit that counts on this rank."""
        from nemo_rl.models.megatron.optimizer_state import members

        found: dict[str, Any] = {"schedule": self.scheduler.state_dict(), "rng": torch.get_rng_state()}
        for index, chunk in enumerate(self.chunks):
            found |= {f"{index}.{name}": tensor.detach().clone() for name, tensor in chunk.module.named_parameters()}
        for number, member in enumerate(members(self.optimizer)):
            for group in member.optimizer.param_groups:
                found[f"{number}.groups"] = (*found.get(f"{number}.groups", ()), (group["lr"], group["weight_decay"]))
            parameters = [p for group in member.optimizer.param_groups for p in group["params"]]
            for index, parameter in enumerate(parameters):
                found[f"{number}.{index}.main"] = parameter.detach().clone()
                for name, value in member.optimizer.state[parameter].items():
                    found[f"{number}.{index}.{name}"] = value.clone() if isinstance(value, Tensor) else value
        return found

    def save(self, folder: Path) -> None:
        from nemo_rl.models.megatron import checkpoint_io

        checkpoint_io.save(paths_in(folder), self.chunks, self.optimizer, self.scheduler, hf_config=self.hf_config)

    def load(self, folder: Path) -> None:
        from nemo_rl.models.megatron import checkpoint_io

        checkpoint_io.load(paths_in(folder), self.chunks, self.optimizer, self.scheduler)


def paths_in(folder: Path) -> CheckpointPaths:
    return CheckpointPaths(folder / "policy" / "weights", folder / "policy" / "optimizer")


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names under which two states of `Run.state` differ in any bit."""

    def same(name: str) -> bool:
        a, b = one[name], other[name]
        return torch.equal(a, b) if isinstance(a, Tensor) else a == b

    return sorted(one.keys() ^ other.keys()) + [name for name in sorted(one.keys() & other.keys()) if not same(name)]


def _loss(logits: Tensor, row: Tensor, count: int, losses: list[float]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    per_token = vocab_parallel_cross_entropy(logits[0, :-1, None].float(), row[0, 1:, None])
    loss = per_token.sum() / count
    losses.append(loss.item())
    return loss, torch.ones((), dtype=torch.int), {}


class _Norm(torch.nn.Module):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **rest: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


def _build(mesh: Mesh, c: Any) -> list[Any]:
    """Megatron Core's own layers, with norms that sequence parallelism is allowed for."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts: dict[str, Any] = {}
    if mesh.kind == "qwen3_moe":
        experts = {
            "num_moe_experts": c.num_experts,
            "moe_router_topk": c.num_experts_per_tok,
            "moe_ffn_hidden_size": c.moe_intermediate_size,
            "moe_layer_freq": [0 if layer in c.mlp_only_layers else 1 for layer in range(c.num_hidden_layers)],
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_router_dtype": "fp32",
            "expert_model_parallel_size": mesh.ep,
            "expert_tensor_parallel_size": mesh.etp,
        }
    config = TransformerConfig(
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        ffn_hidden_size=c.intermediate_size,
        num_attention_heads=c.num_attention_heads,
        num_query_groups=c.num_key_value_heads,
        kv_channels=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        normalization="RMSNorm",
        layernorm_epsilon=c.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=mesh.kind == "qwen2",
        qk_layernorm=mesh.kind == "qwen3_moe",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=mesh.dtype,
        pipeline_dtype=mesh.dtype,
        bf16=mesh.dtype is torch.bfloat16,
        transformer_impl="local",
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        virtual_pipeline_model_parallel_size=mesh.vpp,
        sequence_parallel=mesh.sp,
        calculate_per_token_loss=True,
        batch_p2p_comm=False,
        **experts,
    )
    chunks = []
    for index in range(mesh.vpp or 1):
        stage = index if mesh.vpp else None
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
        for layer in spec.layer_specs:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _Norm
            attention = layer.submodules.self_attention.submodules
            for name in ("q_layernorm", "k_layernorm"):
                if getattr(attention, name, IdentityOp) not in (None, IdentityOp):
                    setattr(attention, name, _Norm)
        spec.layer_norm = _Norm
        chunks.append(
            GPTModel(
                config,
                spec,
                vocab_size=VOCAB,
                max_sequence_length=64,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                share_embeddings_and_output_weights=c.tie_word_embeddings,
                position_embedding_type="rope",
                rotary_base=10000,
                vp_stage=stage,
            )
        )
    return chunks


def whole_weights(mesh: Mesh, seed: int = 0) -> dict[str, Tensor]:
    """Hugging Face's tensors by hub names, made up."""
    c: Any = hf_config(mesh)
    made = torch.Generator().manual_seed(seed)
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    rows = {"q": c.num_attention_heads * width, "k": c.num_key_value_heads * width, "v": c.num_key_value_heads * width}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, c.hidden_size)}
    for layer in range(c.num_hidden_layers):
        p = f"model.layers.{layer}."
        shapes |= {f"{p}{kind}_layernorm.weight": (c.hidden_size,) for kind in ("input", "post_attention")}
        shapes |= {f"{p}self_attn.{name}_proj.weight": (size, c.hidden_size) for name, size in rows.items()}
        shapes[f"{p}self_attn.o_proj.weight"] = (c.hidden_size, rows["q"])
        if mesh.kind == "qwen2":
            shapes |= {f"{p}self_attn.{name}_proj.bias": (size,) for name, size in rows.items()}
        if mesh.kind == "qwen3_moe":
            shapes |= {f"{p}self_attn.{name}_norm.weight": (width,) for name in "qk"}
        mlps = {f"{p}mlp.": c.intermediate_size}
        if mesh.kind == "qwen3_moe" and layer not in c.mlp_only_layers:
            shapes[f"{p}mlp.gate.weight"] = (c.num_experts, c.hidden_size)
            mlps = {f"{p}mlp.experts.{expert}.": c.moe_intermediate_size for expert in range(c.num_experts)}
        for prefix, inner in mlps.items():
            shapes |= {f"{prefix}{name}_proj.weight": (inner, c.hidden_size) for name in ("gate", "up")}
            shapes[f"{prefix}down_proj.weight"] = (c.hidden_size, inner)
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (VOCAB, c.hidden_size)
    found = {name: torch.randn(shape, generator=made) * 0.1 for name, shape in shapes.items()}
    return {name: (value + 1 if "norm" in name else value).to(mesh.dtype) for name, value in found.items()}


def _in_megatron(name: str, hub: dict[str, Tensor], groups: int) -> tuple[Tensor, ...]:
    """The hub tensors that a parameter of the whole model is made of, in order: two for gate and up."""
    layer = re.sub(r"decoder\.layers\.(\d+)\..*", r"model.layers.\1.", name)
    end = name.removeprefix(re.sub(r"(decoder\.layers\.\d+\.).*", r"\1", name))
    plain = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight" if "lm_head.weight" in hub else "model.embed_tokens.weight",
        "input_layernorm.weight": f"{layer}input_layernorm.weight",
        "pre_mlp_layernorm.weight": f"{layer}post_attention_layernorm.weight",
        "self_attention.linear_proj.weight": f"{layer}self_attn.o_proj.weight",
        "self_attention.q_layernorm.weight": f"{layer}self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": f"{layer}self_attn.k_norm.weight",
        "mlp.router.weight": f"{layer}mlp.gate.weight",
    }
    found = plain.get(name, plain.get(end))
    if found is not None:
        return (hub[found],)
    if "linear_qkv" in end:
        kind = end.rsplit(".", 1)[1]
        parts = [hub[f"{layer}self_attn.{x}_proj.{kind}"].unflatten(0, (groups, -1)) for x in "qkv"]
        return (torch.cat(parts, 1).flatten(0, 1),)
    mlp = layer + end.replace("local_experts.", "").split("linear_fc")[0]
    if "linear_fc1" in end:
        return hub[f"{mlp}gate_proj.weight"], hub[f"{mlp}up_proj.weight"]
    return (hub[f"{mlp}down_proj.weight"],)


@torch.no_grad()
def _fill(chunks: list[Any], mesh: Mesh, seed: int) -> None:
    from megatron.core import parallel_state as state

    hub, c = whole_weights(mesh, seed), hf_config(mesh)
    first_expert = state.get_expert_model_parallel_rank() * (getattr(c, "num_experts", 0) // mesh.ep)
    for chunk in chunks:
        layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, parameter in chunk.named_parameters():
            name = re.sub(r"layers\.(\d+)\.", lambda at, layers=layers: f"layers.{layers[int(at[1])]}.", name)
            name = re.sub(r"local_experts\.(\d+)", lambda at: f"local_experts.{first_expert + int(at[1])}", name)
            ranks, rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
            if "experts" in name:
                ranks = state.get_expert_tensor_parallel_world_size()
                rank = state.get_expert_tensor_parallel_rank()
            parts = _in_megatron(name, hub, c.num_key_value_heads)
            if ranks > 1 and getattr(parameter, "tensor_model_parallel", False):
                parts = tuple(part.chunk(ranks, parameter.partition_dim)[rank] for part in parts)
            parameter.copy_(torch.cat(parts))


class _CudaNames(TorchFunctionMode):
    """Tensors say that they are CUDA's, and are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


class _NoStream:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


def _pretend_cuda() -> None:
    """What small models ask of CUDA."""
    import megatron.core.jit
    import megatron.core.tensor_parallel.random as random

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.current_stream = lambda *args, **kwargs: _NoStream()
    cuda.Stream = cuda.Event = lambda *args, **kwargs: _NoStream()
    cuda.stream = lambda stream: nullcontext()
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    megatron.core.jit.disable_jit_fuser()
