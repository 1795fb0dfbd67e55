"""Train adapters on tiny models by PEFT and torch on the Hugging Face model, and by `MegatronBackend`."""

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import mesh_parity as parity
import torch
import torch.distributed as dist
from rank_backend import CPU, policy_of
from small_models import hf_model
from torch import Tensor
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from transformers import AutoModelForCausalLM
from witness import _share, difference, global_tensors

from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.huggingface.recurrent import use_configured_time_steps
from nemo_rl.models.training.inputs import InputLayout, build_training_inputs
from nemo_rl.models.training.interfaces import CheckpointPaths

DIM, ALPHA, STEPS = 4, 8, 3
LAYERS = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen2": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "gemma3_text": ("o_proj", "down_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj",
                    "down_proj"),
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj",
                         "up_proj", "down_proj"),
    "nemotron_h": ("in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"),
}  # fmt: skip
TARGETS: dict[str, list[str]] = {"gemma3_text": ["linear_proj", "linear_fc2"]}
_FUSED = ("deepseek_v3", "qwen3_next", "nemotron_h")
"""Kinds with one tensor for all experts of a layer."""
_PARAMETERS = ("lora_A", "lora_B")
_SHARING = (("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj"), ("in_proj_ba", "in_proj_qkvz"))


@dataclass
class Trained:
    """Values that PEFT gives, by `<layer>.lora_A` and `<layer>.lora_B` of the hub, in float64."""

    first: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    last: dict[str, Tensor] = field(default_factory=dict)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    merged: dict[str, Tensor] = field(default_factory=dict)


def model(kind: str) -> Any:
    made = hf_model(kind, num_hidden_layers=2 if kind == "deepseek_v3" else 4)
    made.set_experts_implementation("eager")
    return made


