"""Adapters on one base in a rank: gradients, updates and files against PEFT, torch.optim and float64."""

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
from adapter_cases import (
    CROSS_ENTROPY,
    SHAPE,
    given_rows,
    make_worker,
    peft_logprobs,
    peft_model,
    randomize,
    run,
)
from policy_helpers import policy_config, process_group, run_ranks, save_tiny_model
from transformers import AutoModelForCausalLM

from nemo_rl.models.adapters.tensors import AdapterShape
from nemo_rl.models.adapters.training import AdamParams
from nemo_rl.models.policy.adapter_policy import joined_rows
from nemo_rl.models.policy.batching import shard_batch, training_strategy
from nemo_rl.models.policy.workers.adapter_rank import LOSS_INPUTS, NamedLoss, Refusal

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 40}}
BFLOAT16 = {"precision": "bfloat16"}
UPDATE = AdamParams(1e-2)


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def base(request, tmp_path_factory) -> str:
    """A model with a head of its own, and one with the head tied to the embedding."""
    tied = request.param == "gemma3"
    return save_tiny_model(tmp_path_factory.mktemp("model") / request.param, request.param, tie=tied)


@pytest.fixture
def group():
    with process_group():
        yield


def test_a_new_adapter_equals_the_base(base, group):
    worker = make_worker(base)
    assert worker.create_adapter("a", SHAPE) is None
    rows = given_rows(k=2)
    _, logprobs = run(worker, "a", rows, backward=False)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    for row, wanted in zip(logprobs, peft_logprobs(model, rows), strict=True):
        torch.testing.assert_close(row[: len(wanted)].double(), wanted, rtol=0, atol=2e-5)
    one = given_rows((9,))
    assert torch.equal(run(worker, "a", one)[1], worker.score_given(one, [1], None))


@pytest.mark.parametrize("values", [{}, PACKED])
@pytest.mark.parametrize("k", [1, 3])
def test_values_and_gradients_are_those_of_peft(base, group, tmp_path, values, k):
    """Cross entropy with targets of any kind and weights of any sign, in float64, also with an adapted head."""
    worker = make_worker(base, **values)
    worker.create_adapter("a", SHAPE)
    randomize(worker, "a")
    assert worker.save_adapter("a", str(tmp_path / "adapter"), with_optimizer=False) is None
    rows = given_rows(k=k)
    loss, logprobs = run(worker, "a", rows, **values)
    model = peft_model(base, tmp_path / "adapter")
    scores = peft_logprobs(model, rows)
    weights = [w[: len(s)] for w, s in zip(rows[f"{LOSS_INPUTS}.weights"], scores, strict=True)]
    wanted = -sum((w.double() * s).sum() for w, s in zip(weights, scores, strict=True))
    wanted.backward()
    for row, own in zip(logprobs, scores, strict=True):
        torch.testing.assert_close(row[: len(own)].double(), own.detach(), rtol=0, atol=2e-5)
    assert loss == pytest.approx(wanted.item(), rel=1e-5, abs=1e-4)
    theirs = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    ours = worker._trained["a"]._sums
    assert any("lm_head" in name for name in ours) and len(ours) == len(theirs)
    scale = max(gradient.abs().max() for gradient in theirs.values())
    for name, gradient in ours.items():
        peft_name = f"base_model.model.{name}.default.weight"
        assert (gradient.double() - theirs[peft_name]).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize("settings", [{"shape": AdapterShape(2, 4.0, train_mlp=False, train_unembed=False)}, {}])
def test_groups_of_layers(base, group, settings):
    worker = make_worker(base)
    shape = settings.get("shape", AdapterShape(2, 4.0, train_attn=False))
    worker.create_adapter("a", shape)
    names = {name.rpartition(".lora_")[0] for name in worker._trained["a"].tensors.parameters()}
    kinds = {name.rpartition(".")[2] for name in names}
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert kinds == (attention if shape.train_attn else {"gate_proj", "up_proj", "down_proj", "lm_head"})


