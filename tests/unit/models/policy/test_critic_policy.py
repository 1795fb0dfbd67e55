"""A critic with real ranks under Ray: values in the order of the rows, of stored rows too, and training."""

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from critic_cases import SquaredError, critic, critic_batch, hf_values, save_critic
from policy_helpers import policy_config, tiny_model
from tiny_models import make_char_tokenizer

from nemo_rl.config import TimeoutsConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.batch_rows import NUM_WRITTEN, STORED_ROWS, StoredRow, pack_rows, paths_of
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.ray

DATA = critic_batch()


@pytest.fixture(scope="module")
def policy(local_ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    name = save_critic(tmp_path_factory.mktemp("critic") / "m", tiny_model("qwen3"))
    packing = {"enabled": True, "train_mb_tokens": 80, "logprob_mb_tokens": 64}
    config = policy_config(name, reward_model_cfg={"enabled": True}, sequence_packing=packing)
    cluster = RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=1, name="critic-test")
    timeouts = TimeoutsConfig(setup_s=120, train_s=60, checkpoint_s=60)
    made = Policy(cluster, config, make_char_tokenizer(), workers_per_node=2, timeouts=timeouts, threads_per_rank=1)
    yield made
    assert made.shutdown()
    cluster.shutdown()


def wanted(data: BatchedDataDict[Any]) -> torch.Tensor:
    with torch.no_grad():
        return hf_values(critic(tiny_model("qwen3")).double(), data)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_values_of_any_number_of_rows_come_back_in_order(policy: Policy, rows: int) -> None:
    data = DATA.slice(0, rows)
    values = policy.get_values(data)["values"]
    assert values.shape == (rows, 24) and values.dtype == torch.float32
    if rows:
        torch.testing.assert_close(values.double(), wanted(data), rtol=0, atol=1e-5)
        assert torch.equal(values, policy.get_values(data, micro_batch_size=None)["values"])


def stored(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """Return the batch with its tokens in the object store."""
    logs = []
    for ids, mask, length in zip(data["input_ids"], data["token_mask"], data["input_lengths"].tolist(), strict=True):
        start = int(mask.argmax())
        answer = {"role": "assistant", "content": "", "token_ids": ids[start:length]}
        answer["generation_logprobs"] = torch.zeros(length - start)
        logs.append([{"role": "user", "content": "", "token_ids": ids[:start]}, answer])
    packed = pack_rows(logs)
    reference, width = ray.put(packed), data["input_ids"].shape[1]
    rows = [StoredRow(reference, index, width, 0, path) for index, path in enumerate(paths_of(packed))]
    lengths, sample_mask = data["input_lengths"], data["sample_mask"]
    return BatchedDataDict(
        {
            STORED_ROWS: rows,
            NUM_WRITTEN: data["token_mask"].sum(1).long(),
            "input_lengths": lengths,
            "sample_mask": sample_mask,
        }
    )


def test_rows_in_the_object_store_have_the_same_values(policy: Policy) -> None:
    values = policy.get_values(stored(DATA))["values"]
    torch.testing.assert_close(values, policy.get_values(DATA)["values"], rtol=0, atol=1e-5)


def test_the_score_of_a_row_is_the_value_after_its_last_token(policy: Policy) -> None:
    longer = BatchedDataDict(DATA.data | {"input_ids": torch.nn.functional.pad(DATA["input_ids"], (0, 1), value=5)})
    longer["input_lengths"] = DATA["input_lengths"] + 1
    longer["input_ids"][torch.arange(8), DATA["input_lengths"]] = 5
    del longer["token_mask"], longer["returns"]
    after = policy.get_values(longer)["values"][torch.arange(8), DATA["input_lengths"]]
    torch.testing.assert_close(policy.score(DATA)["scores"], after, rtol=0, atol=1e-5)


def test_training_lowers_the_loss_of_values(policy: Policy) -> None:
    losses = [float(policy.train(DATA, SquaredError(), gbs=8)["loss"]) for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]


def test_a_critic_gives_no_logprobs(policy: Policy) -> None:
    with pytest.raises(ConfigError, match="Policy.get_logprobs needs a language model"):
        policy.get_logprobs(DATA)
