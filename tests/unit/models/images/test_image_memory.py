"""Predicted memory of images against measured memory, and microbatches with a limit on patches."""

from pathlib import Path
from typing import Any

import pytest
from image_models import picture, prompt, question, row_of, tokenizer_of
from policy_helpers import WeightedNLL, run_ranks
from test_trained_images import ANSWER, CPU, batch_of_prompts, config_of
from tiny_models import save_tiny_checkpoint
from tiny_vision_models import TinyVisionShape, make_tiny_vision_model, make_vision_processor
from torch.profiler import ProfilerActivity, profile

from nemo_rl.config import PolicyConfig, Role
from nemo_rl.config.rules.models import check_images
from nemo_rl.distributed.parallel_layout import ParallelLayout
from nemo_rl.models.capacity.memory import Work
from nemo_rl.models.capacity.tower_trace import trace_tower
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.mesh_check import DTensorRank
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.policy.batching import count_valid, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.utils.errors import DataError
from tools.measure_memory import alive_bytes, highest_bytes

pytest.importorskip("torchvision")

ROW_TOKENS = 112


def folder_of(root: Path, family: str, **sizes: int) -> str:
    """Save a random model that makes 64 tokens of `PICTURE`."""
    shape = TinyVisionShape(tile_size=112, **sizes)
    save_tiny_checkpoint(root, make_tiny_vision_model(family, shape, seed=1), make_vision_processor(family, shape))
    return str(root)


def batch_of_pictures(folder: str, pictures: list[list[Any]]) -> Any:
    tokenizer = tokenizer_of(folder)
    prompts = [prompt(row_of(question("How many?", *own)), tokenizer, ROW_TOKENS) for own in pictures]
    return batch_of_prompts(prompts, [ANSWER] * len(prompts))


def packed(folder: str, num_rows: int, **values: Any) -> PolicyConfig:
    tokens = 2 * ROW_TOKENS
    packing = {"enabled": True, "train_mb_tokens": tokens, "logprob_mb_tokens": tokens, "max_patches": MOST_PATCHES}
    lengths = {"max_total_sequence_length": ROW_TOKENS}
    return config_of(folder, num_rows, sequence_packing=packing | {"share_prompts": False}, **lengths, **values)


PICTURE = picture(112, 112)
MOST_PATCHES = 512
"""Patches of two pictures."""


def peak_of_an_update(rank: int, world_size: int, folder: str, values: dict[str, Any]) -> float:
    """Return the largest number of bytes in a second update with two microbatches of two pictures."""
    batch = batch_of_pictures(folder, [[PICTURE]] * 4)
    config = packed(folder, 4, **values)
    worker = PolicyWorker(DTensorBackend(config, CPU, init_reference_model=False), config)
    shards = shard_batch(batch, 1, training_strategy(config))
    assert shards.sizes == [[2, 2]]
    train = (shards.data[0], shards.sizes[0], WeightedNLL(), count_valid(batch))
    worker.train(*train)
    before = alive_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        worker.train(*train)
    return before + highest_bytes(recorded)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "idefics3"])
@pytest.mark.parametrize("frozen", [[], ["freeze_vision_tower"]], ids=["trained", "frozen tower"])
def test_the_prediction_counts_the_patches_of_a_microbatch(tmp_path: Path, family: str, frozen: list[str]) -> None:
    # # The features of each layer of Qwen3-VL's tower enter one of the two layers of the text part.
    layers = 2 if family == "qwen3_vl" else 6
    folder = folder_of(tmp_path, family, tower_hidden_size=128, tower_intermediate_size=384, tower_layers=layers)
    values = {"dtensor_cfg": {"automodel_kwargs": {"freeze_config": dict.fromkeys(frozen, True)}}}
    (found,) = run_ranks(peak_of_an_update, 1, folder, values)
    config = packed(folder, 4, **values)
    work = Work(2 * ROW_TOKENS, on_cpu=True)
    predicted = DTensorRank.predict(config, ParallelLayout.of(config, 1), load_model_config(folder), work)
    assert predicted.peak == pytest.approx(found, rel=0.15)
    images = predicted.moments[predicted.peak_moment]["activations of images"]
    assert images > (0.0 if frozen else 0.3) * predicted.peak


