"""Experts that vLLM reports against Hugging Face, and what their replay does to the difference of log-probabilities."""

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from engine_process import EngineProcess
from generation_helpers import PROMPTS, ask, make_mixture, make_settings, save_model, streamed
from policy_helpers import policy_config, process_group
from routed_models import experts_of, many_experts
from torch import Tensor
from transformers import PreTrainedModel

from nemo_rl.data.routed_experts import ROUTED_EXPERTS, note_experts, padded_experts
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, Grammar
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.parts import WholeWeights
from nemo_rl.weight_sync.transport import TransportSpec

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

ARCHITECTURES = ("qwen3_moe", "deepseek_v3")
LONG = [(7 * i) % 250 for i in range(150)]
"""Longer than a block of the prefix cache (128 tokens)."""
SPEC = TransportSpec("shared_memory", run_id="test", bucket_size_bytes=100_000)


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {arch: make_mixture(arch, seed=0) for arch in ARCHITECTURES}


@pytest.fixture(scope="module")
def engines(models: dict[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    settings = {}
    of_many = {f"{arch} {dtype}": many_experts(arch) for arch in ARCHITECTURES for dtype in ("float32", "bfloat16")}
    for name, model in (models | of_many).items():
        folder = tmp_path_factory.mktemp("model")
        save_model(folder, model)
        how: dict[str, Any] = {"load_weights": True, "reports_experts": True}
        settings[name] = make_settings(folder, "vllm", **how, precision=name.partition(" ")[2] or "float32")
    with EngineProcess(settings) as process:
        yield process


def reported(result: GenerationResult) -> Tensor:
    assert result.routed_experts is not None
    return torch.tensor(result.routed_experts)


def check(result: GenerationResult, prompt: Sequence[int], model: PreTrainedModel) -> None:
    """Check that all tokens but the last have the experts of Hugging Face."""
    experts, ids = reported(result), [*prompt, *result.token_ids.tolist()]
    assert experts.dtype == torch.int8
    assert experts.shape[0] == len(ids)
    assert bool((experts[-1] == -1).all())
    assert torch.equal(experts[:-1].sort(-1).values, experts_of(model, ids)[:-1])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_tokens_have_the_experts_of_hugging_face(engines, models, arch) -> None:
    """Of a batch of prompts, of prompts in the prefix cache, of a second turn, and of an answer with a grammar."""
    model, layers = models[arch], 1 if arch == "deepseek_v3" else 2  # its first one has no experts
    for prompts in (PROMPTS, [LONG], [LONG, [*LONG, 3, 4]]):
        results = engines.generate(arch, [ask(prompt, seed) for seed, prompt in enumerate(prompts)])
        for prompt, result in zip(prompts, results, strict=True):
            check(result, prompt, model)
            assert reported(result).shape[1:] == (layers, 2)
    (first,) = engines.generate(arch, [ask(LONG, 5)])
    prefix = [*LONG, *first.token_ids.tolist(), 11, 12, 13]
    (second,) = engines.generate(arch, [ask(prefix, 6)])
    check(second, prefix, model)
    form = Grammar("regex", "[a-c]{3,9}")
    (formed,) = engines.generate(arch, [ask(LONG, 7, grammar=form)])
    experts = reported(formed)  # reading the answer again has shown its last token to all layers
    ids = [*LONG, *formed.token_ids.tolist()]
    assert torch.equal(experts.sort(-1).values, experts_of(model, ids))


def test_an_aborted_answer_has_the_experts_of_its_tokens(engines, models) -> None:
    name, model = "qwen3_moe", models["qwen3_moe"]
    engines.call(name, "submit", [("ended", ask(LONG, 1, max_new_tokens=90))])
    while not len(engines.call(name, "responses_so_far", ["ended"])["ended"]):
        pass
    engines.call(name, "abort", ["ended"])
    ((_, result),) = engines.call(name, "collect").results
    assert result.finish_reason == "abort" and len(result.token_ids) < 90
    check(result, LONG, model)


def test_new_weights_choose_other_experts(engines, models, request) -> None:
    """No experts of a prompt in the cache outlive the weights that chose them."""
    arch = "deepseek_v3"
    sender = WeightSender([Lane(SPEC)], rank=0, is_node_leader=True)
    request.addfinalizer(sender.close)
    for version, model in ((1, make_mixture(arch, seed=9)), (2, models[arch])):
        engines.call(arch, "begin_weight_update", SPEC, version)
        sender.begin(WholeWeights(streamed(model).items))
        is_last = False
        while not is_last:
            (bucket,) = sender.next_buckets()
            engines.call(arch, "receive_bucket", bucket)
            is_last = bucket.is_last
        engines.call(arch, "finish_weight_update", version)
        (result,) = engines.generate(arch, [ask(LONG, 3)])
        check(result, LONG, model)


def differences(
    settings: Any, requests: Sequence[GenerationRequest], results: Sequence[GenerationResult]
) -> list[Tensor]:
    """Return `|log p_trainer - log p_engine|` of all sampled tokens, without and with router replay."""
    ids = [[*r.prompt_token_ids, *a.token_ids.tolist()] for r, a in zip(requests, results, strict=True)]
    width = max(map(len, ids))
    rows = {
        "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in ids]),
        "input_lengths": torch.tensor(list(map(len, ids))),
        ROUTED_EXPERTS: padded_experts([result.routed_experts for result in results], width),
    }
    found = []
    for replays in (False, True):
        values = {"router_replay": {"enabled": replays}, "generation": {}, "precision": settings.precision}
        config = policy_config(settings.model_name, max_total_sequence_length=256, **values)
        with process_group():
            worker = PolicyWorker(DTensorBackend(config, torch.device("cpu"), init_reference_model=False), config)
            scores = worker.get_logprobs(BatchedDataDict(rows), [len(ids)])
        pairs = zip(scores, requests, results, ids, strict=True)
        parts = [s[len(r.prompt_token_ids) : len(i)] - torch.tensor(a.logprobs) for s, r, a, i in pairs]
        found.append(torch.cat(parts).abs())
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_replay_brings_the_trainer_to_the_log_probabilities_of_the_engine(engines, arch, precision) -> None:
    """In bfloat16, other experts are the largest part of the difference; in float32 both sides choose the same."""
    name = f"{arch} {precision}"
    requests = [ask([(7 * i + 13 * row) % 250 for i in range(20)], row, max_new_tokens=60) for row in range(12)]
    results = engines.generate(name, requests)
    before, after = differences(engines.settings[name], requests, results)
    if precision == "float32":
        assert after.max() < 1e-4
        return
    assert before.mean() > 0.04 and before.max() > 0.8
    assert after.mean() < 0.4 * before.mean()
    assert after.max() < 0.3 * before.max()


def test_a_second_turn_keeps_the_experts_of_the_first() -> None:
    """It adds those of the last token and of the observation; messages without a report fall back."""
    log: list[dict[str, Any]] = [{"token_ids": torch.arange(3)}, {"token_ids": torch.arange(2)}]
    first = torch.arange(5, dtype=torch.int8)[:, None, None].repeat(1, 2, 2)
    first[-1] = -1
    note_experts(log, first.numpy())
    log += [{"token_ids": torch.arange(2)}, {"token_ids": torch.arange(1)}]
    second = 50 + torch.arange(8, dtype=torch.int8)[:, None, None].repeat(1, 2, 2)
    second[-1] = -1
    note_experts(log, second.numpy())
    assert torch.cat([message[ROUTED_EXPERTS] for message in log])[:, 0, 0].tolist() == [0, 1, 2, 3, 54, 55, 56, -1]
    with pytest.raises(ValueError, match="experts of 5 tokens for a conversation of 8"):
        note_experts(log, first.numpy())