def test_a_tied_head_changes_the_output_only(group, tmp_path):
    base = save_tiny_model(tmp_path / "m", "gemma3", tie=True)
    worker = make_worker(base)
    hf = worker.backend.model.hf
    assert hf.lm_head.weight is hf.model.embed_tokens.weight
    worker.create_adapter("a", AdapterShape(4, 4.0, train_attn=False, train_mlp=False))
    randomize(worker, "a")
    hidden = []
    handle = hf.model.register_forward_hook(lambda module, args, out: hidden.append(out.last_hidden_state))
    rows = given_rows()
    adapted = run(worker, "a", rows, backward=False)[1]
    plain = worker.score_given(rows, [3], None)
    handle.remove()
    assert torch.equal(torch.cat([h.flatten(0, 1) for h in hidden[:-1]])[:1], hidden[-1].flatten(0, 1)[:1])
    assert not torch.allclose(adapted, plain)


def test_updates_are_those_of_adamw(base, group):
    """50 updates with changing parameters, some of them clipped, some without a gradient, against float64."""
    worker = make_worker(base)
    worker.create_adapter("a", SHAPE)
    randomize(worker, "a")
    trained = worker._trained["a"]
    reference = {name: value.detach().double().requires_grad_() for name, value in trained._parameters.items()}
    optimizer = torch.optim.AdamW(reference.values())
    generator = torch.Generator().manual_seed(1)
    for step in range(50):
        params = AdamParams(1e-3 * (1 + step % 3), 0.9, 0.95, 1e-12, 0.1 * (step % 2), 0.1 * (step % 4 == 1))
        draws = {name: torch.randn(value.shape, generator=generator) for name, value in reference.items()}
        if step % 10 == 9:
            draws = {name: torch.zeros_like(draw) for name, draw in draws.items()}
        else:
            for half in (0.25, 0.75):
                trained.add_gradients({name: half * draw for name, draw in draws.items()})
        for name, value in reference.items():
            value.grad = draws[name].double()
        norm = torch.nn.utils.clip_grad_norm_(reference.values(), params.grad_clip_norm or math.inf)
        for group_ in optimizer.param_groups:
            group_ |= {"lr": params.learning_rate, "betas": (params.beta1, params.beta2), "eps": 1e-12}
            group_["weight_decay"] = params.weight_decay
        optimizer.step()
        assert worker.update_adapter("a", params) == pytest.approx(norm.item(), rel=1e-5)
    for name, value in trained._parameters.items():
        torch.testing.assert_close(value.double(), reference[name], rtol=0, atol=1e-5)


def test_a_pass_that_is_not_finite_adds_nothing(base, group):
    worker = make_worker(base)
    worker.create_adapter("a", SHAPE)
    rows = given_rows()
    run(worker, "a", rows)
    before = {name: value.clone() for name, value in worker._trained["a"]._sums.items()}
    wild = rows.copy()
    weights = wild.pop(f"{LOSS_INPUTS}.weights")
    wild |= {f"{LOSS_INPUTS}.advantages": weights, f"{LOSS_INPUTS}.logprobs": torch.full_like(weights, -1e4)}
    (refused,) = worker.run_passes(joined_rows([wild]), [3], ["a"], NamedLoss("importance_sampling"), True).losses
    assert isinstance(refused, Refusal) and "nothing was added" in refused.reason
    for name, value in worker._trained["a"]._sums.items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    "changes", [{"learning_rate": 1e39}, {"weight_decay": 1e42}, {"learning_rate": 0.1, "gradient": 1e30}]
)
def test_an_update_that_is_not_finite_changes_nothing(base, group, changes):
    """Neither the first update of an adapter, nor a later one; the gradients stay."""
    changes = dict(changes)
    gradient = changes.pop("gradient", None)
    for num_before in (0, 1):
        worker = make_worker(base)
        for name in ("a", "b"):
            worker.create_adapter(name, SHAPE)
            randomize(worker, name)
            for seed in range(num_before):
                run(worker, name, given_rows(seed=seed))
                worker.update_adapter(name, UPDATE)
            run(worker, name, given_rows(seed=5))
        a = worker._trained["a"]
        if gradient is not None:
            wild = {name: torch.full_like(value, gradient) for name, value in a._sums.items()}
            kept, a._sums = a._sums, wild
        refused = worker.update_adapter("a", replace(UPDATE, **changes))
        assert isinstance(refused, Refusal) and "would make values infinite" in refused.reason
        if gradient is not None:
            assert a._sums is wild
            a._sums = kept
        assert worker.update_adapter("a", UPDATE) == worker.update_adapter("b", UPDATE)
        b = worker._trained["b"]._everything()
        assert all(torch.equal(value, b[name]) for name, value in a._everything().items())


