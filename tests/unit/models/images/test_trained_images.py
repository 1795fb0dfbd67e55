"""Scores, gradients and updates of models that read images, compared with transformers in float64."""

from typing import Any

import pytest
import torch
from image_models import (
    FAMILIES,
    OTHER,
    ROWS,
    SMALL,
    WIDE,
    exact_logprobs,
    exact_model,
    make_folder,
    prompt,
    question,
    row_of,
    tokenizer_of,
)
from policy_helpers import WeightedNLL, policy_config, run_ranks

from nemo_rl.data.model_rows import completed
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker

pytest.importorskip("torchvision")

CPU = torch.device("cpu")
ANSWER = [70, 71, 72, 73]
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 160, "logprob_mb_tokens": 160}}
FAR = 3e-5


def batch_of(folder: str, names: list[str]) -> BatchedDataDict[Any]:
    """Return rows with four answer tokens each."""
    tokenizer = tokenizer_of(folder)
    return batch_of_prompts([prompt(ROWS[name], tokenizer) for name in names], [ANSWER] * len(names))


def batch_of_prompts(prompts: list[Any], answers: list[list[int]]) -> BatchedDataDict[Any]:
    ids = [torch.tensor([*tokens, *answer]) for (tokens, _), answer in zip(prompts, answers, strict=True)]
    lengths = torch.tensor([len(each) for each in ids])
    width = int(lengths.max())
    mask = torch.arange(width)[None] < lengths[:, None]
    answered = mask & (torch.arange(width)[None] >= lengths[:, None] - len(ANSWER))
    advantages = torch.linspace(-1, 2, len(ids))[:, None].expand(-1, width).contiguous()
    return BatchedDataDict(
        {
            "input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
            "input_lengths": lengths,
            "token_mask": answered.float(),
            "sample_mask": torch.ones(len(ids)),
            "advantages": advantages,
            "row_inputs": completed([inputs for _, inputs in prompts]),
        }
    )


def config_of(folder: str, rows: int, **values: Any) -> Any:
    sizes = {"max_total_sequence_length": 160, "train_global_batch_size": rows}
    return policy_config(folder, **{"tokenizer": {"use_processor": True}, **sizes, **values})


def exact_scores(folder: str, batch: BatchedDataDict[Any]) -> torch.Tensor:
    model = exact_model(folder)
    scores = torch.zeros(batch["input_ids"].shape, dtype=torch.float64)
    for row, length in enumerate(batch["input_lengths"].tolist()):
        ids = batch["input_ids"][row, :length].tolist()
        scores[row, 1:length] = exact_logprobs(model, ids, batch["row_inputs"][row])
    return scores


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_folder(root / family, family) for family in FAMILIES}


def scored(rank: int, world_size: int, folder: str, names: list[str], values: dict[str, Any]) -> torch.Tensor:
    batch = batch_of(folder, names)
    config = config_of(folder, len(names), **values)
    worker = PolicyWorker(DTensorBackend(config, CPU, init_reference_model=False), config)
    shards = shard_batch(batch, world_size, logprob_strategy(config), shares_prompts=False)
    scores = worker.get_logprobs(shards.data[rank], shards.sizes[rank])
    return shards.restore([scores])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("values", [{}, PACKED], ids=["padded", "packed"])
def test_scores_are_those_of_transformers_in_float64(folders: dict[str, str], family: str, values: Any) -> None:
    names = list(ROWS)
    (scores,) = run_ranks(scored, 1, folders[family], names, values)
    batch = batch_of(folders[family], names)
    real = torch.arange(scores.shape[1])[None] < batch["input_lengths"][:, None]
    worst = ((scores.double() - exact_scores(folders[family], batch)).abs() * real).max().item()
    assert worst < FAR


def trained(rank: int, world_size: int, folder: str, names: list[str], values: dict[str, Any]) -> dict[str, Any]:
    """Compute the gradient of one batch, make an update, and return both with the trained parameters."""
    batch = batch_of(folder, names)
    config = config_of(folder, len(names), **values)
    worker = PolicyWorker(DTensorBackend(config, CPU, init_reference_model=False), config)
    shards = shard_batch(batch, world_size, training_strategy(config), shares_prompts=False)
    gradients: dict[str, torch.Tensor] = {}
    backend = worker.backend
    step = backend.clip_and_step

    def watched() -> Any:
        named = backend.model.hf.named_parameters()
        gradients.update({name: whole(p.grad).clone() for name, p in named if p.grad is not None})
        return step()

    backend.clip_and_step = watched
    worker.train(shards.data[rank], shards.sizes[rank], WeightedNLL(), count_valid(batch))
    weights = {name: whole(p.detach()).clone() for name, p in backend.model.hf.named_parameters()}
    return {"gradients": gradients, "weights": weights}


def exact_gradients(folder: str, batch: BatchedDataDict[Any]) -> dict[str, torch.Tensor]:
    """Return the gradients of `WeightedNLL` in float64."""
    model = exact_model(folder)
    count = float(batch["token_mask"].sum())
    for row, length in enumerate(batch["input_lengths"].tolist()):
        ids = batch["input_ids"][row, :length].tolist()
        scores = exact_logprobs(model, ids, batch["row_inputs"][row], grad=True)
        mask, advantages = batch["token_mask"][row, 1:length], batch["advantages"][row, 1:length]
        (-(scores * mask * advantages).sum() / count).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("ranks", "values"), [(1, PACKED), (2, {}), (2, PACKED)], ids=["one", "two", "two, packed"])
