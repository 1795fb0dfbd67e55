"""The controller with real ranks under Ray: row order, any number of rows, resume, errors."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_helpers import (
    VOCAB,
    WeightedNLL,
    hf_logprobs,
    policy_config,
    random_batch,
    save_tiny_model,
)
from tiny_models import make_char_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from nemo_rl.config import TimeoutsConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.losses.loss_function import LossInputType
from nemo_rl.losses.supervised import NLLLossFn
from nemo_rl.models.policy.batching import global_batches, shard_batch, training_strategy
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.errors import CheckpointError, ConfigError, DataError, DeadlineExceededError

TIMEOUTS = TimeoutsConfig(setup_s=120, train_s=60, checkpoint_s=60)
ray_test = pytest.mark.ray


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_char_tokenizer()


@pytest.fixture(scope="module")
def cluster(local_ray) -> Iterator[RayVirtualCluster]:
    made = RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=3, name="policy-test")
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def model_name(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "m", "qwen3", tie=True)


def _policy(cluster, tokenizer, model_name, ranks: int, prefix: str, config=None, **kwargs) -> Policy:
    config = config or policy_config(
        model_name, sequence_packing={"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}
    )
    return Policy(
        cluster,
        config,
        tokenizer,
        name_prefix=prefix,
        workers_per_node=ranks,
        timeouts=TIMEOUTS,
        threads_per_rank=1,
        **kwargs,
    )


@pytest.fixture(scope="module")
def policy(cluster, tokenizer, model_name) -> Iterator[Policy]:
    made = _policy(cluster, tokenizer, model_name, 2, "shared")
    yield made
    assert made.shutdown()


class ReportsRank(WeightedNLL):
    """A loss defined in a test file, pickled by value, with metrics of every kind."""

    def __call__(self, logprobs, **kwargs):
        loss, metrics = super().__call__(logprobs, **kwargs)
        return loss, metrics | {"microbatches": 1.0, "rows_max": float(len(logprobs))}


@ray_test
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_scores_of_any_number_of_rows_come_back_in_order(policy, model_name, rows) -> None:
    data = random_batch(rows=rows, seed=rows)
    model = AutoModelForCausalLM.from_pretrained(model_name).eval()
    with torch.no_grad():
        want = hf_logprobs(model, data)
    got = policy.get_logprobs(data)["logprobs"]
    assert got.shape == data["input_ids"].shape and got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-4)
    reference = policy.get_reference_policy_logprobs(data, micro_batch_size=2)["reference_logprobs"]
    torch.testing.assert_close(reference.double(), want, rtol=0, atol=2e-4)


@ray_test
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_topk_logits_come_back_in_order(policy, model_name, rows) -> None:
    data = random_batch(rows=max(rows, 1), seed=rows).slice(0, rows)
    got = policy.get_topk_logits(data, 4)
    logits, indices = got["topk_logits"], got["topk_indices"]
    assert logits.shape == indices.shape == (rows, 24, 4)
    assert (logits.dtype, indices.dtype) == (torch.float32, torch.int64)
    model = AutoModelForCausalLM.from_pretrained(model_name).eval()
    for row in range(rows):
        length = int(data["input_lengths"][row])
        with torch.no_grad():
            want = model(input_ids=data["input_ids"][row : row + 1, :length]).logits[0]
        torch.testing.assert_close(logits[row, :length], want.topk(4).values, rtol=0, atol=2e-4)
        torch.testing.assert_close(want.gather(-1, indices[row, :length]), logits[row, :length], rtol=0, atol=2e-4)
        assert not logits[row, length:].any()


@ray_test
def test_the_optimizer_state_is_offloaded_from_log_prob_passes_to_the_next_update(policy, monkeypatch) -> None:
    calls: list[str] = []
    everywhere, sharded = policy.worker_group.run_all_workers_single_data, policy.ranks.with_rows

    def noted_everywhere(method, **kwargs):
        calls.append("to host" if kwargs.get("to_host") else "back" if "to_host" in kwargs else method)
        return everywhere(method, **kwargs)

    def noted_sharded(method, *args, **kwargs):
        calls.append(method)
        return sharded(method, *args, **kwargs)

    monkeypatch.setattr(policy.worker_group, "run_all_workers_single_data", noted_everywhere)
    monkeypatch.setattr(policy.ranks, "with_rows", noted_sharded)
    data = random_batch(rows=4)
    for wanted in (False, True):
        monkeypatch.setattr(
            policy, "config", policy.config.model_copy(update={"offload_optimizer_for_logprob": wanted})
        )
        policy.get_logprobs(data)
        policy.get_reference_policy_logprobs(data)
        policy.train(data, WeightedNLL(), eval_mode=True, gbs=4)
    scoring = ["get_logprobs", "get_reference_policy_logprobs"]
    assert calls == [*scoring, "train", "to host", scoring[0], "to host", scoring[1], "train"]
    calls.clear()
    policy.train(data, WeightedNLL(), gbs=4)
    assert calls == ["back", "train"]


@ray_test
@pytest.mark.parametrize("gbs", [6, [6, 2]])
def test_evaluation_changes_nothing_and_takes_a_partial_batch(policy, gbs) -> None:
    data = random_batch(rows=8)
    before = policy.get_logprobs(data)["logprobs"]
    result = policy.train(data, ReportsRank(), eval_mode=True, gbs=gbs)
    assert result["loss"].shape == (2,)
    assert "lr" not in result["metrics"] and not result["grad_norm"].any()
    valid = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    scores = before[:, 1:] * valid * data["advantages"][:, 1:]
    for update, rows in enumerate((slice(0, 6), slice(6, 8))):
        want = -scores[rows].sum() / valid[rows].sum()
        assert result["loss"][update].item() == pytest.approx(want.item(), abs=1e-5)
    assert result["all_mb_metrics"]["global_valid_toks"] == [valid[:6].sum().item(), valid[6:].sum().item()]
    assert torch.equal(policy.get_logprobs(data)["logprobs"], before)


@ray_test
def test_one_rank_and_two_ranks_train_alike_and_resume(cluster, tokenizer, model_name, tmp_path) -> None:
    data, probe = random_batch(rows=12, seed=1), random_batch(rows=4, seed=2)
    outcomes = []
    for ranks in (1, 2):
        policy = _policy(cluster, tokenizer, model_name, ranks, f"train{ranks}")
        assert policy.data_parallel_size == ranks
        result = policy.train(data, ReportsRank())
        outcomes.append((result, policy.get_logprobs(probe)["logprobs"]))
        if ranks == 2:
            step = tmp_path / "step_1" / "policy"
            policy.save_checkpoint(step / "weights", step / "optimizer", step / "tokenizer")
            after = policy.train(data, ReportsRank())
        assert policy.shutdown()
    (one, one_scores), (two, two_scores) = outcomes
    assert one["loss"].shape == one["grad_norm"].shape == (2,), "12 rows are 2 updates of 6"
    torch.testing.assert_close(two["loss"], one["loss"], rtol=0, atol=1e-4)
    torch.testing.assert_close(two["grad_norm"], one["grad_norm"], rtol=1e-3, atol=0)
    torch.testing.assert_close(two_scores, one_scores, rtol=0, atol=5e-3)
    assert one["metrics"]["lr"] == 1e-2
    assert one["metrics"]["nll"] == pytest.approx(two["metrics"]["nll"], abs=1e-4)
    assert one["metrics"]["skipped_updates"] == 0

    for folder in (step / "weights" / "model", step / "tokenizer"):
        assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()
    resumed = _policy(
        cluster,
        tokenizer,
        model_name,
        2,
        "resumed",
        weights_path=step / "weights",
        optimizer_path=step / "optimizer",
    )
    assert torch.equal(resumed.get_logprobs(probe)["logprobs"], two_scores)
    again = resumed.train(data, ReportsRank())
    assert torch.equal(again["loss"], after["loss"]) and torch.equal(again["grad_norm"], after["grad_norm"])
    reference = resumed.get_reference_policy_logprobs(probe)["reference_logprobs"]
    with torch.no_grad():
        want = hf_logprobs(AutoModelForCausalLM.from_pretrained(model_name).eval(), probe)
    torch.testing.assert_close(reference.double(), want, rtol=0, atol=2e-4)
    assert resumed.shutdown()


def _files(folder: Path) -> dict[str, bytes]:
    """Return all files but `.metadata`, in which torch writes the folder's name."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".metadata"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@ray_test