def test_a_dropped_adapter_is_freed(base, group):
    worker = make_worker(base)
    worker.create_adapter("a", SHAPE)
    run(worker, "a", given_rows())
    worker.update_adapter("a", UPDATE)
    worker.keep_sampler("s", "a")
    held = [*worker._trained["a"]._everything().values(), *worker._samplers["s"].parameters().values()]
    seen = [weakref.ref(tensor.untyped_storage()) for tensor in held]
    worker.drop_adapter("a")
    worker.drop_sampler("s")
    del held
    gc.collect()
    assert len(seen) > 50 and not any(ref() is not None for ref in seen)


@pytest.mark.parametrize("pending", [False, True])
def test_a_loaded_adapter_continues_with_the_same_bits(base, group, tmp_path, pending):
    """With its optimizer, also between a pass and its update."""
    worker = make_worker(base)
    worker.create_adapter("a", SHAPE)
    for seed in range(3):
        run(worker, "a", given_rows(seed=seed))
        worker.update_adapter("a", UPDATE)
    if pending:
        run(worker, "a", given_rows(seed=9))
    assert worker.save_adapter("a", str(tmp_path / "a"), with_optimizer=True) is None
    assert worker.load_adapter("b", str(tmp_path / "a"), with_optimizer=True) == SHAPE
    assert worker.load_adapter("fresh", str(tmp_path / "a"), with_optimizer=False) == SHAPE
    for seed in range(3, 6):
        losses = {name: run(worker, name, given_rows(seed=seed))[0] for name in ("a", "b", "fresh")}
        assert losses["a"] == losses["b"]
        for name in losses:
            worker.update_adapter(name, UPDATE)
    a, b, fresh = (worker._trained[name].tensors.parameters() for name in ("a", "b", "fresh"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], fresh[name]) for name in a)


def test_folders_that_do_not_fit_are_refused(base, group, tmp_path):
    worker = make_worker(base)
    worker.create_adapter("a", SHAPE)
    worker.save_adapter("a", str(tmp_path / "a"), with_optimizer=False)
    again = worker.save_adapter("a", str(tmp_path / "a"), with_optimizer=False)
    assert isinstance(again, Refusal) and "exists" in again.reason
    without = worker.load_adapter("b", str(tmp_path / "a"), with_optimizer=True)
    assert isinstance(without, Refusal) and "no optimizer state" in without.reason
    missing = worker.load_adapter("b", str(tmp_path / "nothing"), with_optimizer=False)
    assert isinstance(missing, Refusal) and "holds no adapter_config.json" in missing.reason
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"damaged")
    damaged = worker.load_sampler("s", str(tmp_path / "a"))
    assert isinstance(damaged, Refusal)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]


def _two_updates(rank: int, world_size: int, base: str, values: dict) -> dict:
    worker = make_worker(base, **values)
    worker.create_adapter("a", SHAPE)
    randomize(worker, "a")
    losses = []
    for seed in range(2):
        rows = given_rows((9, 5, 12, 7, 3), seed=seed)
        losses.append(run(worker, "a", rows, place=(rank, world_size), **values)[0])
        gradients = {name: value.clone() for name, value in worker._trained["a"]._sums.items()}
        worker.update_adapter("a", UPDATE)
    parameters = {name: value.detach() for name, value in worker._trained["a"].tensors.parameters().items()}
    return {"losses": losses, "gradients": gradients, "parameters": parameters}


