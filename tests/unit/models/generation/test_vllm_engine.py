"""The vLLM engine against Hugging Face: new weights take effect, log-probabilities, seeds, stops.

One process hosts all engines (dense, tied and untied; experts; latent attention); the real transport
sends weights there.
"""

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from engine_process import EngineProcess
from generation_helpers import (
    MAX_MODEL_LEN,
    PROMPTS,
    ask,
    check_spans,
    greedy_reference,
    logits_of,
    make_mixture,
    make_model,
    make_settings,
    mixture_config,
    plain,
    reference_logprobs,
    save_model,
)
from safetensors.torch import load_file, save_file
from tiny_models import make_char_tokenizer
from transformers import PreTrainedModel
from vllm_looks import (
    batch_limits,
    batch_limits_on,
    bits_change,
    bits_change_of_sums_by_threads,
    busy_seconds,
    compute_ahead,
    compute_on,
    follow_cache,
    products_differ,
    record_packing,
    rendezvous_file,
    storages,
    take_packing,
    threads_at_start,
    threads_of_sizes,
    threads_under_load,
)

from nemo_rl.algorithms.rollout.sync_setup import suspect_layer
from nemo_rl.commands.conformance import PROPERTIES, Case, check_property
from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.models.dtensor.checkpoints.model_files import weights_by_name
from nemo_rl.models.generation.factory import engine_settings
from nemo_rl.models.generation.interfaces import EngineSettings, GenerationResult, SamplingParams
from nemo_rl.models.generation.responses import joined, rest_of
from nemo_rl.models.huggingface.checkpoint_names import in_checkpoint
from nemo_rl.models.huggingface.layers import decoder_layers, recorded_outputs
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.parts import WholeWeights
from nemo_rl.weight_sync.transport import TransportSpec
from nemo_rl.weight_sync.verify import SyncReceipt, check_receipts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "qwen3 experts": partial(make_mixture, "qwen3_moe"),
    "mixtral": partial(make_mixture, "mixtral"),
    "latent attention": partial(make_mixture, "deepseek_v3"),
    "gpt-oss": partial(make_mixture, "gpt_oss"),
    "qwen2 tied": partial(make_model, "qwen2", True),
    "llama untied": partial(make_model, "llama", False),
}
SPEC = TransportSpec("shared_memory", run_id="test", bucket_size_bytes=10_000)
LONG_PROMPT = [(7 * i) % 250 for i in range(150)]
"""Longer than a block of the prefix cache (128 tokens)."""


SMALL_CACHE = "qwen2 tied, with a cache for five long answers"
KEPT_CACHE = "qwen2 tied, whose running answers keep their cache"
AHEAD = "qwen2 tied, whose steps return while the next batch is computed"
BLOCK_BYTES = 128 * 2 * 2 * 32 * 4
"""Keys and values of 128 tokens, in two layers with one head of 32 float32 numbers."""
COPIED_HEAD = "qwen2 tied, whose files have a copy of the embedding as head"
OWN_HEAD = "qwen2 tied, whose files have another head"
CONFIGURED = "qwen2 tied, with keys of vllm_cfg"
CHECKED = "qwen2 tied, which the conformance suite checks"


def configured_settings(folder: str) -> EngineSettings:
    vllm = {"enable_prefix_caching": False, "logprobs_mode": "raw_logprobs", "max_model_len": MAX_MODEL_LEN}
    policy = PolicyConfig.build(
        model_name=folder,
        precision="float32",
        max_total_sequence_length=MAX_MODEL_LEN,
        generation={"vllm_cfg": {**vllm, "kv_cache_memory_mb": 16}},
    )
    return engine_settings(policy, ClusterConfig(device="cpu"), seed=0, load_weights=True)