def test_updates_without_a_valid_sample_change_nothing(policy, tmp_path, caplog) -> None:
    data = random_batch(rows=12, seed=8)
    policy.train(data, ReportsRank())  # AdamW has momentum here, and weight decay from its configuration
    policy.save_checkpoint(tmp_path / "before/weights", tmp_path / "before/optimizer")
    version = policy.weight_version
    nothing = BatchedDataDict({**data, "sample_mask": torch.zeros(12)})
    no_tokens = BatchedDataDict({**data, "token_mask": torch.zeros(12, 24)})
    for empty in (nothing, no_tokens, nothing):
        result = policy.train(empty, ReportsRank())
        none_counts = {"global_valid_seqs": 0.0, "global_valid_toks": 0.0}
        assert result["metrics"] == none_counts | {"skipped_updates": 2.0, "num_updates": 0.0}
        assert result["loss"].tolist() == result["grad_norm"].tolist() == [0.0, 0.0]
    policy.save_checkpoint(tmp_path / "after/weights", tmp_path / "after/optimizer", background=True)
    policy.train(data, ReportsRank())  # while the ranks write their state
    assert not (tmp_path / "after/weights/model/tokenizer_config.json").exists()
    policy.finalize_async_save()
    assert policy.checkpoint_is_written()
    version += 1
    before, after = _files(tmp_path / "before"), _files(tmp_path / "after")
    assert len(before) > 5 and policy.weight_version == version
    assert [name for name in before | after if before.get(name) != after.get(name)] == []
    assert "2 of 2 updates were skipped" in caplog.text


