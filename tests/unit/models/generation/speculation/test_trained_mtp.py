"""A vLLM engine on the CPU that proposes with the policy's layers for multi-token prediction, sent in syncs."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from engine_process import EngineProcess
from generation_helpers import ask, greedy_reference, make_settings, mixture_config, save_model, spread_out, streamed
from mtp_models import WithMTP
from speculating import SPEC, VOCABULARY, check_seeds, chi_square, counts, exact_probabilities
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_rl.models.generation.engine_load import load_metrics
from nemo_rl.models.generation.interfaces import SamplingParams
from nemo_rl.utils.seed import derive_seed
from nemo_rl.weight_sync.endpoints import WeightSender
from nemo_rl.weight_sync.parts import WholeWeights

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra cpu or vllm"),
]

ONE, TWO, FILES = "one proposal", "two proposals", "one proposal, from files"
COUNTS = {ONE: 1, TWO: 2, FILES: 1}
LENGTH = 40
PROMPTS = [[1, 2, 3, 1, 2, 5], [3], [(3 * i) % VOCABULARY for i in range(70)]]


def mixture(seed: int) -> PreTrainedModel:
    config = mixture_config("deepseek_v3")
    config.update({"vocab_size": VOCABULARY, "eos_token_id": VOCABULARY - 1, "pad_token_id": 0})
    torch.manual_seed(seed)
    model = spread_out(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed)
    model.set_experts_implementation("eager")
    return model


def fitted(seed: int, steps: int) -> WithMTP:
    """Draw a model, and fit its further layer to the model's answers, so that some proposals are accepted."""
    model = WithMTP(mixture(seed), seed=seed)
    optimizer = torch.optim.AdamW(model.depths.parameters(), lr=3e-3)
    texts = [torch.tensor([*prompt, *greedy_reference(model.hf, prompt, LENGTH)]) for prompt in PROMPTS]
    for step in range(steps):
        ids = texts[step % len(texts)]
        loss = torch.nn.functional.cross_entropy(further_logits(model, ids)[:-1], ids[2:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def further_logits(model: WithMTP, ids: Tensor) -> Tensor:
    """Return the logits `[T - 1, V]` of the token after the next one, as vLLM computes them.

    vLLM reads zeros in place of the first embedding.
    """
    with torch.no_grad():
        hidden = model.hf.model(input_ids=ids[None], use_cache=False).last_hidden_state[:, :-1]
        embeds = model.hf.model.embed_tokens(ids[None, 1:]).clone()
        embeds[:, 0] = 0
        rotary = model.hf.model.rotary_emb(embeds, torch.arange(len(ids) - 1)[None])
    logits: Tensor = model.hf.lm_head(model.depths[0](embeds, hidden, rotary)[0])
    return logits


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("models") / "target"
    folder.mkdir()
    model = fitted(3, steps=60)
    save_model(folder, model.hf)
    model.save_pretrained(folder)
    settings = {
        name: make_settings(
            folder,
            "vllm",
            engine_kwargs={"speculative_config": {"method": "mtp", "num_speculative_tokens": count}},
            trains_mtp=name != FILES,
            load_weights=name == FILES,
        )
        for name, count in COUNTS.items()
    }
    with EngineProcess(settings) as process:
        yield process


def deploy(
    engines: EngineProcess, sender: WeightSender, name: str, seed: int, without: str = "nothing"
) -> tuple[WithMTP, list[str]]:
    """Sync a model of this seed; return it, and the parameters that got no tensor."""
    model = fitted(seed, steps=30 * (seed - 1))
    tensors = dict(streamed(model.hf)) | model.hub_tensors(model.state_dict(), copies=False)
    sent = {key: tensor.detach() for key, tensor in tensors.items() if without not in key}
    return model, engines.sync(name, sender, SPEC, WholeWeights(sent.items), seed)


def acceptance(engines: EngineProcess, name: str, model: WithMTP) -> float:
    """Compare answers and counts of proposals with the model's; return the share of proposals that are accepted."""
    engines.loads.clear()
    want = [0, 0]
    for prompt in PROMPTS:
        (result,) = engines.generate(name, [ask(prompt, temperature=0.0, max_new_tokens=LENGTH)])
        response = result.token_ids.tolist()
        assert response == greedy_reference(model.hf, prompt, LENGTH)
        with torch.no_grad():
            proposals = further_logits(model, torch.tensor([*prompt, *response])).argmax(-1)
        proposed, accepted = counts(proposals, prompt, response)
        want = [want[0] + proposed, want[1] + accepted]
    metrics = load_metrics([load for load in engines.loads[name] if load is not None])
    assert metrics["spec_proposed_tokens"] == want[0]
    assert metrics["spec_acceptance_rate"] == pytest.approx(want[1] / want[0])
    return want[1] / want[0]


def test_the_engine_proposes_what_the_trained_layer_predicts(engines, sender) -> None:
    rates = []
    for seed in (1, 3):  # the first one is not fitted
        model, unbound = deploy(engines, sender, ONE, seed)
        assert unbound == []
        rates.append(acceptance(engines, ONE, model))
    assert rates[0] < rates[1] - 0.1 and rates[1] > 0.3, rates


def test_layers_that_are_not_trained_stay_as_their_files_have_them(engines, sender) -> None:
    model = fitted(3, steps=60)
    rate = acceptance(engines, FILES, model)
    assert rate > 0.3
    other = mixture(4)
    assert engines.sync(FILES, sender, SPEC, WholeWeights(streamed(other).items), 1) == []
    mixed = WithMTP(other)
    mixed.depths = model.depths
    assert acceptance(engines, FILES, mixed) < rate


def test_two_proposals_of_one_layer_give_the_same_answers(engines, sender) -> None:
    model, unbound = deploy(engines, sender, TWO, seed=3)
    assert unbound == []
    for prompt in PROMPTS:
        (result,) = engines.generate(TWO, [ask(prompt, temperature=0.0, max_new_tokens=LENGTH)])
        assert result.token_ids.tolist() == greedy_reference(model.hf, prompt, LENGTH)


@pytest.mark.long
def test_a_seed_fixes_the_response_whatever_else_runs(engines, sender) -> None:
    deploy(engines, sender, TWO, seed=3)
    check_seeds(engines, TWO, PROMPTS, same_bits=False)


@pytest.mark.long
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 5, "top_p": 0.8}], ids=["plain", "filtered"])
def test_responses_have_the_probabilities_of_the_model(engines, sender, sampling) -> None:
    model, _ = deploy(engines, sender, TWO, seed=3)
    requests = [
        ask(PROMPTS[0], seed=derive_seed(0, "mtp", i), max_new_tokens=4, **{"temperature": 1.0} | sampling)
        for i in range(1200)
    ]
    engines.loads.clear()
    results = engines.generate(TWO, requests)
    metrics = load_metrics([load for load in engines.loads[TWO] if load is not None])
    assert metrics["spec_acceptance_rate"] > 0.02 and metrics["spec_proposed_tokens"] > 1000
    exact = exact_probabilities(model.hf, PROMPTS[0], 4, SamplingParams(**{"temperature": 1.0} | sampling))
    assert chi_square(results, exact, 4) > 1e-4
    hotter = exact_probabilities(model.hf, PROMPTS[0], 4, SamplingParams(temperature=1.2))
    assert chi_square(results, hotter, 4) < 1e-4, "the test would not notice another temperature"


def test_a_tensor_of_the_layer_that_does_not_arrive_is_named(engines, sender) -> None:
    _, unbound = deploy(engines, sender, ONE, seed=1, without="layers.2.eh_proj")
    assert unbound == ["draft.model.layers.2.eh_proj.weight"]
    assert deploy(engines, sender, ONE, seed=1)[1] == []