def with_head(folder: Path, noise: float) -> str:
    """Save a tied model whose files have an output head, too, as those of Qwen3-0.6B do; return the folder."""
    save_model(folder, MODELS["qwen2 tied"](seed=0))
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding + noise * torch.randn_like(embedding)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def vllm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an empty cache folder, as on a new machine."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("checked")
    save_model(folder, MODELS["qwen2 tied"](seed=0))
    return Case(str(folder))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, vllm_cache: Path, case: Case) -> Iterator[EngineProcess]:
    settings = {}
    for name, make in MODELS.items():
        folder = tmp_path_factory.mktemp("model")
        save_model(folder, make(seed=0))
        settings[name] = make_settings(folder, "vllm")
    settings[SMALL_CACHE] = replace(settings["qwen2 tied"], kv_cache_bytes=12 * BLOCK_BYTES, load_weights=True)
    for name, noise in ((COPIED_HEAD, 0.0), (OWN_HEAD, 1.0)):
        settings[name] = replace(settings["qwen2 tied"], model_name=with_head(tmp_path_factory.mktemp("head"), noise))
        settings[name] = replace(settings[name], load_weights=True)
    settings[KEPT_CACHE] = replace(settings["qwen2 tied"], recomputes_cache=False)
    settings[AHEAD] = replace(settings[KEPT_CACHE], optimizations="none")
    settings[CHECKED] = make_settings(Path(case.folder), "vllm", load_weights=True)
    settings[CONFIGURED] = configured_settings(settings["qwen2 tied"].model_name)
    with mock.patch.dict(os.environ, {"VLLM_CACHE_ROOT": str(vllm_cache)}), EngineProcess(settings) as process:
        for name in settings:  # a mixture first: vLLM makes its expert groups with the first engine of a process
            process.call(name, "ready")
        yield process


@pytest.fixture(scope="module")
def sender() -> Iterator[WeightSender]:
    sender = WeightSender([Lane(SPEC)], rank=0, is_node_leader=True)
    yield sender
    sender.close()


