"""Rows with an extra input: the model of the documentation is trained, scored and sampled; others refuse such rows."""

import asyncio
import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from policy_helpers import COMMON, VOCAB, policy_config, process_group, run_ranks, save_tiny_model
from tiny_models import make_char_tokenizer

from nemo_rl.algorithms.setup.row_check import check_rows
from nemo_rl.data.collate_fn import sft_collate_fn
from nemo_rl.data.datasets.setup import RunData
from nemo_rl.data.model_rows import RowInput, RowInputs
from nemo_rl.distributed.ranks.placements import whole
from nemo_rl.losses.supervised import NLLLossFn
from nemo_rl.models.accepted_rows import WHO_ACCEPTS
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.generation.hf import HfEngine
from nemo_rl.models.generation.interfaces import EngineSettings, GenerationRequest, SamplingParams
from nemo_rl.models.generation.registry import ENGINES
from nemo_rl.models.generation.worker import GenerationWorker
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.utils.errors import ConfigError, GenerationError

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
SLOT = 5
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)
LAYOUTS = {
    "padded": {"train_micro_batch_size": 2, "logprob_batch_size": 3},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 48}},
    "packed_shared": {
        "sequence_packing": {"enabled": True, "share_prompts": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}
    },
    "rounded": {"train_micro_batch_size": 1, "make_sequence_length_divisible_by": 8},
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> ModuleType:
    """The model of the documentation, as a module that forked ranks have too."""
    page = (ROOT / "docs/development/adding-things.md").read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.M) if "class SensorModel" in b]
    file = tmp_path_factory.mktemp("shown") / "sensor_model.py"
    file.write_text(block, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("sensor_model", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["sensor_model"] = module
    spec.loader.exec_module(module)
    return module


def make_model(shown):
    torch.manual_seed(11)
    return shown.SensorForCausalLM(shown.SensorConfig(sensor_token_id=SLOT, **COMMON)).eval()


@pytest.fixture(scope="module")
def model_name(shown, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model") / "sensor"
    make_model(shown).save_pretrained(folder)
    return str(folder)


def backwards(token_ids, inputs):
    """A position rule: the last token is at 0."""
    return torch.arange(len(token_ids)).flip(0)


def every_second(token_ids, inputs):
    """A position rule: positions are two apart."""
    return 2 * torch.arange(len(token_ids))


def make_batch(rows: int = 6, rule=None):
    """SFT rows with 0 to 3 readings, in collated form; the first tokens of all rows are the same."""
    gen = torch.Generator().manual_seed(3)
    data = []
    for row in range(rows):
        num_readings = (row * 2 + 1) % 4
        prompt = torch.cat([torch.arange(20, 30), torch.randint(6, VOCAB, (6,), generator=gen)])
        prompt[10 : 10 + num_readings] = SLOT
        answer = torch.randint(6, VOCAB, (3 + row % 3,), generator=gen)
        log = [{"role": "user", "token_ids": prompt}, {"role": "assistant", "token_ids": answer}]
        datum = {"message_log": log, "length": len(prompt) + len(answer), "loss_multiplier": 1.0, "idx": row}
        if num_readings or rule:
            readings = RowInput(torch.randn(num_readings, 3, generator=gen))
            datum["row_inputs"] = RowInputs({"readings": readings}, rule)
        data.append(datum)
    return sft_collate_fn(data, SimpleNamespace(pad_token_id=0), 1)


def reference(model, data):
    """SFT loss, gradients and scores by the model alone in float64, row by row."""
    model = model.double()
    scores = torch.zeros(data["input_ids"].shape, dtype=torch.float64)
    rows = []
    for row, length in enumerate(data["input_lengths"].tolist()):
        ids, inputs = data["input_ids"][row : row + 1, :length], data["row_inputs"][row]
        further = {name: given.values.double() for name, given in inputs.inputs.items()}
        if inputs.positions is not None:
            further["position_ids"] = inputs.positions(ids[0], inputs)[None]
            further["attention_mask"] = torch.ones_like(ids)  # positions say nothing about other sequences
        logp = torch.log_softmax(model(input_ids=ids, use_cache=False, **further).logits, dim=-1)
        own = logp[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
        rows.append(torch.nn.functional.pad(own, (0, data["input_ids"].shape[1] - length)))
        scores[row, 1:length] = own.detach()
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    loss = -(torch.stack(rows) * mask).sum() / mask.sum()
    loss.backward()
    return scores, loss.item(), {name: p.grad for name, p in model.named_parameters()}


def on_rank(rank: int, world_size: int, config, data):
    """This rank's scores, its part of the loss, and the gradients of the whole batch."""
    worker = PolicyWorker(DTensorBackend(config, CPU), config)
    scored, trained = (shard_batch(data, world_size, make(config)) for make in (logprob_strategy, training_strategy))
    scores = worker.get_logprobs(scored.data[rank], scored.sizes[rank])
    grads = {}

    def keep():
        for name, parameter in worker.backend.model.hf.named_parameters():
            grads[name] = whole(parameter.grad).clone()
        return 0.0, True

    worker.backend.clip_and_step = keep
    result = worker.train(trained.data[rank], trained.sizes[rank], NLLLossFn(), count_valid(data))
    return scores, result.loss, grads, max(trained.sizes[rank])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_with_inputs_give_the_reference_in_every_layout(shown, model_name, layout, world_size) -> None:
    data = make_batch()
    want_scores, want_loss, want_grads = reference(make_model(shown), data)
    config = policy_config(model_name, **LAYOUTS[layout])
    parts = run_ranks(on_rank, world_size, config, data)
    restore = shard_batch(data, world_size, logprob_strategy(config)).restore
    torch.testing.assert_close(restore([p[0] for p in parts]).double(), want_scores, rtol=0, atol=2e-5)
    assert sum(part[1] for part in parts) == pytest.approx(want_loss, abs=2e-6)
    grads = parts[0][2]
    assert grads.keys() == want_grads.keys()
    assert want_grads["model.sensor.weight"].abs().max() > 1e-3
    for name, want in want_grads.items():
        torch.testing.assert_close(grads[name].double(), want, rtol=2e-4, atol=2e-5 * want.abs().max().item(), msg=name)
    assert layout == "rounded" or max(part[3] for part in parts) > 1


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_rows_may_compute_their_own_positions(shown, model_name, layout) -> None:
    data = make_batch(rule=backwards)
    want_scores, want_loss, _ = reference(make_model(shown), data)
    plain_scores, _, _ = reference(make_model(shown), make_batch())
    assert (want_scores - plain_scores).abs().max() > 0.1
    config = policy_config(model_name, **LAYOUTS[layout])
    ((scores, loss, _, _),) = run_ranks(on_rank, 1, config, data)
    scores = shard_batch(data, 1, logprob_strategy(config)).restore([scores])
    torch.testing.assert_close(scores.double(), want_scores, rtol=0, atol=2e-5)
    assert loss == pytest.approx(want_loss, abs=2e-6)


def test_rows_that_fill_a_batch_up_bring_no_items(shown, model_name) -> None:
    data = make_batch(rows=5)
    want_scores, want_loss, want_grads = reference(make_model(shown), data)
    config = policy_config(model_name, **LAYOUTS["padded"])
    parts = run_ranks(on_rank, 2, config, data)
    assert sum(part[1] for part in parts) == pytest.approx(want_loss, abs=2e-6)
    want = want_grads["model.sensor.weight"]
    torch.testing.assert_close(parts[0][2]["model.sensor.weight"].double(), want, rtol=2e-4, atol=1e-6)
    scores = shard_batch(data, 2, logprob_strategy(config)).restore([part[0] for part in parts])
    torch.testing.assert_close(scores.double(), want_scores, rtol=0, atol=2e-5)


class TextEngine(HfEngine):
    """An engine that reads token ids only."""

    accepts_inputs = False


def engine_settings(model_name: str, backend: str = "hf") -> EngineSettings:
    make_char_tokenizer().save_pretrained(model_name)
    return EngineSettings(backend, model_name, model_name, "cpu", "float32", max_model_len=64)


def requests_of(rule=None) -> list[GenerationRequest]:
    """Prompts of different lengths with 2, 0 and 3 readings; the last one without further inputs."""
    gen = torch.Generator().manual_seed(9)
    made = []
    for count in (2, 0, 3):
        inputs = RowInputs({"readings": RowInput(torch.randn(count, 3, generator=gen))}, rule)
        made.append(GenerationRequest([30, *[SLOT] * count, 40 + count], GREEDY, 0, row_inputs=inputs))
    return [*made, GenerationRequest([31, 32, 33], GREEDY, 0)]


@torch.no_grad()
def continued(model, request: GenerationRequest) -> list[int]:
    """The likeliest continuation, one full forward pass a token, no cache and no batch."""
    ids = list(request.prompt_token_ids)
    for _ in range(request.sampling.max_new_tokens):
        further = {}
        if request.row_inputs is not None:
            further = {name: given.values for name, given in request.row_inputs.inputs.items()}
            if request.row_inputs.positions is not None:
                further["position_ids"] = request.row_inputs.positions(torch.tensor(ids), request.row_inputs)[None]
                further["attention_mask"] = torch.ones(1, len(ids), dtype=torch.long)
        ids.append(int(model(torch.tensor([ids]), use_cache=False, **further).logits[0, -1].argmax()))
    return ids[len(request.prompt_token_ids) :]


@pytest.mark.parametrize("rule", [None, every_second])
def test_the_hf_engine_samples_rows_with_inputs_next_to_others(shown, model_name, rule) -> None:
    engine, model, requests = HfEngine(engine_settings(model_name)), make_model(shown), requests_of(rule)

    async def answers():
        return await asyncio.gather(*(engine.generate(str(n), request) for n, request in enumerate(requests)))

    results = [result.token_ids.tolist() for result in asyncio.run(answers())]
    assert results == [continued(model, request) for request in requests]
    blind = [continued(model, replace(request, row_inputs=None)) for request in requests]
    assert results[0] != blind[0] and results[2] != blind[2], "the readings change what is said"


def test_a_text_engine_refuses_rows_with_inputs_and_answers_the_others(model_name, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    worker = GenerationWorker(engine_settings(model_name, f"{__name__}.TextEngine"))

    async def answers():
        await worker.submit([(str(n), request) for n, request in enumerate(requests_of())])
        got = {}
        while len(got) < 4:
            got |= dict((await asyncio.wait_for(worker.collect(), 20)).results)
        return got

    results = asyncio.run(answers())
    assert len(results["3"].token_ids) == 8
    for name in "012":
        assert f"A row has readings (float32 [n, 3]), but policy.generation.backend={__name__}.TextEngine accepts " in (
            results[name].error
        )


def test_an_engine_refuses_inputs_that_its_model_does_not_name(tmp_path) -> None:
    engine = HfEngine(engine_settings(save_tiny_model(tmp_path / "text")))
    with pytest.raises(GenerationError, match=r"inputs readings, but Qwen2Model.forward has no such parameters"):
        engine.add_request("0", requests_of()[0])


def test_a_backend_refuses_inputs_that_its_model_does_not_name(tmp_path) -> None:
    config = policy_config(save_tiny_model(tmp_path / "text"))
    with process_group(), pytest.raises(ConfigError, match=r"inputs readings, but Qwen2Model.forward has no such"):
        worker = PolicyWorker(DTensorBackend(config, CPU), config)
        worker.get_logprobs(make_batch().slice(0, 1), [1])


class Rows(list):
    """A data set, as a part of the data of a run."""

    parts = property(lambda self: [self])


READINGS = RowInputs({"readings": RowInput(torch.zeros(2, 3))})
DATA = RunData(train=Rows([{}]), validation=Rows([{"row_inputs": READINGS}]), bad_rows=[])
OFF = {"dtensor_cfg": {"enabled": False}}


@pytest.mark.parametrize(
    ("values", "reader"),
    [
        (OFF | {"megatron_cfg": {"enabled": True}}, r"policy.megatron_cfg \(Megatron Core\)"),
        ({"dtensor_cfg": {"pipeline_parallel_size": 2}}, "policy.dtensor_cfg with pipeline_parallel_size=2"),
        ({"dtensor_cfg": {"context_parallel_size": 2}}, "policy.dtensor_cfg with context_parallel_size=2"),
        ({"generation": {"backend": "vllm"}}, "policy.generation.backend=vllm"),
        ({"generation": {"backend": "megatron"}}, "policy.generation.backend=megatron"),
    ],
)
def test_rows_with_inputs_are_refused_by_name_before_anything_starts(values, reader) -> None:
    refused = f"A row has readings .float32 .n, 3.., but {reader} accepts token ids only.*policy.dtensor_cfg without"
    with pytest.raises(ConfigError, match=refused):
        check_rows([policy_config("unused", **values)], DATA, sampled=True)


def test_rows_with_inputs_are_accepted_by_those_that_the_message_names() -> None:
    check_rows([policy_config("unused", generation={"backend": "hf"})], DATA, sampled=True)
    check_rows([policy_config("unused", generation={"backend": "vllm"})], DATA, sampled=False)
    accepted = [name for name, kind in ENGINES.items() if kind.accepts_inputs]
    assert accepted == ["hf"] and HfEngine.accepts_inputs
    assert all(f"policy.generation.backend={name}" in WHO_ACCEPTS for name in accepted)


def test_a_teacher_has_to_accept_the_rows_too() -> None:
    student = policy_config("unused", generation={"backend": "hf"})
    teacher = policy_config("unused", **OFF, megatron_cfg={"enabled": True})
    with pytest.raises(ConfigError, match="Megatron Core"):
        check_rows([student, teacher], DATA, sampled=True)
