"""Megatron Core's engine against Hugging Face: tokens, log-probabilities, cached rows of other lengths, weights.

The engine runs in another process with the replacement for CUDA, the real worker and the real weight transport.
"""

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import EngineProcess
from generation_helpers import (
    PROMPTS,
    ask,
    greedy_reference,
    logits_of,
    make_mixture,
    make_model,
    make_settings,
    reference_logprobs,
    save_model,
    spread_out,
    streamed,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_rl.commands.conformance import PROPERTIES, Case, check_property
from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.models.generation.factory import check_engine_model
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.utils.errors import ConfigError, WeightSyncError
from nemo_rl.weight_sync.buckets import Bucket
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.lanes import Lane
from nemo_rl.weight_sync.parts import WholeWeights
from nemo_rl.weight_sync.transport import TransportSpec
from nemo_rl.weight_sync.verify import SyncReceipt, check_receipts

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed (extra mcore)")

SPEC = TransportSpec("shared_memory", run_id="megatron", bucket_size_bytes=50_000)
HYBRID = {"sliding_window": 5, "head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]}
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 5},
    "gemma3_text": HYBRID | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gpt_oss": HYBRID | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", *WINDOWED)
SMALL, NO_ROOM, ROOM = "small cache", "no room", 84
CHECKED = "qwen3, which the conformance suite checks"