def streamed(model: PreTrainedModel) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield what a trainer streams of a model."""
    return in_checkpoint(model, weights_by_name(model).items())


def sync(
    engines: EngineProcess,
    sender: WeightSender,
    name: str,
    tensors: Iterable[tuple[str, torch.Tensor]],
    version: int,
    stop_after: int | None = None,
) -> tuple[list[Bucket], SyncReceipt | None]:
    """Run one sync; `stop_after` interrupts it after that number of buckets."""
    engines.call(name, "begin_weight_update", SPEC, version)
    sender.begin(WholeWeights(dict(tensors).items))
    buckets: list[Bucket] = []
    while not buckets or not buckets[-1].is_last:
        buckets.append(sender.next_buckets()[0])
        engines.call(name, "receive_bucket", buckets[-1])
        if len(buckets) == stop_after:
            return buckets, None
    return buckets, engines.call(name, "finish_weight_update", version)


def update(engines: EngineProcess, sender: WeightSender, name: str, seed: int) -> PreTrainedModel:
    """Give the engine the weights of a new random model; return the model."""
    model = MODELS[name](seed=seed)
    deploy(engines, sender, name, model, version=seed)
    return model


def deploy(engines: EngineProcess, sender: WeightSender, name: str, model: PreTrainedModel, version: int) -> None:
    """Run a whole sync that must succeed; its buckets split layers and even fused projections."""
    buckets, receipt = sync(engines, sender, name, streamed(model), version)
    assert len(buckets) > 10
    assert receipt is not None
    check_receipts([receipt], buckets, version)


@pytest.mark.parametrize("name", PROPERTIES)
def test_the_engine_holds(engines, case, name):
    engines.look(CHECKED, check_property, case, name)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_after_each_update_equals_hugging_face(engines, sender, name):
    """Also for a prompt whose keys and values were cached under the old weights."""
    requests = [ask(prompt, temperature=0.0) for prompt in [*PROMPTS, LONG_PROMPT]]
    for seed in (11, 12):
        model = update(engines, sender, name, seed)
        for _ in range(2):
            results = engines.generate(name, requests)
            for request, result in zip(requests, results, strict=True):
                tokens = result.token_ids.tolist()
                likeliest = logits_of(model, request.prompt_token_ids, tokens).argmax(-1).tolist()
                assert (tokens, len(tokens)) == (likeliest, 12)
        assert all(result.weight_versions == [(0, seed)] for result in results)
        assert {result.finish_reason for result in results} == {"length"}


def test_files_with_a_copy_of_a_tied_head_can_be_updated(engines, sender):
    """The trainer sends the embedding once; vLLM has untied the head, and tied it again after it read the copy."""
    for seed in (5, 6):
        model = MODELS["qwen2 tied"](seed=seed)
        deploy(engines, sender, COPIED_HEAD, model, version=seed)
        (result,) = engines.generate(COPIED_HEAD, [ask(PROMPTS[0], temperature=0.0)])
        assert result.token_ids.tolist() == greedy_reference(model, PROMPTS[0], 12)


def test_a_head_of_its_own_that_no_sync_brings_is_named(engines, sender):
    model = MODELS["qwen2 tied"](seed=5)
    _, receipt = sync(engines, sender, OWN_HEAD, streamed(model), 1)
    assert receipt is not None
    assert receipt.unbound == ["lm_head.weight"]


@pytest.mark.parametrize("name", MODELS)
def test_a_weight_update_keeps_the_address_of_every_tensor(engines, sender, name):
    """CUDA graphs, kernel layouts and absorbed projections hold the addresses of the tensors they compute with."""
    before = engines.look(name, storages)
    update(engines, sender, name, seed=23)
    assert len(before) > 10
    assert engines.look(name, storages) == before


def test_batch_limits_on_gpus_are_those_of_offline_generation(engines, tmp_path):
    """Without a usage vLLM has no defaults for engines: 128 sequences, 2048 tokens. The CPU's own fix its results."""
    assert engines.look("qwen2 tied", batch_limits) == (128, 4096)
    mixture_config("mixtral").save_pretrained(tmp_path)
    settings = make_settings(tmp_path, "vllm", device="cuda", max_model_len=4096)
    sizes = {"NVIDIA H100 80GB HBM3": 80, "NVIDIA A100-SXM4-80GB": 80, "NVIDIA B200": 180}
    limits = {gpu: engines.look("qwen2 tied", batch_limits_on, gpu, size, settings) for gpu, size in sizes.items()}
    assert list(limits.values()) == [(1024, 16384), (256, 8192), (1024, 16384)]
    asked = replace(settings, engine_kwargs={"max_num_seqs": 300, "max_num_batched_tokens": 5000})
    assert engines.look("qwen2 tied", batch_limits_on, "NVIDIA H100 80GB HBM3", 80, asked) == (300, 5000)


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_does_not_reference_the_sender_s_memory(engines, sender, name):
    model = update(engines, sender, name, seed=13)
    zeros = {key: torch.zeros_like(tensor) for key, tensor in model.named_parameters()}
    sender.begin(WholeWeights(zeros.items))
    while not sender.next_buckets()[0].is_last:
        pass
    (result,) = engines.generate(name, [ask(PROMPTS[1], temperature=0.0)])
    assert result.token_ids.tolist() == greedy_reference(model, PROMPTS[1], 12)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "qwen2 tied"])
def test_logprobs_equal_hugging_face(engines, sender, name):
    model = update(engines, sender, name, seed=14)
    prompts, sampling = [*PROMPTS, LONG_PROMPT], {"temperature": 0.9, "top_k": 100, "top_p": 0.8}
    results = engines.generate(name, [ask(prompt, seed=i, **sampling) for i, prompt in enumerate(prompts)])
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.logprobs) == len(result.token_ids) == 12
        expected = reference_logprobs(model, prompt, result.token_ids.tolist(), SamplingParams(**sampling))
        assert all(map(math.isfinite, expected)), "a filtered token was sampled"
        assert result.logprobs == pytest.approx(expected, abs=1e-4)


def test_layers_that_are_not_called_give_no_outputs():
    """vLLM replays CUDA graphs of some architectures without calling their modules; a stage has no other layers."""
    from vllm.model_executor.models.utils import PPMissingLayer

    from nemo_rl.models.generation.vllm.running_model import start_recording, stop_recording

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity(), PPMissingLayer()])
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    for called, reported in ((2, 2), (1, 0), (0, 0), (4, 4)):
        start_recording(worker)
        for number in range(called):
            model.layers[number % 2](torch.ones(3, 4))
        assert len(stop_recording(worker)) == reported