@ray_test
def test_a_weight_stream_waits_for_all_updates_of_a_train_call(policy, monkeypatch) -> None:
    """A weight stream that another thread starts between two updates of one `train` waits for both."""
    data, version = random_batch(rows=12, seed=8), policy.weight_version
    first_update, calls = threading.Event(), []
    run_sharded = policy.worker_group.run_all_workers_sharded_data

    def noted(method: str, **kwargs: Any) -> Any:
        calls.append(method)
        first_update.set()
        return run_sharded(method, **kwargs)

    monkeypatch.setattr(policy.worker_group, "run_all_workers_sharded_data", noted)
    with ThreadPoolExecutor() as pool:
        training = pool.submit(policy.train, data, ReportsRank())
        assert first_update.wait(30)
        with policy.held():
            assert (policy.weight_version, calls) == (version + 1, ["train", "train"])
            waiting = pool.submit(policy.get_logprobs, data)
            time.sleep(0.3)
            assert not waiting.done() and len(calls) == 2, "no call comes between those of a stream"
        training.result(30)
        assert waiting.result(30)["logprobs"].shape == (12, 24)


@ray_test
def test_only_the_update_without_a_valid_sample_is_skipped(cluster, tokenizer, model_name) -> None:
    data, probe = random_batch(rows=12, seed=9), random_batch(rows=4, seed=2)
    half = BatchedDataDict({**data, "sample_mask": data["sample_mask"] * (torch.arange(12) < 6)})
    outcomes = []
    for batch in (half, data.slice(0, 6)):
        policy = _policy(cluster, tokenizer, model_name, 1, f"half{batch.size}")
        results = [policy.train(batch, ReportsRank()) for _ in range(2)]
        outcomes.append((results, policy.get_logprobs(probe)["logprobs"]))
        assert policy.shutdown()
    (with_empty, scores), (without, expected) = outcomes
    assert torch.equal(scores, expected)
    for result, alone in zip(with_empty, without, strict=True):
        assert result["metrics"] == alone["metrics"] | {"skipped_updates": 1.0}


@ray_test
def test_training_lowers_the_built_in_loss(policy) -> None:
    data = random_batch(rows=6, seed=5)
    losses = [policy.train(data, NLLLossFn())["loss"].item() for _ in range(5)]
    assert losses[-1] < 0.7 * losses[0]


@ray_test
def test_errors_of_a_loss_name_the_worker(cluster, tokenizer, model_name) -> None:
    class Faulty(WeightedNLL):
        def __call__(self, logprobs, **kwargs):
            raise KeyError("no such reward")

    policy = _policy(cluster, tokenizer, model_name, 1, "faulty")
    with pytest.raises(KeyError, match="no such reward") as caught:
        policy.train(random_batch(rows=6), Faulty())
    assert any("faulty-0-0" in note for note in caught.value.__notes__)
    policy.shutdown()