def model_of(family: str, seed: int = 1) -> PreTrainedModel:
    if family in ("qwen3_moe", "deepseek_v3"):
        return make_mixture(family, seed)
    if family not in WINDOWED:
        return make_model(family, family != "llama", seed)
    sizes = {"vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    tokens = {"pad_token_id": 256, "eos_token_id": 258, "bos_token_id": None}
    config = AutoConfig.for_model(family, **sizes | heads | tokens | WINDOWED[family])
    torch.manual_seed(seed)
    return spread_out(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("checked")
    save_model(folder, model_of("qwen3"))
    return Case(str(folder))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, case: Case) -> Iterator[EngineProcess]:
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in folders.items():
        save_model(folder, model_of(family))
    settings = {name: make_settings(folder, "megatron", load_weights=True) for name, folder in folders.items()}
    # Room for two rows of the longest prompt and its answer: 2 layers x 2 x 32 numbers of 4 bytes a token.
    few = {"kv_cache_bytes": ROOM * 512, "max_model_len": 64}
    settings[SMALL] = make_settings(folders["llama"], "megatron", load_weights=True, **few)
    settings[NO_ROOM] = make_settings(folders["llama"], "megatron", load_weights=True, kv_cache_bytes=ROOM * 512)
    settings[CHECKED] = make_settings(Path(case.folder), "megatron", load_weights=True)
    with EngineProcess(settings) as process:
        yield process


def sync(
    engines: EngineProcess, name: str, tensors: Iterable[tuple[str, torch.Tensor]], version: int, flipped: str = ""
) -> tuple[list[Bucket], SyncReceipt]:
    """Run one sync; one bit of the tensor `flipped` is flipped on the way."""
    sender = WeightSender([Lane(SPEC)], rank=0, is_node_leader=True)
    engines.call(name, "begin_weight_update", SPEC, version)
    sender.begin(WholeWeights(dict(tensors).items))
    buckets: list[Bucket] = []
    while not buckets or not buckets[-1].is_last:
        buckets.append(sender.next_buckets()[0])
        for slot in buckets[-1].slots:
            if slot.name == flipped:
                sender._transports[0].buffer(buckets[-1].num_bytes, buckets[-1].index)[slot.offset + 2] ^= 1
        engines.call(name, "receive_bucket", buckets[-1])
    sender.close()
    return buckets, engines.call(name, "finish_weight_update", version)


def deploy(engines: EngineProcess, name: str, model: PreTrainedModel, version: int) -> None:
    buckets, receipt = sync(engines, name, streamed(model).items(), version)
    check_receipts([receipt], buckets, version)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_hugging_face_before_and_after_a_sync(engines, family):
    """Prompts of 1 to 30 tokens in one batch; windows of five."""
    for version, model in ((0, model_of(family)), (1, model_of(family, seed=2))):
        if version:
            deploy(engines, family, model, version)
        results = engines.generate(family, [ask(prompt, temperature=0.0) for prompt in PROMPTS])
        for prompt, result in zip(PROMPTS, results, strict=True):
            tokens = result.token_ids.tolist()
            assert (tokens, len(tokens)) == (logits_of(model, prompt, tokens).argmax(-1).tolist(), 12)
            assert result.weight_versions == [(0, version)]
            expected = reference_logprobs(model, prompt, result.token_ids.tolist(), SamplingParams(temperature=0.0))
            assert result.logprobs == pytest.approx(expected, abs=1e-4)
    deploy(engines, family, model_of(family), 0)


@pytest.mark.parametrize("name", PROPERTIES)
def test_the_engine_holds(engines, case, name):
    engines.look(CHECKED, check_property, case, name)


def note_reads(engine: Any) -> None:
    """Note the tokens that each row of each pass reads, and the room that is left."""
    engine.reads, read = [], engine._part.cache.read

    def noted(rows: Any) -> Any:
        step = read(rows)
        counts = step.last.diff(prepend=torch.tensor([-1])).tolist()
        engine.reads.append((counts, engine._part.cache.room))
        return step

    engine._part.cache.read = noted


def reads_so_far(engine: Any) -> list[tuple[list[int], int]]:
    found, engine.reads = engine.reads, []
    return found


def test_the_newest_row_waits_while_the_cache_is_full(engines):
    """Rows of 30, 30 and 12 tokens, each with 12 more to come, in a cache of 84: the third is read twice."""
    engines.look(SMALL, note_reads)
    order = [PROMPTS[3], PROMPTS[3][::-1], PROMPTS[1]]
    results = engines.generate(SMALL, [ask(prompt, temperature=0.0) for prompt in order])
    for prompt, result in zip(order, results, strict=True):
        assert result.token_ids.tolist() == greedy_reference(model_of("llama"), prompt, 12)
    reads = engines.look(SMALL, reads_so_far)
    assert reads[0] == ([30, 30, 12], ROOM - 72)
    assert [counts for counts, _ in reads[1:5]] == [[1, 1, 1]] * 4
    assert [counts for counts, _ in reads[5:12]] == [[1, 1]] * 7
    assert [counts for counts, _ in reads[12:]] == [[17], *[[1]] * 6], "the others took the places of the third"
    assert sum(load.num_preemptions for load in engines.loads[SMALL]) == 1
    assert max(load.kv_cache_usage for load in engines.loads[SMALL]) == pytest.approx(1.0, abs=2 / ROOM)


def test_rows_share_the_tokens_with_which_they_begin(engines):
    """With rows that run and rows that have ended; each answer is that of the request alone."""
    order = [PROMPTS[3], PROMPTS[3], PROMPTS[4], PROMPTS[3][::-1], PROMPTS[2], PROMPTS[3][:20] + PROMPTS[1]]
    limits = [3, 12, 3, 12, 12, 12]
    requests = [
        ask(prompt, seed=seed, max_new_tokens=most)
        for seed, (prompt, most) in enumerate(zip(order, limits, strict=True))
    ]
    results = engines.generate(SMALL, requests)
    assert engines.look(SMALL, reads_so_far)[0] == ([30, 1, 7, 30, 1, 12], ROOM - 81)
    for prompt, result, most in zip(order, results, limits, strict=True):
        expected = reference_logprobs(model_of("llama"), prompt, result.token_ids.tolist(), SamplingParams())
        assert result.logprobs == pytest.approx(expected, abs=1e-4)
        assert len(result.token_ids) == most
    for request, result in zip(requests, results, strict=True):
        (alone,) = engines.generate(SMALL, [request])
        assert alone.token_ids.tolist() == result.token_ids.tolist()
    engines.look(SMALL, reads_so_far)
    answered = requests[-1].prompt_token_ids + results[-1].token_ids.tolist()
    engines.generate(SMALL, [ask([*answered, 33, 34])])
    assert engines.look(SMALL, reads_so_far)[0][0] == [3], (
        "the last token of an answer is not read before the next turn"
    )


def room_of(engine: Any) -> int:
    return engine._part.cache.room


def test_new_weights_are_not_mixed_with_tokens_of_old_ones(engines):
    for _ in range(2):
        engines.generate(SMALL, [ask(PROMPTS[3])])
    assert engines.look(SMALL, reads_so_far)[-12][0] == [1], "the second request finds the tokens of the first one"
    assert engines.look(SMALL, room_of) == ROOM
    deploy(engines, SMALL, model_of("llama", seed=3), 5)
    (result,) = engines.generate(SMALL, [ask(PROMPTS[3], temperature=0.0)])
    assert engines.look(SMALL, reads_so_far)[0][0] == [30]
    assert result.token_ids.tolist() == greedy_reference(model_of("llama", seed=3), PROMPTS[3], 12)


def test_a_cache_without_room_for_one_row_is_refused(engines):
    too_small = r"room for 84 tokens, but one row may have 256\. Raise policy.generation.engine.kv_cache_memory_mb"
    with pytest.raises(AssertionError, match=too_small):
        engines.look(NO_ROOM, room_of)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_flipped_bit_and_a_missing_tensor_are_found(engines, family):
    tensors = streamed(model_of(family))
    name = next(name for name in tensors if name.endswith("k_proj.weight"))
    buckets, receipt = sync(engines, family, tensors.items(), 3, flipped=name)
    with pytest.raises(WeightSyncError, match=f"content differs in {name}"):
        check_receipts([receipt], buckets, 3)
    for left_out in (name, list(tensors)[-2]):
        _, receipt = sync(engines, family, ((n, t) for n, t in tensors.items() if n != left_out), 4)
        assert receipt.unbound == [left_out]
    for wrong, sentence in ((("model.nothing", torch.zeros(1)), "no tensor named"), ((name, torch.zeros(2)), "shape")):
        with pytest.raises(AssertionError, match=sentence):
            sync(engines, family, [wrong], 5)
    deploy(engines, family, model_of(family), 0)


def move(engine: Any) -> None:
    engine._model._apply(torch.clone)


def test_weights_reach_a_model_that_was_moved(engines):
    """Buffers too, such as the biases of experts: moving a model makes new tensors for them."""
    engines.look("deepseek_v3", move)
    model = model_of("deepseek_v3", seed=4)
    deploy(engines, "deepseek_v3", model, 9)
    (result,) = engines.generate("deepseek_v3", [ask(PROMPTS[3], temperature=0.0)])
    expected = reference_logprobs(model, PROMPTS[3], result.token_ids.tolist(), SamplingParams(temperature=0.0))
    assert result.logprobs == pytest.approx(expected, abs=1e-4)
    deploy(engines, "deepseek_v3", model_of("deepseek_v3"), 0)


def test_outputs_of_layers_are_those_of_hugging_face(engines):
    found = engines.call("gemma3_text", "layer_outputs", PROMPTS[1])
    with torch.no_grad():
        expected = model_of("gemma3_text")(torch.tensor([PROMPTS[1]]), output_hidden_states=True).hidden_states
    assert len(found) == 2
    assert torch.allclose(found[0], expected[1][0], atol=1e-4)


def test_unsupported_settings_are_refused_before_ray_starts(tmp_path):
    save_model(tmp_path, make_mixture("mixtral", seed=1))
    values = {"model_name": str(tmp_path), "max_total_sequence_length": 64, "generation": {"backend": "megatron"}}
    policy = PolicyConfig.build(**values, tokenizer={"name": str(tmp_path)})
    cluster = ClusterConfig.build(device="cpu")
    with pytest.raises(ConfigError, match="backend=megatron: .*mixtral.*engines vllm and hf"):
        check_engine_model(policy, cluster)
    AutoConfig.for_model("nemotron_h").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="keeps no states from token to token, and nemotron_h.*engines vllm and hf"):
        check_engine_model(policy, cluster)