@pytest.mark.parametrize("name", MODELS)
def test_layer_outputs_match_hugging_face_and_a_changed_layer_is_named(engines, sender, name):
    model = update(engines, sender, name, seed=21)
    token_ids = PROMPTS[3]
    with torch.no_grad(), recorded_outputs(decoder_layers(model)) as expected:
        model(torch.tensor([token_ids]), use_cache=False)
    names = [f"layer {index}" for index in range(len(expected))]
    outputs = engines.call(name, "layer_outputs", token_ids)
    assert [(output - right).norm() / right.norm() < 1e-4 for output, right in zip(outputs, expected, strict=True)] == [
        True
    ] * len(names)
    with torch.no_grad():
        decoder_layers(model)[1].self_attn.o_proj.weight.mul_(-1)
    deploy(engines, sender, name, model, version=22)
    outputs = engines.call(name, "layer_outputs", token_ids)
    assert suspect_layer(names, expected, outputs, rounding=1e-4).startswith("layer 1 is suspect")


@pytest.mark.parametrize("name", [KEPT_CACHE, AHEAD])
def test_a_running_response_may_keep_keys_and_values_of_older_weights(engines, sender, name):
    """The reference computes a prefix with the old weights and the rest, from its cache, with the new ones."""
    old, new = (MODELS["qwen2 tied"](seed=seed) for seed in (71, 72))
    deploy(engines, sender, name, old, version=71)
    if name == AHEAD:
        engines.look(name, compute_ahead)
    requests = [ask(prompt, seed=3, max_new_tokens=80) for prompt in (PROMPTS[3], LONG_PROMPT)]
    engines.call(name, "submit", [("short", requests[0]), ("long", requests[1])])
    deploy(engines, sender, name, new, version=72)
    results: dict[str, GenerationResult] = {}
    while len(results) < 2:
        results.update(engines.call(name, "collect").results)
    for request, result in zip(requests, (results["short"], results["long"]), strict=True):
        tokens, start = result.token_ids.tolist(), result.weight_versions[-1].start
        assert 0 < start < 80 and result.weight_versions == [(0, 71), (start, 72)]
        with torch.no_grad():
            cache = old(torch.tensor([request.prompt_token_ids + tokens[: start - 1]]), use_cache=True).past_key_values
            logits = new(torch.tensor([tokens[start - 1 : -1]]), past_key_values=cache).logits[0]
        ids = torch.tensor(tokens[start:])[:, None]
        expected = logits.log_softmax(-1).gather(1, ids)[:, 0]
        computed_again = logits_of(new, request.prompt_token_ids + tokens[:start], tokens[start:])
        kept = torch.tensor(result.logprobs[start:])
        torch.testing.assert_close(kept, expected, atol=1e-4, rtol=0)
        assert (computed_again.log_softmax(-1).gather(1, ids)[:, 0] - kept).abs().max() > 1e-2
    for request, result in zip(requests, engines.generate(name, requests), strict=True):
        check_spans(request, result, {71: old, 72: new}, [(0, 72)])


@pytest.mark.parametrize("name", MODELS)
def test_responses_so_far_continue_with_other_weights_and_disturb_nothing(engines, sender, name):
    old = update(engines, sender, name, seed=34)
    requests = [ask(prompt, seed=i, max_new_tokens=200) for i, prompt in enumerate([PROMPTS[0], PROMPTS[3]])]
    expected = engines.generate(name, requests)
    ids = [f"so far {name} {i}" for i in range(len(requests))]
    engines.call(name, "submit", list(zip(ids, requests, strict=True)))
    parts = engines.call(name, "responses_so_far", [*ids, "unknown"])
    while parts.keys() == set(ids) and not all(map(len, parts.values())):
        parts = engines.call(name, "responses_so_far", ids)
    assert parts.keys() == set(ids)
    results: dict[str, GenerationResult] = {}
    while len(results) < len(ids):
        results.update(engines.call(name, "collect").results)
    assert plain([results[id_] for id_ in ids]) == plain(expected)
    assert engines.call(name, "responses_so_far", ids) == {}
    new = update(engines, sender, name, seed=35)
    rests = engines.generate(name, [rest_of(request, parts[id_]) for id_, request in zip(ids, requests, strict=True)])
    for id_, request, rest in zip(ids, requests, rests, strict=True):
        assert parts[id_].token_ids.tolist() == results[id_].token_ids.tolist()[: len(parts[id_])]
        whole = joined(parts[id_], rest, (), make_char_tokenizer())
        assert len(whole.token_ids) == 200
        check_spans(request, whole, {34: old, 35: new}, [(0, 34), (len(parts[id_]), 35)])