@pytest.mark.parametrize("values", [{}, PACKED, BFLOAT16], ids=["padded", "packed", "bfloat16"])
def test_two_ranks_with_a_sharded_base_equal_one(tmp_path, values):
    base = save_tiny_model(tmp_path / "m", "qwen3")
    (alone,) = run_ranks(_two_updates, 1, base, values)
    first, second = run_ranks(_two_updates, 2, base, values)
    for name, value in first["parameters"].items():
        assert torch.equal(value, second["parameters"][name])
    rtol = 2e-2 if values == BFLOAT16 else 1e-5
    joined = [sum(pair) for pair in zip(first["losses"], second["losses"], strict=True)]
    assert joined == pytest.approx(alone["losses"], rel=rtol)
    scale = max(value.abs().max() for value in alone["gradients"].values())
    for name, value in alone["gradients"].items():
        assert (value - first["gradients"][name]).abs().max() <= rtol * scale, name


@pytest.mark.parametrize("values", [{}, PACKED])
@pytest.mark.parametrize("loss", [CROSS_ENTROPY, NamedLoss("importance_sampling")], ids=["ce", "is"])
def test_adapters_that_share_a_pass_get_the_values_of_their_own(base, group, values, loss):
    """Three adapters of different ranks and layers in one pass, against a pass of each in float32."""
    shapes = (SHAPE, AdapterShape(rank=2, seed=5, train_unembed=False), AdapterShape(rank=7, seed=6, train_mlp=False))
    worker, alone = make_worker(base, **values), make_worker(base, **values)
    rows, wanted = {}, {}
    for number, shape in enumerate(shapes):
        name = f"adapter {number}"
        for each in (worker, alone):
            each.create_adapter(name, shape)
            randomize(each, name, seed=number)
        rows[name] = given_rows((9 - number, 5, 12)[: 1 + number], k=1, seed=number)
        if loss != CROSS_ENTROPY:
            weights = rows[name].pop(f"{LOSS_INPUTS}.weights")
            rows[name] |= {f"{LOSS_INPUTS}.advantages": weights, f"{LOSS_INPUTS}.logprobs": weights - 5}
        wanted[name] = run(alone, name, rows[name], loss)
    shared = shard_batch(joined_rows(list(rows.values())), 1, training_strategy(policy_config("m", **values)))
    part = worker.run_passes(shared.data[0], shared.sizes[0], list(rows), loss, True)
    logprobs = shared.restore([part.logprobs]).split([len(own["input_ids"]) for own in rows.values()])
    for name, total, found in zip(rows, part.losses, logprobs, strict=True):
        assert total == pytest.approx(wanted[name][0], rel=1e-5)
        width = wanted[name][1].shape[1]
        torch.testing.assert_close(found[:, :width], wanted[name][1], rtol=0, atol=1e-5)
        own, other = alone._trained[name]._sums, worker._trained[name]._sums
        assert own.keys() == other.keys() and any(bool(value.any()) for value in own.values())
        for key, value in own.items():
            torch.testing.assert_close(other[key], value, rtol=1e-4, atol=1e-4, msg=key)


def test_a_shared_pass_that_is_not_finite_adds_nothing_for_any_adapter(base, group):
    """The ranks then compute each adapter alone (`AdapterPolicy.run_passes`)."""
    worker = make_worker(base)
    rows = {}
    for number, name in enumerate(("wild", "calm")):
        worker.create_adapter(name, SHAPE)
        randomize(worker, name, seed=number)
        rows[name] = given_rows(seed=number)
        weights = rows[name].pop(f"{LOSS_INPUTS}.weights")
        rows[name] |= {f"{LOSS_INPUTS}.advantages": weights, f"{LOSS_INPUTS}.logprobs": weights - 5}
    rows["wild"][f"{LOSS_INPUTS}.logprobs"].fill_(-1e4)
    part = worker.run_passes(joined_rows(list(rows.values())), [6], list(rows), NamedLoss("importance_sampling"), True)
    assert all(isinstance(loss, Refusal) for loss in part.losses)
    assert not worker._trained["wild"]._sums and not worker._trained["calm"]._sums
