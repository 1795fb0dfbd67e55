"""A vLLM engine on the CPU whose draft model gets its weights in syncs: what it proposes is what the trainer holds."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_cases import hidden_states
from engine_process import EngineProcess
from generation_helpers import ask, greedy_reference, make_settings, save_model, streamed
from speculating import SPEC, VOCABULARY, counts, llama
from torch import Tensor
from transformers import PreTrainedModel

from nemo_rl.models.attention import plan_of_row
from nemo_rl.models.draft.head import DraftHead
from nemo_rl.models.draft.shape import PREFIX, DraftShape, published
from nemo_rl.models.generation.engine_load import load_metrics
from nemo_rl.utils.errors import GenerationError
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.parts import WholeWeights

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

ONE, TWO, FEW = "one layer", "two layers", "few tokens"
SHAPES = {
    ONE: DraftShape.for_model(llama().config, 1, (1, 2, 4)),
    TWO: replace(DraftShape.for_model(llama().config, 2, (0, 3)), rope_theta=50.0, norm_before_residual=True),
    FEW: replace(DraftShape.for_model(llama().config, 1, (1, 2, 4)), draft_vocab_size=5),
}
FEW_IDS = torch.tensor([0, 2, 3, 4, 6])
"""Tokens that the draft model of this kind can propose."""
LENGTH = 40
PROMPTS = [[1, 2, 3, 1, 2, 5], [3], [(3 * i) % VOCABULARY for i in range(70)]]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("models") / "target"
    folder.mkdir()
    save_model(folder, llama())
    section = {"method": "eagle3", "num_speculative_tokens": 1}
    settings = {
        kind: make_settings(folder, "vllm", engine_kwargs={"speculative_config": section}, draft=shape)
        for kind, shape in SHAPES.items()
    }
    with EngineProcess(settings) as process:
        yield process


def fitted_head(kind: str, model: PreTrainedModel, seed: int, steps: int) -> DraftHead:
    """Draw a draft model and fit it to answers of the model, so that some of its proposals are accepted."""
    head = DraftHead(SHAPES[kind])
    head.draw(torch.Generator().manual_seed(seed), std=0.15)
    if head.d2t is not None:
        head.d2t.copy_(FEW_IDS - torch.arange(len(FEW_IDS)))
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    texts = [[*prompt, *greedy_reference(model, prompt, LENGTH)] for prompt in PROMPTS]
    for step in range(steps):
        ids = torch.tensor([texts[step % len(texts)]])
        _, logits = hidden_states(model, ids)
        loss = torch.nn.functional.cross_entropy(draft_logits(model, head, ids), logits[1:].softmax(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head


def draft_logits(model: PreTrainedModel, head: DraftHead, ids: Tensor) -> Tensor:
    """Return the draft model's logits after each token of a row `[1, T]` but the first, over all tokens."""
    hidden, _ = hidden_states(model, ids)
    tapped = torch.cat([hidden[number] for number in head.shape.tapped_layers], -1)[None, :-1]
    count = ids.shape[1] - 1
    out = head(tapped, hidden[0][None, 1:], torch.arange(count)[None], plan_of_row(count), torch.arange(count))
    logits: Tensor = head.lm_head(out)
    ids_U = head.target_ids()
    return logits if ids_U is None else torch.full((count, VOCABULARY), -1e4).index_copy(1, ids_U, logits)


def deploy(
    engines: EngineProcess, sender: WeightSender, kind: str, seed: int, without: str = "nothing"
) -> tuple[PreTrainedModel, DraftHead, list[str]]:
    """Sync a model and a draft model of this seed; return them, and the parameters that got no tensor."""
    model = llama(seed)
    head = fitted_head(kind, model, seed, steps=30 * (seed - 1))
    tensors = dict(streamed(model))
    layers = head.shape.num_layers
    tensors |= {PREFIX + published(name, layers): tensor.detach() for name, tensor in head.state_dict().items()}
    sent = {name: tensor for name, tensor in tensors.items() if without not in name}
    return model, head, engines.sync(kind, sender, SPEC, WholeWeights(sent.items), seed)


@torch.no_grad()
def proposals(model: PreTrainedModel, head: DraftHead, token_ids: Sequence[int]) -> Tensor:
    """Return the most likely token of the draft model after each token but the first."""
    return draft_logits(model, head, torch.tensor([token_ids])).argmax(-1)


@pytest.mark.parametrize("kind", SHAPES)
def test_the_engine_proposes_what_the_trainer_would(engines, sender, kind) -> None:
    rates = []
    for seed in (1, 3):  # the first one is not fitted
        model, head, unbound = deploy(engines, sender, kind, seed)
        assert unbound == []
        engines.loads.clear()
        want = [0, 0]
        for prompt in PROMPTS:
            (result,) = engines.generate(kind, [ask(prompt, temperature=0.0, max_new_tokens=LENGTH)])
            response = result.token_ids.tolist()
            assert response == greedy_reference(model, prompt, LENGTH)
            proposed, accepted = counts(proposals(model, head, [*prompt, *response]), prompt, response)
            want = [want[0] + proposed, want[1] + accepted]
        metrics = load_metrics([load for load in engines.loads[kind] if load is not None])
        assert metrics["spec_proposed_tokens"] == want[0]
        rates.append(want[1] / want[0])
        assert metrics["spec_acceptance_rate"] == pytest.approx(rates[-1])
    assert rates[0] < rates[1] - 0.1 and rates[1] > 0.3, rates