@pytest.mark.parametrize("name", [name for name in MODELS if name != "latent attention"])
def test_the_number_of_threads_changes_no_bit(engines, name):
    requests = [ask(prompt, seed=100 + i) for i, prompt in enumerate([*PROMPTS, LONG_PROMPT] * 3)]
    answers = []
    for counts in ([2], [1], [1, 2], [3]):
        engines.look(name, compute_on, counts)
        answers.append([(r.token_ids.tolist(), r.logprobs.tolist()) for r in engines.generate(name, requests)])
    engines.look(name, compute_on, [1])
    assert answers[1:] == answers[:1] * 3


def test_a_second_thread_is_used_while_a_core_is_idle(engines):
    name = "qwen2 tied"
    assert engines.look(name, threads_under_load, 2, [0.1, 0.9, 2.0, 0.4]) == [2, 1, 1, 2]
    assert engines.look(name, threads_under_load, 8, [0.0, 6.0, 7.0]) == [2, 2, 1]
    assert engines.look(name, threads_under_load, 2, [0.1, 0.9], True, False) == [1, 1]
    assert engines.look(name, threads_under_load, 2, [0.1, 0.9, 0.1], True, True) == [2, 1, 2]


def test_small_models_start_with_two_threads_and_large_ones_with_all(engines):
    name = "qwen2 tied"
    assert engines.look(name, threads_at_start, 8) == (2, "two for prompts"), "tiny"
    # Embeddings 256 x 64 and two layers of 64 wide: some 70,000 parameters.
    assert engines.look(name, threads_of_sizes, 300_000, 400_000, 3) == (2, "two for prompts")
    assert engines.look(name, threads_of_sizes, 10_000, 300_000, 3) == (2, "two for all")
    assert engines.look(name, threads_of_sizes, 10_000, 300_000, 1) == (1, "as they are")
    assert engines.look("latent attention", threads_of_sizes, 10_000, 10_000_000, 3) == (1, "as they are")
    assert engines.look(name, threads_of_sizes, 10_000, 60_000, 3) == (3, "as they are")
    # Without the optimization a small model stays on one, and a large one still takes all.
    assert engines.look(name, threads_of_sizes, 10_000, 300_000, 3, False) == (1, "as they are")
    assert engines.look(name, threads_of_sizes, 10_000, 60_000, 3, False) == (3, "as they are")


def test_the_number_of_running_requests_follows_the_cache(engines):
    """Each answer starts with one block of the cache, and most need a second one later."""
    wanted = [ask([20 + i, 50, 3 * i], temperature=0.0, max_new_tokens=100 + 30 * (i % 5)) for i in range(64)]
    preemptions, answers = [], []
    for follows in (False, True):
        engines.look(SMALL_CACHE, follow_cache, follows)
        for _ in range(2):
            engines.loads.clear()
            results = engines.generate(SMALL_CACHE, wanted)
            loads = engines.loads[SMALL_CACHE]
            preemptions.append(sum(load.num_preemptions for load in loads))
            answers.append([r.token_ids.tolist() for r in results])
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert [len(tokens) for tokens in answers[0]] == [request.sampling.max_new_tokens for request in wanted]
    assert 3 < loads[-1].max_running <= 11 and max(load.kv_cache_usage for load in loads) > 0.8
    assert min(preemptions[:2]) > 20
    assert max(preemptions[2:]) < 0.5 * min(preemptions[:2]), preemptions


def test_matrix_products_split_over_the_sum_are_found(engines):
    assert engines.look("qwen2 tied", bits_change_of_sums_by_threads) is True
    assert engines.look("qwen2 tied", bits_change, (8192, 64)) is False