def test_parts_that_are_not_trained_keep_nothing(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "qwen2_5_vl")
    model = load_model_config(folder)
    whole = trace_tower(model, packed(folder, 4))

    def kept(*parts: str) -> float:
        freeze = {"automodel_kwargs": {"freeze_config": dict.fromkeys(parts, True)}}
        return trace_tower(model, packed(folder, 4, dtensor_cfg=freeze)).kept

    assert whole.kept > kept("freeze_vision_tower") > kept("freeze_vision_tower", "freeze_vision_projection") == 0
    assert trace_tower(model, packed(folder, 4, dtensor_cfg={"lora_cfg": {"enabled": True}})).kept == 0
    assert whole.patches_per_token == 4


def test_a_block_saves_what_a_hand_count_gives(tmp_path: Path) -> None:
    """Idefics3 in float32: per patch two norms keep input, mean and deviation (H, and 2 numbers), their outputs go into
    attention and the feed-forward (2 H), and attention keeps queries, keys, values and output with one number for each
    head (4 H). The feed-forward keeps the input and the output of its activation function (2 W).
    """
    folder = folder_of(tmp_path, "idefics3", tower_hidden_size=128, tower_intermediate_size=384)
    hidden, width, heads = 128, 384, 4
    floats = 2 * (hidden + 2) + 2 * hidden + 4 * hidden + heads + 2 * width
    assert trace_tower(load_model_config(folder), packed(folder, 4)).block == 4 * floats


@pytest.mark.parametrize("batching", ["sequence_packing", "dynamic_batching"])
def test_microbatches_keep_to_the_limit_on_patches(tmp_path: Path, batching: str) -> None:
    folder = folder_of(tmp_path, "qwen2_5_vl")
    pictures = [[], [PICTURE], [picture(28, 28)], [picture(28, 28, 1), picture(42, 28)], [PICTURE], [], [PICTURE], []]
    batch = batch_of_pictures(folder, pictures)
    patches = [sum(each.width * each.height // 49 for each in own) for own in pictures]
    assert sorted(set(patches)) == [0, 16, 40, 256]
    for most in (256, 300, 512, None):
        keys = {"enabled": True, "train_mb_tokens": 900, "logprob_mb_tokens": 900, "max_patches": most}
        disabled = {"sequence_packing": {"enabled": False}, batching: keys}
        config = config_of(folder, 8, **disabled, max_total_sequence_length=ROW_TOKENS)
        shards = shard_batch(batch, 1, training_strategy(config))
        plan = shards.plan.shards[0]
        assert sorted(row for rows in plan for row in rows) == list(range(8))
        found = [sum(patches[row] for row in rows) for rows in plan]
        assert max(found) <= (most or 10**6)
        assert len(plan) >= {256: 3, 300: 3, 512: 2, None: 1}[most]


def test_a_row_with_too_many_patches_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "qwen2_5_vl")
    batch = batch_of_pictures(folder, [[PICTURE], [picture(28, 28)]])
    packing = {"sequence_packing": {"enabled": True, "train_mb_tokens": 900, "max_patches": 255}}
    config = config_of(folder, 2, **packing, max_total_sequence_length=ROW_TOKENS)
    with pytest.raises(DataError, match="row 0 has 256.*max_patches"):
        shard_batch(batch, 1, training_strategy(config))


def test_shared_images_count_once(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "qwen2_5_vl")
    tokenizer = tokenizer_of(folder)
    prompts = [prompt(row_of(question("How many?", each)), tokenizer, ROW_TOKENS) for each in (PICTURE, OTHER)]
    answers = [[70 + number, 71, 72 + number, 73] for number in range(8)]
    batch = batch_of_prompts([each for each in prompts for _ in range(4)], answers)
    for most, wanted in ((256, [4, 4]), (512, [8])):
        packing = {"enabled": True, "train_mb_tokens": 2000, "max_patches": most, "max_keys_per_token": 10**6}
        config = config_of(folder, 8, sequence_packing=packing, max_total_sequence_length=ROW_TOKENS)
        shards = shard_batch(batch, 1, training_strategy(config), shares_prompts=True)
        assert shards.sizes[0] == wanted


OTHER = picture(112, 112, seed=5)


def test_a_limit_on_patches_needs_images(tmp_path: Path) -> None:
    policy = config_of("m", 2, tokenizer={}, sequence_packing={"max_patches": 9})
    (message,) = check_images({"policy": Role(policy)}, algorithm_reads_images=True)
    assert "policy.sequence_packing.max_patches=9" in message
