"""Answers of engines to prompts with images, before and after weight updates, compared with transformers in float64."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from engine_process import EngineProcess
from generation_helpers import ask, make_settings
from image_models import (
    FAMILIES,
    ROWS,
    exact_logprobs,
    exact_model,
    make_folder,
    never_drawn,
    prompt,
    tokenizer_of,
)
from policy_helpers import policy_config, process_group
from transformers import AutoModelForImageTextToText, PreTrainedModel

from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.transport import TransportSpec

pytest.importorskip("torchvision")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

SYNC = TransportSpec("shared_memory", run_id="test", bucket_size_bytes=100_000)
FAR = 3e-5
BACKENDS = ("vllm", "hf")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_folder(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engines(folders: dict[str, str], family: str) -> Iterator[EngineProcess]:
    folder = folders[family]
    never = never_drawn(tokenizer_of(folder))
    settings = {name: make_settings(folder, name, media_tokens=never, load_weights=True) for name in BACKENDS}
    with EngineProcess(settings) as process:
        yield process


def requests_of(folder: str) -> list[GenerationRequest]:
    tokenizer = tokenizer_of(folder)
    prompts = [prompt(row, tokenizer) for row in ROWS.values()]
    return [replace(ask(ids, seed=seed), row_inputs=inputs) for seed, (ids, inputs) in enumerate(prompts)]


def worst_difference(
    model: PreTrainedModel, requests: list[GenerationRequest], results: list[GenerationResult], never: tuple[int, ...]
) -> float:
    differences = []
    for request, result in zip(requests, results, strict=True):
        assert result.error is None, result.error
        ids = [*request.prompt_token_ids, *result.token_ids.tolist()]
        assert not set(result.token_ids.tolist()) & set(never)
        assert request.row_inputs is not None
        exact = exact_logprobs(model, ids, request.row_inputs, never)[len(request.prompt_token_ids) - 1 :]
        differences.append((torch.tensor(result.logprobs.copy()) - exact).abs().max().item())
    return max(differences)


def test_engines_answer_like_transformers_before_and_after_three_syncs(
    engines: EngineProcess, folders: dict[str, str], family: str
) -> None:
    """Each sync changes all weights. The images of the prompts stay, so features of older weights would be seen."""
    folder = folders[family]
    never, requests = never_drawn(tokenizer_of(folder)), requests_of(folder)
    model = exact_model(folder)
    for name in BACKENDS:
        assert worst_difference(model, requests, engines.generate(name, requests), never) < FAR
    config = policy_config(folder, tokenizer={"use_processor": True}, max_total_sequence_length=160)
    sender = WeightSender([Lane(SYNC)], rank=0, is_node_leader=True)
    with process_group():
        backend = DTensorBackend(config, torch.device("cpu"), init_reference_model=False)
        for version in (1, 2, 3):
            generator = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for parameter in backend.model.hf.parameters():
                    parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
            changed = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64).eval()
            changed.load_state_dict({k: v.double() for k, v in backend.model.hf.state_dict().items()})
            for name in BACKENDS:
                assert engines.sync(name, sender, SYNC, backend.held_weights(torch.float32), version) == []
                results = engines.generate(name, requests)
                assert worst_difference(model, requests, results, never) > 0.02
                worst = worst_difference(changed, requests, results, never)
                print(family, name, version, worst)
                assert worst < FAR
