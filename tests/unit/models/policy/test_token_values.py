"""Values of tokens: the scalar head before every token, in every layout, against Hugging Face prefix by prefix."""

from typing import Any

import pytest
import torch
from critic_cases import SquaredError, critic, critic_batch, hf_values, reference, relative, save_critic
from layout_cases import CPU, LAYOUTS, train_once
from policy_helpers import WeightedNLL, policy_config, process_group, save_tiny_model, tiny_model
from transformers import AutoModelForCausalLM

from nemo_rl.distributed.parallel_logprobs import initial_head, scalar_outputs
from nemo_rl.losses.preference import PreferenceLossFn
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.heads import RewardModel
from nemo_rl.models.dtensor.proof.numbers import in_float64
from nemo_rl.models.huggingface.load import load_scoring_model
from nemo_rl.models.policy.batching import logprob_strategy, scoring_rows, shard_batch
from nemo_rl.models.policy.workers.loss_calls import check_loss, something_counts
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.inputs import InputLayout, build_training_inputs
from nemo_rl.models.training.interfaces import CheckpointPaths
from nemo_rl.utils.errors import ConfigError

CRITIC = {"reward_model_cfg": {"enabled": True}}
DATA = critic_batch()


def values_of(worker: PolicyWorker, config: Any, data: Any = DATA) -> torch.Tensor:
    batch = shard_batch(data, 1, logprob_strategy(config), shares_prompts=worker.shares_prompts())
    return batch.restore([worker.get_values(batch.data[0], batch.sizes[0])])


@pytest.mark.parametrize("arch", ["qwen3", "gemma3"])
def test_values_and_gradients_equal_hugging_face_in_every_layout(arch, tmp_path) -> None:
    name = save_critic(tmp_path / "m", tiny_model(arch))
    want = reference(critic(tiny_model(arch)), DATA)
    assert want["values"].abs().max() > 0.5
    for layout, values in LAYOUTS.items():
        config = policy_config(name, **CRITIC, **values)
        with process_group():
            worker = PolicyWorker(DTensorBackend(config, CPU, init_optimizer=False), config)
            got = values_of(worker, config)
        assert worker.shares_prompts() == (layout == "packed") or arch != "qwen3"
        assert got.dtype == torch.float32 and got.shape == DATA["input_ids"].shape
        torch.testing.assert_close(got.double(), want["values"], rtol=0, atol=1e-5, msg=layout)
        result, gradients = train_once(config, SquaredError(), DATA)
        assert result.loss == pytest.approx(want["loss"], rel=1e-5), layout
        assert result.metrics["value"] == pytest.approx(float(want["metrics"]["value"]), abs=1e-5), layout
        assert gradients.keys() == want["gradients"].keys()
        for key, gradient in gradients.items():
            assert relative(gradient, want["gradients"][key]) < 1e-5, (layout, key)


def test_the_gradient_equals_finite_differences() -> None:
    """Along a random direction of all weights, in float64, where norms would compute in float32."""
    model = RewardModel(critic(tiny_model("qwen2")).double().eval())
    inputs = build_training_inputs(DATA, InputLayout(packed=False), CPU)
    weights, gen = list(model.parameters()), torch.Generator().manual_seed(4)
    direction = [torch.randn(weight.shape, generator=gen, dtype=torch.float64) for weight in weights]

    def loss() -> torch.Tensor:
        with in_float64():
            values_K, _ = model(inputs.model_inputs, inputs.positions_K, inputs.targets_K)
        assert values_K.dtype == torch.float64
        return SquaredError()(inputs.scatter(values_K), DATA, None, 100.0)[0]

    @torch.no_grad()
    def loss_after(step: float) -> float:
        for weight, way in zip(weights, direction, strict=True):
            weight.add_(step * way)
        return loss().item()

    loss().backward()
    slope = sum(float((weight.grad * way).sum()) for weight, way in zip(weights, direction, strict=True))
    step = 1e-7
    ends = [loss_after(step), loss_after(-2 * step)]
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=1e-6) and abs(slope) > 0.1


def test_values_are_in_float32_whatever_the_weights() -> None:
    """A product in bfloat16 would round each value to 8 bits."""
    gen = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 64, generator=gen).bfloat16() for rows in (50, 1))
    values = scalar_outputs(hidden, weight, torch.ones(1, dtype=torch.bfloat16))
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), (hidden.double() @ weight.double().t())[:, 0] + 1, rtol=0, atol=1e-5)
    assert (values != values.bfloat16().float()).sum() > 40
    wide = scalar_outputs(hidden.double(), weight.double())
    assert wide.dtype == torch.float64