class _LowRank(torch.nn.Module):
    """A weight plus what an adapter adds to it, by the formula."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.lora_A = torch.nn.Parameter(torch.empty(DIM, inputs, dtype=torch.float64))
        self.lora_B = torch.nn.Parameter(torch.empty(outputs, DIM, dtype=torch.float64))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + ALPHA / DIM * self.lora_B @ self.lora_A


def _with_adapters(kind: str, hf: Any) -> tuple[Any, dict[str, Any]]:
    """Return the model with adapters, and the holders of A and B by layer: PEFT's modules, or the formula with fused
    experts, whose layers PEFT takes for those of all MLPs of that name.
    """
    import peft

    hf.requires_grad_(False)
    names = [n for n, m in hf.named_modules() if type(m) is torch.nn.Linear and n.rpartition(".")[2] in LAYERS[kind]]
    if kind in _FUSED:
        for name in names:
            layer = hf.get_submodule(name)
            register_parametrization(layer, "weight", _LowRank(*layer.weight.shape))
        return hf, {name: hf.get_submodule(name).parametrizations.weight[0] for name in names}
    adapted = peft.get_peft_model(hf, peft.LoraConfig(r=DIM, lora_alpha=ALPHA, target_modules=names))
    layers = {name: adapted.base_model.model.get_submodule(name) for name in names}
    for layer in layers.values():  # under the names of the formula
        layer.own = {part: getattr(layer, part)["default"] for part in _PARAMETERS}
    return adapted, layers


def _holder(layer: Any, part: str) -> tuple[Any, str]:
    """Return the module that has a parameter, and its name there."""
    return (layer, part) if isinstance(layer, _LowRank) else (layer.own[part], "weight")


def train_reference(kind: str) -> Trained:
    """Run three steps of AdamW on adapters that share A where Megatron Core merges several layers into one."""
    adapted, layers = _with_adapters(kind, model(kind).double())
    made = torch.Generator().manual_seed(5)
    for layer in layers.values():
        for part in _PARAMETERS:
            parameter = getattr(*_holder(layer, part))
            parameter.data = torch.randn(parameter.shape, generator=made).double() * 0.1
    for name, layer in layers.items():
        for sharing, owner in _SHARING:
            if name.endswith(f".{sharing}") and name.replace(sharing, owner) in layers:
                shared = getattr(*_holder(layers[name.replace(sharing, owner)], "lora_A"))
                setattr(*_holder(layer, "lora_A"), shared)
    values = {
        f"{name}.{part}": getattr(*_holder(layer, part)) for name, layer in layers.items() for part in _PARAMETERS
    }
    trained = Trained({name: value.detach().clone() for name, value in values.items()})
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(parameters, lr=parity.LR, weight_decay=parity.DECAY, eps=parity.EPS)
    for step in range(STEPS):
        data = parity.batch(step)
        parity.loss_of(*parity._scores(adapted, data), data, parity.count_of(data)).backward()
        if step == 0:
            trained.gradients = {name: value.grad.clone() for name, value in values.items()}
        trained.norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, parity.CLIP)))
        adam.step()
        adam.zero_grad()
    trained.last = {name: value.detach().clone() for name, value in values.items()}
    trained.logits = logits_of(adapted)
    if kind in _FUSED:
        for name in layers:
            remove_parametrizations(adapted.get_submodule(name), "weight")
    merged = adapted if kind in _FUSED else adapted.merge_and_unload()
    # Files of Nemotron-H have another prefix than the modules.
    prefix = "backbone." if kind.startswith("nemotron_h") else "model."
    state = merged.state_dict().items()
    trained.merged = {name.replace("model.", prefix, 1): tensor.detach() for name, tensor in state}
    return trained


@torch.no_grad()
def logits_of(hf: Any) -> Tensor:
    ids = parity.batch(9)["input_ids"][:2]
    return torch.stack([hf(input_ids=row[None], use_cache=False).logits[0].double() for row in ids])


class Policy:
    """A `MegatronBackend` with adapters.

    Args:
        folder: of the Hugging Face model.
        values: of `policy.megatron_cfg`.
        precision: `policy.precision`.
    """

    def __init__(self, kind: str, folder: Path, values: dict[str, Any] | None = None, precision: str = "float32"):
        from nemo_rl.models.megatron.backend import MegatronBackend
        from nemo_rl.models.megatron.parallel import stop_model_parallel

        stop_model_parallel()
        peft = {"enabled": True, "dim": DIM, "alpha": ALPHA, "target_modules": TARGETS.get(kind, [])}
        values = dict(values or {})
        config = policy_of(str(folder), precision, peft=peft | values.pop("peft", {}), **values)
        self.layout = ParallelLayout.of(config, dist.get_world_size())
        self.backend = MegatronBackend(config, CPU, self.layout, seed=3)
        self.hf_config = self.backend.hf_config

    def whole(self, values: dict[str, Tensor], part: str) -> dict[str, Any]:
        """Return A or B in Megatron Core's layout, by the name of the layer's weight in the whole model."""
        hub = {
            name.replace(part, "weight"): value.float() for name, value in values.items() if name.endswith(f".{part}")
        }
        outer = ("model.embed_tokens.weight", "model.norm.weight")
        norms = [f"{name.partition('mixer')[0]}norm.weight" for name in hub if ".mixer." in name]
        empty = {name: torch.zeros(0) for name in (*outer, *norms)}
        return _shared_a(hub) if part == "lora_A" else global_tensors(self.hf_config, empty | hub)

    def shares(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of some values, by `<layer>.lora_A` and `<layer>.lora_B`."""
        from nemo_rl.models.megatron.lora import adapted_modules

        wholes = {part: self.whole(values, part) for part in _PARAMETERS}
        return {
            f"{name}.{part}": _share(getattr(module, part), wholes[part][f"{name}.weight"], expert=False)
            for name, module in adapted_modules(self.backend.chunks).items()
            for part in wholes
        }

    def parameters(self) -> dict[str, Tensor]:
        from nemo_rl.models.megatron.lora import adapted_modules

        return {
            f"{name}.{part}": getattr(module, part)
            for name, module in adapted_modules(self.backend.chunks).items()
            for part in _PARAMETERS
        }

    @torch.no_grad()
    def fill(self, values: dict[str, Tensor]) -> None:
        for name, share in self.shares(values).items():
            self.parameters()[name].copy_(share)
        self.backend.optimizer.reload_model_params()

    def difference(self, found: dict[str, Tensor], values: dict[str, Tensor]) -> float:
        wanted = self.shares(values)
        assert wanted.keys() == found.keys()
        return max((difference(found[name], wanted[name]) for name in wanted), default=0.0)

    def accumulate(self, step: int, packed: bool = False) -> None:
        """Run one training pass over this rank's rows, in four microbatches."""
        data = parity.batch(step)
        share = parity.ROWS // self.layout.data_parallel_size
        first = self.layout.data_parallel_rank(dist.get_rank()) * share
        bounds = [first, first + 1, first + 2, first + 3, first + share]
        rows = [data.slice(start, stop) for start, stop in pairwise(bounds)]
        inputs = [build_training_inputs(part, InputLayout(packed), CPU) for part in rows]

        def forward_step(index: int, logprobs_K: Tensor, entropy_K: Tensor) -> Tensor:
            scores = inputs[index].scatter(logprobs_K), inputs[index].scatter(entropy_K)
            return parity.loss_of(*scores, rows[index], parity.count_of(data))

        self.backend.run(inputs, forward_step, backward=True)

    def update(self, step: int) -> float:
        self.accumulate(step)
        norm, stepped = self.backend.clip_and_step()
        assert stepped
        return norm

    def gradients(self) -> dict[str, Tensor]:
        return {name: tensor.main_grad.clone() for name, tensor in self.parameters().items()}

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.double().clone() for name, tensor in self.backend.iterate_weights()}

    def base(self) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in self.backend._weights().items() if ".lora_" not in name}

    def scores(self) -> Tensor | None:
        """Return the log-probs of a batch; None in a stage that has none."""
        given: list[Tensor] = []
        inputs = build_training_inputs(parity.batch(7), InputLayout(True), CPU)
        self.backend.run([inputs], lambda index, first, second: given.append(first.clone()), backward=False)
        return given[0] if given else None