@ray_test
def test_bad_calls_are_refused_with_advice(policy) -> None:
    data = random_batch(rows=7)
    with pytest.raises(DataError, match="7 rows do not divide into global batches of 6.*6, 12"):
        policy.train(data, WeightedNLL())
    with pytest.raises(DataError, match=r"needs the keys \['token_mask'\]"):
        policy.train(BatchedDataDict({k: v for k, v in data.items() if k != "token_mask"}), WeightedNLL())

    class WantsReference(WeightedNLL):
        needs_reference = True

    with pytest.raises(DataError, match="reference_policy_logprobs"):
        policy.train(data, WantsReference())

    class WantsLogits(WeightedNLL):
        input_type = LossInputType.LOGIT

    with pytest.raises(ConfigError, match="WantsLogits wants"):
        policy.train(data, WantsLogits())


@pytest.mark.parametrize("restored", [True, False])
def test_ranks_end_when_their_checkpoint_cannot_be_read(monkeypatch, tokenizer, restored: bool) -> None:
    calls: list[Any] = []

    class Ranks:
        """A worker group whose ranks have started."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def run_all_workers_single_data(self, method: str, **kwargs: Any) -> str:
            return method

        def get_all_worker_results(self, method: str, **kwargs: Any) -> None:
            calls.append(method)
            if not restored:
                raise CheckpointError("no weights there")

        def shutdown(self, force: bool) -> None:
            calls.append("forced end" if force else "end")

    monkeypatch.setattr("nemo_rl.models.policy.lm_policy.RayWorkerGroup", Ranks)
    places = RayVirtualCluster([1], use_gpus=False)
    with nullcontext() if restored else pytest.raises(CheckpointError, match="no weights there"):
        Policy(places, policy_config("m"), tokenizer, weights_path="step_1/policy/weights")
    assert calls == ["load_checkpoint"] + ["forced end"] * (not restored)


def test_a_caller_waits_for_the_policy_while_its_ranks_answer(monkeypatch, tokenizer) -> None:
    """Eight calls of 0.1 s in a row, each within its deadline of 0.25 s; then a holder that makes no call."""

    class Ranks:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def run_all_workers_single_data(self, method: str, **kwargs: Any) -> str:
            return method

        def get_all_worker_results(self, method: str, **kwargs: Any) -> None:
            time.sleep(0.1)

    monkeypatch.setattr("nemo_rl.models.policy.lm_policy.RayWorkerGroup", Ranks)
    limits = TimeoutsConfig(train_s=0.25, checkpoint_s=0.25)
    policy = Policy(RayVirtualCluster([1], use_gpus=False), policy_config("m"), tokenizer, timeouts=limits)
    held, idle_is_over = threading.Event(), threading.Event()

    def hold(num_calls: int) -> None:
        with policy.held():
            held.set()
            for _ in range(num_calls):
                policy.offload_optimizer()
            if not num_calls:
                idle_is_over.wait(10)

    with ThreadPoolExecutor() as pool:
        working = pool.submit(hold, 8)
        assert held.wait(10)
        with policy.held():
            assert working.done()
        held.clear()
        idle = pool.submit(hold, 0)
        assert held.wait(10)
        with pytest.raises(DeadlineExceededError, match="without a call of its ranks that ended"), policy.held():
            pass
        idle_is_over.set()
        idle.result(10)


def test_filler_rows_change_no_metric() -> None:
    data = random_batch(rows=5)
    data["names"] = [f"row{i}" for i in range(5)]
    sharded = shard_batch(data, 2, training_strategy(policy_config("m", train_micro_batch_size=2)))
    rows = BatchedDataDict.from_batches(sharded.data)
    assert sum(map(sum, sharded.sizes)) == rows.size == 8
    assert len({len(sizes) for sizes in sharded.sizes}) == 1
    assert rows["sample_mask"].sum() == data["sample_mask"].sum()
    assert rows["token_mask"].sum() == data["token_mask"].sum()
    restored = sharded.restore([shard["input_ids"] for shard in sharded.data])
    assert torch.equal(restored, data["input_ids"])


def test_a_batch_smaller_than_the_microbatches_is_not_enlarged() -> None:
    data = random_batch(rows=3)
    sharded = shard_batch(data, 2, training_strategy(policy_config("m", train_micro_batch_size=16)))
    assert [shard.size for shard in sharded.data] == [2, 2]


def test_global_batches_keep_the_row_order() -> None:
    data = random_batch(rows=6)
    parts = list(global_batches(data, 2, allow_partial=False))
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), data["input_ids"])
    assert max(data["input_ids"].flatten()) < VOCAB
