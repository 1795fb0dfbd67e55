"""Values of tokens on a rank of Megatron Core, on every kind of mesh, against Hugging Face prefix by prefix."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from critic_cases import SquaredError, critic_batch, reference
from rank_backend import CPU, backend_of, policy_of
from rank_host import Host, needs_megatron
from small_models import VOCAB, hf_model
from torch import Tensor
from witness import global_tensors, largest_gradient_difference

from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.parallel_logprobs import initial_head
from nemo_rl.models.policy.batching import count_valid
from nemo_rl.models.policy.workers.loss_calls import call_loss
from nemo_rl.models.policy.workers.scoring import ScoringWorker
from nemo_rl.models.training.inputs import InputLayout, build_training_inputs, split_rows

pytestmark = needs_megatron

ALLOWED = 1e-5
CRITIC = {"reward_model_cfg": {"enabled": True}}
TP, SP = {"tp": 2}, {"tp": 2, "sp": True}
CP, PP, EP = {"cp": 2}, {"pp": 2}, {"ep": 2}
CASES: dict[str, tuple[int, str, dict[str, Any], bool]] = {
    "data parallel": (2, "llama", {}, True),
    "tensor": (2, "llama", TP, False),
    "tensor and sequence": (2, "llama", SP, True),
    "context": (2, "llama", CP, True),
    "context, padded": (2, "llama", CP, False),
    "stages": (2, "llama", PP, True),
    "interleaved stages": (2, "llama", PP | {"vpp": 2}, False),
    "experts": (2, "qwen3_moe", EP, True),
    "context, tensor and sequence": (4, "llama", CP | SP, True),
    "stages and tensor": (4, "llama", PP | SP, False),
    "experts and context": (4, "qwen3_moe", EP | CP, True),
}
QUICK = ["tensor and sequence", "context", "stages"]
"""Cases of two ranks that every run of the tests takes; the others take minutes on a busy machine."""


def cases_on(ranks: int) -> list[str]:
    return [name for name, case in CASES.items() if case[0] == ranks]


def _batch() -> Any:
    data = critic_batch()
    data["input_ids"] = data["input_ids"].clamp(max=VOCAB - 1)
    return data


DATA = _batch()


def _model(kind: str) -> Any:
    made = hf_model(kind, scores=True, num_hidden_layers=4, **({"mlp_only_layers": []} if kind == "qwen3_moe" else {}))
    made.set_experts_implementation("eager")
    return made


def _on_ranks(rank: int, world: int, names: list[str], wanted: dict[str, Any]) -> dict[str, Any]:
    return {name: _differences(name, wanted[CASES[name][1]]) for name in names}


def _differences(name: str, want: dict[str, Any]) -> dict[str, float]:
    """Return the largest differences of this rank's values, of the loss and of this rank's gradients."""
    _, kind, sizes_of_mesh, packed = CASES[name]
    backend = backend_of(_model(kind), **sizes_of_mesh, **CRITIC)
    layout = ParallelLayout.of(policy_of(**sizes_of_mesh), dist.get_world_size())
    share = DATA.size // layout.data_parallel_size
    first = layout.data_parallel_rank(dist.get_rank()) * share
    mine, sizes = DATA.slice(first, first + share), [1, share - 1]
    gives = dist.get_rank() in layout.result_ranks
    got = ScoringWorker(backend, InputLayout(packed), gives_scores=gives).get_values(mine, sizes)
    found = {"values": (got - want["values"][first : first + share]).abs().max().item() if gives else 0.0}
    rows, valid, losses = list(split_rows(mine, sizes)), tuple(map(torch.tensor, count_valid(DATA))), []
    inputs = [build_training_inputs(part, InputLayout(packed), CPU) for part in rows]

    def step(index: int, values_K: Tensor, zeros_K: Tensor) -> Tensor:
        loss, _ = call_loss(SquaredError(), inputs[index], values_K, zeros_K, rows[index], valid)
        losses.append(loss.item())
        return loss

    backend.run(inputs, step, backward=True)
    total = torch.tensor(sum(losses) if gives else 0.0, dtype=torch.float64)
    dist.all_reduce(total)
    found["loss"] = abs(total.item() / want["loss"] - 1)
    gradients = global_tensors(_model(kind).config, dict(want["gradients"]))
    found["gradients"], _ = largest_gradient_difference(backend.chunks, gradients)
    return found


@pytest.mark.parametrize(
    ("world", "names"),
    [
        pytest.param(2, QUICK, id="quick"),
        pytest.param(2, cases_on(2), marks=pytest.mark.long, id="two ranks"),
        pytest.param(
            4, [name for name, case in CASES.items() if case[0] == 4], marks=pytest.mark.long, id="four ranks"
        ),
    ],
)
def test_values_and_gradients_do_not_depend_on_the_mesh(host: Host, world: int, names: list[str]) -> None:
    wanted = {kind: reference(_model(kind), DATA) for kind in {CASES[name][1] for name in names}}
    for want in wanted.values():
        assert want["values"].abs().max() > 0.5
        del want["metrics"]
    of_ranks = host.run(_on_ranks, world, names, wanted)
    found = {(name, what): of_rank[name][what] for of_rank in of_ranks for name in names for what in of_rank[name]}
    assert {case: difference for case, difference in found.items() if not difference < ALLOWED} == {}


def _new_heads(rank: int, world: int) -> dict[str, Any]:
    """Return the heads that a language model gets on two meshes, and values of a model in bfloat16."""
    heads = []
    for mesh in (SP, PP):
        backend = backend_of(hf_model("llama", num_hidden_layers=2), init_optimizer=False, **mesh, **CRITIC)
        heads.append(dict(backend.iterate_weights())["score.weight"].clone())
    backend = backend_of(_model("llama"), init_optimizer=False, precision="bfloat16", **CRITIC)
    values = ScoringWorker(backend, InputLayout(True)).get_values(DATA, [4, 4])
    return {"heads": heads, "values": values}


def test_a_new_head_equals_that_of_the_other_backend_and_values_are_float32(host: Host) -> None:
    for rank in host.run(_new_heads, 2):
        assert all(torch.equal(head, initial_head(64, 0)) for head in rank["heads"])
        real = rank["values"] != 0
        assert rank["values"].dtype == torch.float32
        assert (rank["values"] != rank["values"].bfloat16().float())[real].float().mean() > 0.9
