"""Training of a draft model: loss and gradient against plain PyTorch, and what the policy learns is not changed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from draft_cases import drawn_head, reference, save_head
from policy_helpers import VOCAB, WeightedNLL, policy_config, random_batch, run_ranks, save_tiny_model, tiny_model
from safetensors.torch import load_file
from torch import Tensor, nn

from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.interfaces import CheckpointPaths

DATA = random_batch(rows=6, width=24)
TAPS = (0, 1, 2)
SEED = 3
SGD = {"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "padded, one row at a time": {"train_micro_batch_size": 1},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 64}},
    "recomputed": {"dtensor_cfg": {"activation_checkpointing": True}},
}


def updates(rank: int, world_size: int, name: str, settings: dict[str, Any], count: int = 1) -> dict[str, Any]:
    """Make updates on a rank; return the metrics of each, and all weights."""
    drafts = {"enabled": True, "aux_layer_indices": TAPS}
    config = policy_config(name, **{"optimizer": SGD, "draft": drafts, **settings})
    backend = DTensorBackend(config, torch.device("cpu"), init_reference_model=False, seed=SEED)
    worker = PolicyWorker(backend, config)
    batch = shard_batch(DATA, world_size, training_strategy(config), shares_prompts=backend.shares_prompts)
    metrics = []
    for _ in range(count):
        result = worker.train(batch.data[rank], batch.sizes[rank], WeightedNLL(), count_valid(DATA))
        metrics.append(result.model_metrics)
    draft = {} if backend._draft is None else copies(backend._draft.head)
    return {"metrics": metrics, "policy": copies(backend.model.hf), "draft": draft}


def resumed(
    rank: int, world_size: int, name: str, settings: dict[str, Any], folder: str, first: bool
) -> dict[str, Tensor]:
    """Make two updates and save, or load; then make one more, and return the weights."""
    drafts = {"enabled": True, "aux_layer_indices": TAPS}
    config = policy_config(name, draft=drafts, **settings)
    seed = SEED if first else SEED + 1
    backend = DTensorBackend(config, torch.device("cpu"), init_reference_model=False, seed=seed)
    worker = PolicyWorker(backend, config)
    batch = shard_batch(DATA, world_size, training_strategy(config), shares_prompts=backend.shares_prompts)
    paths = CheckpointPaths(Path(folder) / "weights", Path(folder) / "optimizer")

    def update() -> None:
        worker.train(batch.data[rank], batch.sizes[rank], WeightedNLL(), count_valid(DATA))

    if first:
        update()
        update()
        write = backend.stage_save(paths)
        update()  # what is written is the state before
        write()
    else:
        backend.load(paths)
        update()
    assert backend._draft is not None
    return copies(backend._draft.head)


def copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value.detach()).clone() for name, value in module.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_loss_and_gradient_are_those_of_plain_pytorch(layout: str, world_size: int, tmp_path) -> None:
    name = save_tiny_model(tmp_path, "llama")
    want = reference(tiny_model("llama"), DATA, TAPS, SEED)
    for got in run_ranks(updates, world_size, name, LAYOUTS[layout]):
        (metrics,) = got["metrics"]
        assert metrics["draft_loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert metrics["draft_agreement"] == pytest.approx(want["agreement"])
        assert got["draft"].keys() == want["gradients"].keys()
        for key, weight in got["draft"].items():
            stepped = want["weights"][key] - 0.1 * want["gradients"][key]
            torch.testing.assert_close(weight.double(), stepped, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_published_head_of_few_tokens_learns_where_it_can_propose(world_size: int, tmp_path) -> None:
    """Half of the tokens: positions where the policy's most likely token is another one do not count."""
    name, model = save_tiny_model(tmp_path / "model", "llama"), tiny_model("llama")
    ids = range(0, VOCAB, 2)
    want = reference(tiny_model("llama"), DATA, TAPS, SEED, ids)
    head = save_head(drawn_head(model, TAPS, SEED, ids), tmp_path / "head")
    for got in run_ranks(updates, world_size, name, {"draft": {"enabled": True, "model_name": head}}):
        (metrics,) = got["metrics"]
        assert metrics["draft_loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert metrics["draft_agreement"] == pytest.approx(want["agreement"])
        for key, weight in got["draft"].items():
            stepped = want["weights"][key] - 0.1 * want["gradients"][key]
            torch.testing.assert_close(weight.double(), stepped, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_policy_learns_the_same_bits_with_a_draft_model(world_size: int, tmp_path) -> None:
    name = save_tiny_model(tmp_path, "qwen3")
    with_draft, without = (
        run_ranks(updates, world_size, name, {"draft": {"enabled": enabled}}, 3) for enabled in (True, False)
    )
    for got, want in zip(with_draft, without, strict=True):
        assert got["draft"] and not want["draft"]
        for key, weight in want["policy"].items():
            assert torch.equal(got["policy"][key], weight), key


def test_a_checkpoint_holds_the_draft_model_for_any_number_of_ranks(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "model", "llama")
    folder = str(tmp_path / "checkpoint")
    (want,) = run_ranks(resumed, 1, name, {}, folder, True)
    (same,) = run_ranks(resumed, 1, name, {}, folder, False)
    for key, weight in want.items():
        assert torch.equal(same[key], weight), key
    for of_rank in run_ranks(resumed, 2, name, {}, folder, False):
        for key, weight in want.items():
            torch.testing.assert_close(of_rank[key], weight, rtol=1e-4, atol=1e-5)
    published = load_file(tmp_path / "checkpoint" / "weights" / "draft" / "model.safetensors")
    assert {"fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight"} <= published.keys()


def test_a_draft_model_learns(tmp_path) -> None:
    name = save_tiny_model(tmp_path, "qwen3")
    settings = {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 3e-3}}}
    (got,) = run_ranks(updates, 1, name, settings, 60)
    first, last = got["metrics"][0], got["metrics"][-1]
    assert last["draft_loss"] < 0.5 * first["draft_loss"]
    assert last["draft_agreement"] > first["draft_agreement"] + 0.3