def test_gradients_of_all_parts_are_exact(folders: dict[str, str], family: str, ranks: int, values: Any) -> None:
    """With two ranks and rows of text, one rank has a pass without an image, which must not change the gradient."""
    names = ["text", "text", "two images", "one image", "text", "two turns"]
    results = run_ranks(trained, ranks, folders[family], names, values)
    exact = exact_gradients(folders[family], batch_of(folders[family], names))
    largest = max(gradient.abs().max().item() for gradient in exact.values())
    for result in results:
        assert result["gradients"].keys() == exact.keys()
        for name, gradient in result["gradients"].items():
            scale = exact[name].abs().max().item() + 1e-3 * largest
            assert (gradient.double() - exact[name]).abs().max().item() <= 1e-4 * scale, name


def frozen(kind: str) -> dict[str, Any]:
    return {"dtensor_cfg": {"automodel_kwargs": {"freeze_config": {kind: True}}}}


TOWER = {"qwen2_5_vl": ("model.visual.",), "idefics3": ("model.vision_model.",)}
PROJECTION = {"qwen2_5_vl": ("model.visual.merger.",), "idefics3": ("model.connector.",)}


@pytest.mark.parametrize("family", TOWER)
@pytest.mark.parametrize("key", ["freeze_vision_tower", "freeze_vision_projection", "freeze_language_model"])
def test_frozen_parts_keep_their_bits(folders: dict[str, str], family: str, key: str) -> None:
    names = ["one image", "two images", "text", "two turns", "text", "text"]
    before = dict(exact_model(folders[family]).float().named_parameters())
    (result,) = run_ranks(trained, 1, folders[family], names, frozen(key))
    same = {name for name, value in result["weights"].items() if torch.equal(value, before[name])}
    projection = {name for name in before if name.startswith(PROJECTION[family])}
    tower = {name for name in before if name.startswith(TOWER[family])} - projection
    parts = {
        "freeze_vision_tower": tower,
        "freeze_vision_projection": projection,
        "freeze_language_model": set(before) - tower - projection,
    }
    assert parts[key] <= same
    others = set(before) - parts[key]
    assert len(others & same) < 0.2 * len(others)


def test_text_is_trained_and_the_tower_stays(folders: dict[str, str]) -> None:
    """Without is_vlm, a checkpoint of this family is a text model."""
    folder = folders["qwen2_5_vl"]
    (result,) = run_ranks(trained, 1, folder, ["text"] * 6, {"tokenizer": {}})
    before = dict(exact_model(folder).float().named_parameters())
    changed = {name for name, value in result["weights"].items() if not torch.equal(value, before[name])}
    assert changed and not any(name.startswith("model.visual.") for name in changed)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_shared_prompts_have_their_images_once(folders: dict[str, str], family: str) -> None:
    """Two prompts have the same tokens but other images, so they share only the tokens before the first image."""
    folder, tokenizer = folders[family], tokenizer_of(folders[family])
    rows = [row_of(question(f"How many shapes are in this picture?{end}", *pictures)) for end, pictures in PICTURES]
    prompts = [prompt(row, tokenizer) for row in rows for _ in range(3)]
    batch = batch_of_prompts(prompts, [[70 + number, 71, 72 + number, 73] for number in range(len(prompts))])
    values = PACKED | {
        "sequence_packing": PACKED["sequence_packing"] | {"share_prompts": True, "logprob_mb_tokens": 640}
    }
    (shared, num_images, num_tokens) = run_ranks(scored_with_shared_prompts, 1, folder, batch, values)[0]
    real = torch.arange(shared.shape[1])[None] < batch["input_lengths"][:, None]
    assert ((shared.double() - exact_scores(folder, batch)).abs() * real).max().item() < FAR
    assert num_images <= 5  # of 15 images in the rows
    assert num_tokens < 0.7 * int(batch["input_lengths"].sum())


PICTURES = [("", (SMALL,)), ("", (OTHER,)), ("", (SMALL, WIDE)), ("!", (SMALL,)), ("", ())]


def scored_with_shared_prompts(
    rank: int, world_size: int, folder: str, batch: BatchedDataDict[Any], values: Any
) -> Any:
    config = config_of(folder, batch.size, **values, max_total_sequence_length=640)
    worker = PolicyWorker(DTensorBackend(config, CPU, init_reference_model=False), config)
    assert worker.backend.shares_prompts
    sharded = shard_batch(batch, 1, logprob_strategy(config), shares_prompts=True)
    seen: list[Any] = []
    run = worker.backend.run
    worker.backend.run = lambda microbatches, *args, **more: (
        seen.extend(microbatches),
        run(microbatches, *args, **more),
    )
    scores = worker.get_logprobs(sharded.data[0], sharded.sizes[0])
    inputs = [each.model_inputs for each in seen]
    grids = [given.get("image_grid_thw", given.get("pixel_values", torch.zeros(1, 0))) for given in inputs]
    num_images = sum(len(grid) if grid.dim() == 2 and grid.shape[1] else grid.shape[1] for grid in grids)
    return sharded.restore([scores]), num_images, sum(given["input_ids"].numel() for given in inputs)