def test_a_model_in_bfloat16_gives_values_that_are_not_rounded_to_it(tmp_path) -> None:
    name = save_critic(tmp_path / "m", tiny_model("qwen3"))
    config = policy_config(name, precision="bfloat16", **CRITIC)
    with process_group():
        got = values_of(PolicyWorker(DTensorBackend(config, CPU, init_optimizer=False), config), config)
    want = hf_values(critic(tiny_model("qwen3")).double(), DATA)
    real = want != 0
    assert (got[real] != got[real].bfloat16().float()).float().mean() > 0.9
    assert relative(got, want) < 0.1


def _head(name: str, seed: int = 0) -> torch.Tensor:
    config = policy_config(name, **CRITIC)
    with process_group():
        torch.manual_seed(17)
        backend = DTensorBackend(config, CPU, init_optimizer=False, init_reference_model=False, seed=seed)
    return backend.model.hf.get_parameter("score.weight").detach().clone()


def test_a_new_head_is_small_and_follows_from_the_seed(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m")
    heads = [_head(name, seed) for seed in (1, 1, 2)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert torch.equal(heads[0], initial_head(64, 1)) and torch.equal(
        heads[0], load_scoring_model(name, seed=1).score.weight
    )
    assert initial_head(4096, 0).std() == pytest.approx(1 / 4097, rel=0.05)
    values = hf_values(load_scoring_model(name), DATA)
    assert 0 < values.abs().max() < 0.6


def test_a_model_without_a_padding_token_gets_a_head(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", "llama", pad_token_id=None)
    assert torch.equal(_head(name), initial_head(64, 0))


def test_the_head_of_a_reward_model_is_kept(tmp_path) -> None:
    model = critic(tiny_model("qwen3"))
    model.save_pretrained(tmp_path / "m")
    assert torch.equal(_head(str(tmp_path / "m")), model.get_parameter("score.weight"))


def test_a_saved_critic_continues_bit_for_bit_and_loads_in_hugging_face(tmp_path) -> None:
    name = save_tiny_model(tmp_path / "m", "qwen3", tie=True)
    config = policy_config(name, **CRITIC, **LAYOUTS["packed"])
    first, second = CheckpointPaths(tmp_path / "1", tmp_path / "o"), CheckpointPaths(tmp_path / "2")

    def update(worker: PolicyWorker) -> torch.Tensor:
        worker.train(DATA, [4, 4], SquaredError(), (8.0, 100.0))
        return values_of(worker, config)

    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU, init_reference_model=False), config)
        before = values_of(worker, config)
        after = update(worker)
        worker.backend.save(first)
        expected = update(worker)
        worker.backend.save(second)
    with process_group():
        worker = PolicyWorker(DTensorBackend(config, CPU, init_reference_model=False, seed=9), config)
        worker.backend.load(first)
        assert torch.equal(values_of(worker, config), after)
        assert torch.equal(update(worker), expected)
    assert (after - before).abs().max() > 1e-3
    exported = load_scoring_model(str(tmp_path / "2/model"))
    torch.testing.assert_close(hf_values(exported, DATA), expected, rtol=0, atol=1e-5)
    body = AutoModelForCausalLM.from_pretrained(name).model.state_dict()
    assert body.keys() == exported.model.state_dict().keys()


def test_a_scalar_head_trains_on_pairs_and_on_values_only() -> None:
    config = policy_config("m", **CRITIC)
    check_loss(SquaredError(), config)
    check_loss(PreferenceLossFn(), config)
    with pytest.raises(ConfigError, match=r"wants .*LOGPROB as input; .*LOGIT and .*VALUE only"):
        check_loss(WeightedNLL(), config)
    with pytest.raises(ConfigError, match="SquaredError wants .*VALUE as input"):
        check_loss(SquaredError(), policy_config("m"))
    assert not something_counts((4.0, 0.0), SquaredError()) and something_counts((4.0, 1.0), SquaredError())


@pytest.mark.parametrize("method", ["get_values", "score"])
def test_methods_of_the_other_head_are_refused(method) -> None:
    with pytest.raises(ConfigError, match=f"Policy.{method} needs a scalar head"):
        scoring_rows(method, DATA, policy_config("m"))
    with pytest.raises(ConfigError, match="get_logprobs needs a language model.* Policy.get_values one for each token"):
        scoring_rows("get_logprobs", DATA, policy_config("m", **CRITIC))
    rows = scoring_rows(method, DATA, policy_config("m", **CRITIC))
    assert set(rows) == {"input_ids", "input_lengths"}
