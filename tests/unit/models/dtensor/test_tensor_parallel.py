"""Layers divided over ranks give the losses, gradients and weights of one process."""

import re
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from architectures import random_model
from parity import every_type
from parity.compare import difference
from parity.models import VOCABULARY, save_model
from parity.ranks import mesh_numbers, on_ranks, policy_config
from parity.reference import one_process
from policy_helpers import WeightedNLL, random_batch, save_tiny_model
from torch import nn

from nemo_rl.config import PolicyConfig
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.distributed.ranks import collectives
from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.tensor_parallel import _run_with_means
from nemo_rl.models.dtensor.training_backend import DTensorTraining
from nemo_rl.models.huggingface.tensor_plans import COLUMN, ROW, Style, plan_for
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.utils.errors import ConfigError
from nemo_rl.weight_sync.exchange import everywhere

CPU = torch.device("cpu")
TP2 = {"tensor_parallel_size": 2}
SEQUENCE = TP2 | {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("architecture", "mesh", "ranks", "packed"),
    [
        ("qwen3-tied", SEQUENCE, 2, True),
        ("gemma3", SEQUENCE, 4, False),
        ("phi3", TP2, 4, True),
        ("qwen2", TP2, 2, False),
    ],
)
def test_divided_layers_equal_one_process(architecture, mesh, ranks, packed, tmp_path) -> None:
    model = save_model(architecture, tmp_path / "m")
    found = difference(mesh_numbers(model, mesh, ranks, packed=packed), one_process(model))
    assert found.largest < 1e-5, found