def test_a_divided_sum_is_noticed(engines):
    """oneDNN divides sums over many columns with AVX-512 only; the check agrees with a direct comparison."""
    for shape in ((64, 8192), (64, 64)):
        found = engines.look("qwen2 tied", bits_change, shape)
        assert found is engines.look("qwen2 tied", products_differ, shape)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_packed_on_the_threads_of_the_start(engines, sender, name):
    """On other threads oneDNN may choose another layout, which vLLM's cached products do not know."""
    for steps_on in (1, 2):
        engines.look(name, compute_on, [steps_on])
        engines.generate(name, [ask(PROMPTS[1], temperature=0.0)])
        engines.look(name, record_packing)
        model = update(engines, sender, name, seed=40 + steps_on)
        threads = engines.look(name, take_packing)
        assert len(threads) >= 4 and set(threads) == {1}
        (result,) = engines.generate(name, [ask(PROMPTS[1], temperature=0.0)])
        assert result.token_ids.tolist() == greedy_reference(model, PROMPTS[1], 12)
    engines.look(name, compute_on, [1])


def test_the_load_of_other_processes_is_measured(engines):
    seconds = 1.0
    before = engines.look("qwen2 tied", busy_seconds, seconds)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        assert engines.look("qwen2 tied", busy_seconds, seconds) > max(0.5 * seconds, 0.8 * before)
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.parametrize("stop_after", [1, 2, 3, 8])
@pytest.mark.parametrize("name", MODELS)
def test_an_interrupted_update_can_be_started_again(engines, sender, name, stop_after):
    """This happens when another engine dies in the middle of a sync."""
    broken_off = streamed(MODELS[name](seed=15))
    sync(engines, sender, name, broken_off, version=15, stop_after=stop_after)
    model = update(engines, sender, name, seed=16)
    (result,) = engines.generate(name, [ask(PROMPTS[3], temperature=0.0)])
    assert result.token_ids.tolist() == greedy_reference(model, PROMPTS[3], 12)


@pytest.mark.parametrize(
    ("name", "left_out", "unbound"),
    [
        ("qwen2 tied", "model.norm.weight", "model.norm.weight"),
        ("qwen2 tied", "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
        ("llama untied", "lm_head.weight", "lm_head.weight"),
        ("llama untied", "model.layers.0.self_attn.k_proj.weight", "part of model.layers.0.self_attn.qkv_proj"),
        ("qwen2 tied", "model.layers.0.mlp.up_proj.weight", "part of model.layers.0.mlp.gate_up_proj"),
        (
            "qwen3 experts",
            "model.layers.1.mlp.experts.3.down_proj.weight",
            "part of model.layers.1.mlp.experts.routed_experts",
        ),
    ],
)
def test_a_missing_tensor_is_reported(engines, sender, name, left_out, unbound):
    model = MODELS[name](seed=17)
    tensors = [(key, tensor) for key, tensor in streamed(model) if key != left_out]
    _, receipt = sync(engines, sender, name, tensors, version=17)
    assert receipt is not None
    assert receipt.unbound == [unbound]
    update(engines, sender, name, seed=18)


def test_keys_of_vllm_cfg_reach_vllm(engines):
    cached = attrgetter("_engine.vllm_config.cache_config.enable_prefix_caching")
    assert engines.look("qwen2 tied", cached) is True and engines.look(CONFIGURED, cached) is False
    model = MODELS["qwen2 tied"](seed=0)
    requests = [ask(prompt, seed=i, temperature=0.5) for i, prompt in enumerate([*PROMPTS, LONG_PROMPT])]
    for request, result in zip(requests, engines.generate(CONFIGURED, requests), strict=True):
        raw = reference_logprobs(model, request.prompt_token_ids, result.token_ids.tolist(), SamplingParams())
        assert result.logprobs == pytest.approx(raw, abs=1e-3), "raw log-probs do not know of the temperature"


def test_samples_share_a_prompt_of_a_few_words(engines):
    """vLLM shares complete blocks only. Its kernel for latent attention has a size of its own."""
    size = attrgetter("_engine.vllm_config.cache_config.block_size")
    assert [engines.look(name, size) for name in ("qwen2 tied", "latent attention")] == [32, 16]


def test_no_class_is_inspected_in_another_process(engines, vllm_cache):
    """vLLM writes the result of such an inspection to a file."""
    assert not (vllm_cache / "modelinfos").exists()


def test_no_temporary_file_remains(engines):
    assert engines.look(CONFIGURED, rendezvous_file).endswith("(deleted)")
