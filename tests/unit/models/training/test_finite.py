"""NaN and infinity in weights and gradients are named, and neither loaded, saved nor sent to engines."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_helpers import (
    WeightedNLL,
    policy_config,
    process_group,
    random_batch,
    run_ranks,
    save_tiny_model,
    tiny_model,
)

from nemo_rl.config.rules.models import check_trainable
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.rank_calls import join_ranks, train_result
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.tensor_checks import listed, not_finite, require_finite
from nemo_rl.utils.errors import CheckpointError, ConfigError, NonFiniteError

CPU = torch.device("cpu")
SPOILT = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_single_value_is_found(dtype: torch.dtype, value: float) -> None:
    spoilt = torch.zeros(3, 5, 7, dtype=dtype)
    spoilt[2, 4, 6] = value
    tensors = {"good": torch.full((9,), torch.finfo(dtype).max, dtype=dtype), "spoilt": spoilt}
    assert not_finite(tensors) == ["spoilt"]
    assert not_finite({"transposed": spoilt.transpose(0, 2)}) == ["transposed"]


def test_integers_empty_and_meta_tensors_are_skipped() -> None:
    others = {"ids": torch.ones(3, dtype=torch.int64), "none": torch.empty(0), "meta": torch.empty(2, device="meta")}
    assert not_finite({**others, "byte": torch.ones(2).to(torch.float8_e4m3fn)}) == []


def test_long_lists_are_shortened() -> None:
    assert listed(str(n) for n in range(11)) == "0, 1, 2, 3, 4, 5, 6, 7 and 3 more"


def spoil(worker: PolicyWorker, name: str = SPOILT) -> None:
    with torch.no_grad():
        worker.backend.weights_here()[name].view(-1)[3] = float("nan")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return save_tiny_model(tmp_path / "model")


def test_weights_that_are_not_finite_are_not_saved_sent_or_loaded(model: str, tmp_path: Path) -> None:
    config = policy_config(model)
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU), config)
        worker.save_checkpoint(str(tmp_path / "good"))
        spoil(worker)
        for background in (False, True):
            with pytest.raises(CheckpointError, match=rf"not finite and are not saved: {SPOILT}"):
                worker.save_checkpoint(str(tmp_path / "spoilt"), background=background)
        assert not (tmp_path / "spoilt").exists()
        with pytest.raises(NonFiniteError, match=rf"{SPOILT}\. They are not sent"):
            worker.begin_weight_stream(None, "float32")  # type: ignore[arg-type]
        worker.load_checkpoint(str(tmp_path / "good"))
        spoil(worker)
        worker.backend.save(_paths(tmp_path / "spoilt"))
        with pytest.raises(NonFiniteError, match=rf"spoilt are not finite: {SPOILT}\. Resume from an earlier one"):
            worker.load_checkpoint(str(tmp_path / "spoilt"))


def _paths(folder: Path) -> Any:
    from nemo_rl.models.training.interfaces import CheckpointPaths

    return CheckpointPaths(folder)


def _saves(rank: int, world_size: int, name: str, folder: str) -> str:
    config = policy_config(name)
    worker = PolicyWorker(DTensorBackend(config, CPU), config)
    if rank == 1:
        local = worker.backend.weights_here()[SPOILT].to_local()
        with torch.no_grad():
            local.view(-1)[0] = float("inf")
    try:
        worker.save_checkpoint(folder)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_weights_that_are_not_finite_on_one_rank_are_refused_on_all(model: str, tmp_path: Path) -> None:
    said = run_ranks(_saves, 2, model, str(tmp_path / "checkpoint"))
    assert said == [f"The weights are not finite and are not saved: {SPOILT}."] * 2


def test_model_files_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    spoilt = tiny_model("llama")
    with torch.no_grad():
        spoilt.get_parameter(SPOILT).view(-1)[0] = float("nan")
    with pytest.raises(NonFiniteError, match=rf"the model m are not finite: {SPOILT}\. Take another"):
        require_finite(dict(spoilt.named_parameters()), "the model m", "Take another one.")


class Broken(WeightedNLL):
    """A loss that is NaN in the updates whose numbers are listed."""

    def __init__(self, *updates: int) -> None:
        self.updates, self.calls = updates, 0

    def __call__(self, logprobs: torch.Tensor, **kwargs: Any) -> Any:
        loss, metrics = super().__call__(logprobs, **kwargs)
        self.calls += 1
        return loss * (float("nan") if self.calls in self.updates or not self.updates else 1.0), metrics


def test_the_driver_logs_why_an_update_is_skipped(model: str, caplog: pytest.LogCaptureFixture) -> None:
    config = policy_config(model, train_micro_batch_size=6)
    data = random_batch()
    valid = count_valid(data)
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU), config)
        batch = shard_batch(data, 1, training_strategy(config))
        loss_fn = Broken(2)
        updates = [worker.train(batch.data[0], batch.sizes[0], loss_fn, valid) for _ in range(3)]
        assert [update.skipped for update in updates] == [False, True, False]
        assert updates[1].not_finite[0].endswith(".grad")
        with caplog.at_level(logging.WARNING):
            joined = [join_ranks([update], valid, eval_mode=False) for update in updates]
        assert caplog.text.count("An update is not finite (loss=nan, grad_norm=nan, lr=0.01; not finite: ") == 1
        assert "model.embed_tokens.weight.grad" in caplog.text and "and 19 more" in caplog.text
        metrics = train_result(joined, loss_fn)["metrics"]
        assert (metrics["num_updates"], metrics["skipped_updates"]) == (2.0, 1.0)
        spoil(worker)
        assert worker.train(batch.data[0], batch.sizes[0], WeightedNLL(), valid).not_finite == [SPOILT]


def test_a_learning_rate_that_is_not_finite_makes_no_update(model: str) -> None:
    config = policy_config(model, train_micro_batch_size=6)
    data = random_batch()
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU), config)
        worker.backend.optimizer.param_groups[0]["lr"] = float("inf")  # type: ignore[attr-defined]
        batch = shard_batch(data, 1, training_strategy(config))
        assert worker.train(batch.data[0], batch.sizes[0], WeightedNLL(), count_valid(data)).skipped
        assert worker.non_finite_weights() == []


def test_validation_does_not_count_skipped_updates(model: str) -> None:
    assert "num_updates" not in join_ranks_of_validation(model)


def join_ranks_of_validation(model: str) -> dict[str, float]:
    config = policy_config(model, train_micro_batch_size=6)
    data = random_batch()
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU), config)
        batch = shard_batch(data, 1, training_strategy(config))
        result = worker.train(batch.data[0], batch.sizes[0], WeightedNLL(), count_valid(data), eval_mode=True)
        return train_result([join_ranks([result], count_valid(data), eval_mode=True)], WeightedNLL())["metrics"]


@pytest.mark.parametrize(
    ("key", "optimizer", "scheduler"),
    [
        ("policy.optimizer.kwargs.lr=inf", {"lr": float("inf")}, {}),
        ("policy.optimizer.kwargs.betas.1=nan", {"lr": 1.0, "betas": [0.9, float("nan")]}, {}),
        ("policy.scheduler.kwargs.factor=inf", {"lr": 1.0}, {"factor": float("inf")}),
    ],
)
def test_learning_rates_that_are_not_finite_are_refused(
    key: str, optimizer: dict[str, Any], scheduler: dict[str, Any], model: str
) -> None:
    config = policy_config(
        model,
        optimizer={"name": "torch.optim.AdamW", "kwargs": optimizer},
        scheduler={"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": scheduler},
    )
    [said] = check_trainable(config)
    assert f"{key} is not finite" in str(said)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_config_values_that_are_not_finite_are_refused(value: float, model: str) -> None:
    with pytest.raises(ConfigError, match="max_grad_norm: Input should be a finite number"):
        policy_config(model, max_grad_norm=value)