def test_a_tensor_of_the_draft_model_that_does_not_arrive_is_named(engines, sender) -> None:
    _, _, unbound = deploy(engines, sender, ONE, seed=3, without="midlayer.self_attn.k_proj")
    assert unbound == ["part of draft.model.layers.0.self_attn.qkv_proj"]
    assert deploy(engines, sender, ONE, seed=3)[2] == []


def module(marked: bool, seed: int) -> torch.nn.Module:
    """Build a model with an embedding and an output head, as vLLM's models name them; all of a seed are equal."""
    torch.manual_seed(seed)
    inner = torch.nn.Module()
    inner.embed_tokens = torch.nn.Embedding(5, 3)
    whole = torch.nn.Module()
    whole.model, whole.lm_head = inner, torch.nn.Linear(3, 5, bias=False)
    whole.config = SimpleNamespace(trained_with_policy=True) if marked else SimpleNamespace()
    return whole


def of_second_runner(draft: torch.nn.Module | None, **marks: object) -> Any:
    """Return a worker with the model runner that vLLM takes where Triton is installed, with real methods."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
    from vllm.v1.worker.gpu_worker import Worker

    runner, worker = object.__new__(GPUModelRunner), object.__new__(Worker)
    runner.speculator = None
    if draft is not None:
        runner.speculator = object.__new__(EagleSpeculator)
        runner.speculator.model = draft
    of_draft = SimpleNamespace(hf_config=SimpleNamespace(**marks))
    worker.model_runner = runner
    worker.vllm_config = SimpleNamespace(
        additional_config={}, speculative_config=SimpleNamespace(draft_model_config=of_draft)
    )
    return worker


def test_the_draft_model_of_the_second_runner_is_found() -> None:
    from nemo_rl.models.generation.vllm.drafting import TRAINED_LAYERS, trained_draft

    draft = module(marked=True, seed=1)
    assert trained_draft(of_second_runner(draft, trained_with_policy=True)) is draft
    assert trained_draft(of_second_runner(module(marked=False, seed=1))) is None
    assert trained_draft(of_second_runner(None)) is None
    layers = of_second_runner(draft)  # those of the policy, for multi-token prediction
    layers.vllm_config.additional_config = TRAINED_LAYERS
    assert trained_draft(layers) is draft


def test_a_trained_draft_model_that_vllm_does_not_give_is_an_error(monkeypatch) -> None:
    """Its weights would never arrive, and nothing else would tell."""
    from nemo_rl.models.generation.vllm import drafting

    worker = of_second_runner(None, trained_with_policy=True)
    monkeypatch.setattr(drafting, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    with pytest.raises(GenerationError, match="vllm.v1.worker.gpu.model_runner.GPUModelRunner gives none"):
        drafting.trained_draft(worker)
    monkeypatch.setattr(drafting, "get_pp_group", lambda: SimpleNamespace(is_last_rank=False))
    assert drafting.trained_draft(worker) is None


@pytest.mark.parametrize("flags", [{}, {"has_own_lm_head": True, "has_own_embed_tokens": True}])
@pytest.mark.parametrize(("marked", "seed"), [(True, 1), (True, 2), (False, 1)])
def test_the_second_runner_lets_a_trained_draft_model_keep_its_head_only(monkeypatch, flags, marked, seed) -> None:
    """Seed 1 draws the weights of the policy's model: weights that no file has are all equal before the first sync."""
    from vllm.v1.worker.gpu.spec_decode.eagle import utils

    from nemo_rl.models.generation.vllm.drafting import keep_own_heads

    policy, draft = module(marked=False, seed=1), module(marked, seed)
    for name, value in flags.items():
        setattr(draft, name, value)
    own = draft.lm_head
    config = SimpleNamespace(load_config=None)
    config.speculative_config = SimpleNamespace(
        draft_model_config=None, apply_draft_overrides=lambda given: given, method="eagle3"
    )
    monkeypatch.setattr(utils, "get_draft_load_config", lambda given: None)
    monkeypatch.setattr(utils, "get_pp_safe_draft_load_config", lambda given: None)
    monkeypatch.setattr(utils, "get_pp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(utils, "get_model", lambda **_: draft)
    keep_own_heads()
    keep_own_heads()
    assert utils.load_eagle_model(policy, config) is draft
    assert (draft.lm_head is own) == marked
    assert draft.model.embed_tokens is policy.model.embed_tokens