@pytest.mark.parametrize("model_type", ["olmo2", "olmoe", "flex_olmo", "minimax_m2"])
def test_norms_over_all_heads_have_the_means_of_all_ranks(model_type, tmp_path) -> None:
    fields = {"num_key_value_heads": 4, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    random_model(model_type, vocab_size=VOCABULARY, initializer_range=0.12, **fields).save_pretrained(tmp_path)
    mesh, model = SEQUENCE | {"tensor_parallel_size": 4}, str(tmp_path)
    found = difference(mesh_numbers(model, mesh, 4, packed=True, steps=1), one_process(model, 1))
    assert found.largest < 1e-5, found


@pytest.mark.parametrize(
    ("model_type", "mesh"),
    [("axk1", TP2), ("axk1", SEQUENCE), ("gemma4_text", SEQUENCE), ("zamba", SEQUENCE)],
)
def test_parts_that_need_all_ranks_or_all_tokens_equal_one_process(model_type, mesh, tmp_path) -> None:
    """A norm of a block's output (A.X-K1), a second embedding (Gemma 4), and a second stream of tokens (Zamba)."""
    model = every_type.save_tiny_model(model_type, tmp_path / "m")
    ours = mesh_numbers(model, mesh, 2, packed=True, steps=1, dtype=torch.float64)
    found = difference(ours, one_process(model, 1))
    assert found.largest < 1e-9, found


@pytest.mark.parametrize("model_type", ["minimax_m3_vl_text", "qwen4_exp_text", "phi4_multimodal"])
def test_models_whose_own_plan_gathers_what_it_divides_equal_one_process(model_type, tmp_path) -> None:
    """Keys are chosen by each head of keys (MiniMax-M3), or by all ranks for all heads (Qwen4)."""
    model = every_type.save_tiny_model(model_type, tmp_path / "m")
    ours = mesh_numbers(model, TP2, 2, packed=False, steps=1, dtype=torch.float64)
    found = difference(ours, one_process(model, 1))
    assert found.largest < 1e-9, found


def test_one_head_that_chooses_keys_is_not_divided(tmp_path) -> None:
    model = every_type.save_tiny_model("minimax_m3_vl_text", tmp_path / "m")
    config = policy_config(model, TP2, packed=False, hf_config_overrides={"index_n_heads": 1})
    with pytest.raises(ConfigError, match=r"indexer\.q_proj\.weight has 1 heads.* not a multiple of .*parallel_size=2"):
        DTensorTraining().check(config, 2)


def test_a_norm_without_a_mean_over_channels_is_refused() -> None:
    """Such a norm would use the statistics of this rank's channels alone."""
    with pytest.raises(ConfigError, match="does not compute a mean of squares"):
        _run_with_means(nn.LayerNorm(4), None, 1, torch.randn(2, 3, 4))


def _through_collectives() -> dict[str, torch.Tensor]:
    """Return gradients of `weights * f(x)` for each collective, where the weights differ by rank."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    out = {}

    def run(name: str, f, *shape: int) -> None:
        x = (torch.arange(torch.Size(shape).numel()).float().view(shape) + 10.0 * rank).requires_grad_()
        y = f(x)
        weights = torch.arange(y.numel()).float().view(y.shape) * (rank + 1) + 1
        (y * weights).sum().backward()
        assert x.grad is not None
        out[name], out[f"{name}.grad"] = y.detach(), x.grad

    run("reduce_gradient", lambda x: collectives.reduce_gradient(x, group), 2, 2)
    run("all_reduce", lambda x: collectives.all_reduce(x, group), 2, 2)
    run("gather_whole", lambda x: collectives.all_gather(x, 1, group, partial_gradient=False), 2, 2)
    run("gather_partial", lambda x: collectives.all_gather(x, 1, group, partial_gradient=True), 2, 2)
    run("reduce_scatter", lambda x: collectives.reduce_scatter(x, 1, group), 2, 2 * size)
    run("split", lambda x: collectives.split(x, 0, group), 2 * size, 2)
    send, receive = ([1, 2], [1, 0]) if rank == 0 else ([0, 1], [2, 1])
    run("all_to_all", lambda x: collectives.all_to_all(x, send, receive, group), sum(send), 2)
    return out


def test_collectives_have_hand_computed_gradients() -> None:
    one, two = on_ranks(_through_collectives, 2)
    weights = torch.arange(4.0).view(2, 2)
    ramp = torch.arange(4.0).view(2, 2)
    both = (weights + 1) + (2 * weights + 1)
    for rank, part in enumerate((one, two)):
        own = weights * (rank + 1) + 1
        assert torch.equal(part["reduce_gradient"], ramp + 10 * rank)
        assert torch.equal(part["reduce_gradient.grad"], both)
        assert torch.equal(part["all_reduce"], 2 * ramp + 10)
        assert torch.equal(part["all_reduce.grad"], own)
        assert torch.equal(part["gather_whole"], torch.cat([ramp, ramp + 10], 1))
        wide = torch.arange(8.0).view(2, 4)
        mine = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(part["gather_whole.grad"], (wide * (rank + 1) + 1)[:, mine])
        assert torch.equal(part["gather_partial.grad"], (wide * 3 + 2)[:, mine])
        assert torch.equal(part["reduce_scatter"], (2 * wide + 10)[:, mine])
        assert torch.equal(part["reduce_scatter.grad"], torch.cat([weights + 1, 2 * weights + 1], 1))
        assert torch.equal(part["split"], (torch.arange(8.0).view(4, 2) + 10 * rank)[mine])
        assert torch.equal(part["split.grad"], torch.cat([weights + 1, 2 * weights + 1], 0))
    rows = torch.arange(6.0).view(3, 2)
    assert torch.equal(one["all_to_all"], rows[:1])
    assert torch.equal(two["all_to_all"], torch.cat([rows[1:], torch.tensor([[10.0, 11.0]])]))
    assert torch.equal(one["all_to_all.grad"], torch.tensor([[1.0, 2.0], [1.0, 3.0], [5.0, 7.0]]))
    assert torch.equal(two["all_to_all.grad"], torch.tensor([[9.0, 11.0]]))


LORA = {"lora_cfg": {"enabled": True, "dim": 4, "alpha": 8}}


def _train_adapters(config: PolicyConfig) -> dict:
    layout = ParallelLayout.of(config, dist.get_world_size())
    backend = DTensorBackend(config, CPU, layout, seed=3)
    worker = PolicyWorker(backend, config)
    mine = layout.data_parallel_rank(dist.get_rank())
    out: dict = {}
    step_of = backend.clip_and_step

    def keep() -> tuple[float, bool]:
        named = backend.model.hf.named_parameters()
        out["grads"] = {name: whole(p.grad).clone() for name, p in named if p.grad is not None}
        return step_of()

    backend.clip_and_step = keep  # type: ignore[method-assign]
    for seed in (1, 2):
        data = random_batch(rows=6, seed=seed)
        batch = shard_batch(data, layout.data_parallel_size, training_strategy(config))
        worker.train(batch.data[mine], batch.sizes[mine], WeightedNLL(), count_valid(data))
    out["weights"] = {name: tensor.clone() for name, tensor in worker.iterate_weights()}
    sent = everywhere(backend.held_adapters(torch.float32), dist.group.WORLD)
    out["sent"] = {name: tensor.clone() for name, tensor in sent}
    named = backend.model.hf.named_parameters()
    out["adapter"] = {name: whole(p.detach()).clone() for name, p in named if p.requires_grad}
    return out


@pytest.mark.parametrize(("ranks", "mesh"), [(2, SEQUENCE), (4, TP2)])
def test_adapters_on_divided_layers_train_and_merge_as_on_whole_ones(ranks, mesh, tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen3", vocab_size=98)
    values = {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}}}
    (one,) = on_ranks(_train_adapters, 1, policy_config(name, LORA, packed=True, **values))
    parts = on_ranks(_train_adapters, ranks, policy_config(name, LORA | mesh, packed=True, **values))
    assert len(one["grads"]) == 28, "A and B of seven layers in two decoder layers"
    for part in parts:
        assert part["grads"].keys() == one["grads"].keys()
        for key, grad in one["grads"].items():
            torch.testing.assert_close(part["grads"][key], grad, rtol=0, atol=2e-5 * grad.abs().max().item())
        for key, weight in one["weights"].items():
            torch.testing.assert_close(part["weights"][key], weight, rtol=0, atol=1e-5)
        assert part["sent"].keys() == part["adapter"].keys()
        assert all(torch.equal(part["sent"][key], tensor) for key, tensor in part["adapter"].items())


HALVES = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.gate_proj": COLUMN}
UNKNOWN = {"model.layers.*.mlp.up_proj": "diagonal"}


def only_the_mlp(config: object) -> dict[str, Style | str]:
    """A custom plan that leaves attention whole."""
    return {**HALVES, "model.layers.*.mlp.down_proj": "rowwise"}


def test_plans_divide_each_architecture_or_refuse_it() -> None:
    gemma = plan_for(random_model("gemma3_text"))
    assert gemma["model.layers.*.self_attn.o_proj"] == ROW and gemma["lm_head"].how == "vocabulary"
    assert plan_for(random_model("deepseek_v3"))["model.layers.*.self_attn.kv_b_proj"] == COLUMN
    assert plan_for(random_model("gpt_oss"))["model.layers.*.self_attn.sinks"] == COLUMN
    with pytest.raises(ConfigError, match=r"brings no tensor-parallel plan.*custom_parallel_plan"):
        plan_for(random_model("gpt_neo"))
    with pytest.raises(ConfigError, match=r"Gemma3nForCausalLM cannot be divided .* its AltUp computes"):
        plan_for(every_type.tiny_model("gemma3n_text"))
    assert plan_for(random_model("olmo3"))["model.layers.*.self_attn.q_norm"] == Style("norm")
    unknown = random_model("llama")
    unknown._tp_plan = {"model.layers.*.self_attn.q_proj": "colwise_gather_output"}
    with pytest.raises(ConfigError, match=r"divides 'model.layers.\*.self_attn.q_proj' as 'colwise_gather_output'"):
        plan_for(unknown)
    llama = random_model("llama")
    assert plan_for(llama, "test_tensor_parallel.only_the_mlp")["model.layers.*.mlp.gate_proj"] == COLUMN
    with pytest.raises(ConfigError, match="'diagonal', which is not known here"):
        plan_for(llama, "test_tensor_parallel.UNKNOWN")


def test_a_model_that_cannot_be_divided_is_refused_before_any_rank_starts(tmp_path) -> None:
    random_model("gpt_neo").save_pretrained(tmp_path / "m")
    config = policy_config(str(tmp_path / "m"), TP2, packed=False)
    with pytest.raises(ConfigError, match="brings no tensor-parallel plan"):
        DTensorTraining().check(config, 2)
    DTensorTraining().check(policy_config(str(tmp_path / "m"), {}, packed=False), 2)


def test_the_plan_of_the_documentation_divides_its_model(tmp_path, monkeypatch) -> None:
    """`docs/development/fsdp2-parallel-plan.md`, as a reader would: the block is a module, and the plan its path."""
    text = (Path(__file__).parents[4] / "docs/development/fsdp2-parallel-plan.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^ +```python\n(.*?)^ +```", text, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "my_package.py").write_text(textwrap.dedent(block))
    monkeypatch.syspath_prepend(tmp_path)
    model = str(tmp_path / "m")
    random_model("olmo2", vocab_size=VOCABULARY).save_pretrained(model)
    mesh = TP2 | {"custom_parallel_plan": "my_package.my_plan"}
    found = difference(mesh_numbers(model, mesh, 2, packed=False), one_process(model))
    assert found.largest < 1e-5, found


def test_a_custom_plan_may_leave_attention_whole(tmp_path) -> None:
    model = save_model("llama", tmp_path / "m")
    mesh = TP2 | {"custom_parallel_plan": "test_tensor_parallel.only_the_mlp"}
    found = difference(mesh_numbers(model, mesh, 2, packed=False), one_process(model))
    assert found.largest < 1e-5, found