def paths_in(folder: Path) -> CheckpointPaths:
    return CheckpointPaths(folder / "policy" / "weights", folder / "policy" / "optimizer")


def _shared_a(hub: dict[str, Tensor]) -> dict[str, Any]:
    """Return A of Megatron Core's layers; a layer made of several of the hub's has the A of the first."""
    owners = {
        "self_attn.q_proj": "self_attention.linear_qkv",
        "self_attn.o_proj": "self_attention.linear_proj",
        "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
        "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
        "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
        "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
        "mlp.gate_proj": "mlp.linear_fc1",
        "mlp.down_proj": "mlp.linear_fc2",
        "mlp.shared_experts.gate_proj": "mlp.shared_experts.linear_fc1",
        "mlp.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
        "mlp.shared_expert.gate_proj": "mlp.shared_experts.linear_fc1",
        "mlp.shared_expert.down_proj": "mlp.shared_experts.linear_fc2",
        "linear_attn.in_proj_qkvz": "self_attention.in_proj",
        "linear_attn.out_proj": "self_attention.out_proj",
        "mixer.in_proj": "self_attention.in_proj",
        "mixer.q_proj": "self_attention.linear_qkv",
        "mixer.o_proj": "self_attention.linear_proj",
        "mixer.shared_experts.up_proj": "mlp.shared_experts.linear_fc1",
        "mixer.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
        "mixer.up_proj": "mlp.linear_fc1",
        "mixer.down_proj": "mlp.linear_fc2",
    }
    found = {}
    for name, value in hub.items():
        for theirs, ours in owners.items():
            if name.endswith(f".{theirs}.weight"):
                found[name.replace(theirs, ours).replace("model.layers", "decoder.layers")] = value
    return found


def run_case(
    kind: str, folder: Path, values: dict[str, Any], trained: Trained, saved: Path | None = None
) -> dict[str, float]:
    """Return the largest differences of one mesh from PEFT on this rank; leave a checkpoint."""
    policy = Policy(kind, folder, values)
    policy.fill(trained.first)
    base, before = policy.base(), policy.scores()
    policy.accumulate(0)
    found = {"norms": 0.0}
    if not policy.backend.chunks[0].ddp_config.use_distributed_optimizer:  # each rank there sums only a part
        found["gradients"] = policy.difference(policy.gradients(), trained.gradients)
    norms = [policy.backend.clip_and_step()[0], *(policy.update(step) for step in range(1, STEPS))]
    found["norms"] = max(abs(norm / wanted - 1) for norm, wanted in zip(norms, trained.norms, strict=True))
    policy.backend._optim.complete_weights(policy.backend.chunks)
    found["adapters"] = policy.difference(policy.parameters(), trained.last)
    found["base moved"] = sum(not torch.equal(base[name], tensor) for name, tensor in policy.base().items())
    with policy.backend.reference_weights():
        within = policy.scores()
    found["reference"] = _apart(within, _base_scores(kind)) if within is not None else 0.0
    after = policy.scores()
    found["unmoved"] = float(before is not None and after is not None and torch.equal(before, after))
    exported = policy.weights()
    hub = {name: tensor for name, tensor in trained.merged.items() if name in exported}
    found["unnamed"] = float(len(exported.keys() ^ hub.keys()) - _fused(kind, exported))
    found["merged"] = max(_apart(exported[name], tensor) for name, tensor in hub.items())
    if saved is not None:
        policy.backend.save(paths_in(saved))
    return found


def _fused(kind: str, exported: dict[str, Tensor]) -> int:
    """Return tensors of experts, which transformers keeps under other names."""
    return sum(".experts." in name for name in exported)


def _apart(found: Tensor, wanted: Tensor) -> float:
    return difference(found.double(), wanted.double())


def _base_scores(kind: str) -> Tensor:
    inputs = build_training_inputs(parity.batch(7), InputLayout(True), CPU)
    hf = model(kind).double()
    with torch.no_grad():
        logits = torch.stack([hf(input_ids=i[None], use_cache=False).logits[0] for i in parity.batch(7)["input_ids"]])
    log_p = logits[:, :-1].log_softmax(-1).flatten(0, 1)[inputs.places_K]
    return log_p.gather(-1, inputs.targets_K[:, None])[:, 0]


def logits_in_peft(folder: Path, adapter: Path) -> Tensor:
    import peft

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    use_configured_time_steps(plain)
    return logits_of(peft.PeftModel.from_pretrained(plain, adapter).eval())
