"""Losses made of a function of tokens: value, gradient, alignment, invariance, and pickling for a worker."""

import sys
import types

import pytest
import torch
from loss_batches import denominators, random_batch
from ray import cloudpickle

import nemo_rl
from nemo_rl.losses.loss_function import LossInputType, LossType, TokenLoss, token_loss
from nemo_rl.losses.supervised import NLLLossFn
from nemo_rl.models.policy.rank_calls import make_portable

pytestmark = pytest.mark.fast


def weighted_batch() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs, data = random_batch(6, 7, masked_rows=[1])
    data["weight"] = torch.rand(6, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return logprobs, data


@token_loss
def focal(logprobs, data):
    """Focal loss."""
    return -((1 - logprobs.exp()) ** 2) * logprobs


def test_value_and_gradient_equal_a_hand_computed_case() -> None:
    logprobs, data = weighted_batch()
    logprobs.requires_grad_(True)
    loss, metrics = focal(logprobs, data, **denominators(data))
    loss.backward()
    total, gradient = 0.0, torch.zeros_like(logprobs)
    num_tokens = float(denominators(data)["global_valid_toks"])
    for b in range(6):
        for t in range(6):
            if data["sample_mask"][b] and data["token_mask"][b, t + 1]:
                x = logprobs[b, t].item()
                p = float(torch.tensor(x, dtype=torch.float64).exp())
                total -= (1 - p) ** 2 * x / num_tokens
                gradient[b, t] = (2 * (1 - p) * p * x - (1 - p) ** 2) / num_tokens
    assert loss.item() == pytest.approx(total, abs=1e-12)
    torch.testing.assert_close(logprobs.grad, gradient, rtol=0, atol=1e-12)
    plain, _ = NLLLossFn()(logprobs.detach(), data, **denominators(data))
    assert metrics["nll"].item() == pytest.approx(plain.item(), abs=1e-12)


def test_token_values_are_aligned_with_their_log_probs() -> None:
    logprobs, data = weighted_batch()
    weighted = token_loss(lambda logprobs, data: -data["weight"] * logprobs)
    loss, _ = weighted(logprobs, data, **denominators(data))
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    want = -(logprobs * data["weight"][:, 1:] * mask).sum() / mask.sum()
    assert loss.item() == pytest.approx(want.item(), abs=1e-12)


@pytest.mark.parametrize("loss_fn", [focal, token_loss(lambda logprobs, data: -data["weight"] * logprobs)])
def test_the_loss_does_not_depend_on_the_batch_split(loss_fn: TokenLoss) -> None:
    nemo_rl.check_invariance(loss_fn, *weighted_batch())


def test_a_sum_over_tokens_is_refused() -> None:
    logprobs, data = weighted_batch()
    with pytest.raises(ValueError, match=r"<lambda> returned shape \(\); a token loss returns one value for each"):
        token_loss(lambda logprobs, data: -logprobs.sum())(logprobs, data, **denominators(data))


def test_the_loss_declares_the_inputs_that_it_needs() -> None:
    assert (focal.loss_type, focal.input_type) == (LossType.TOKEN_LEVEL, LossInputType.LOGPROB)
    assert (focal.rows_per_unit, focal.needs_reference) == (1, False)
    assert TokenLoss(focal.per_token, needs_reference=True).needs_reference
    assert (focal.__name__, focal.__doc__) == ("focal", "Focal loss.")


def test_a_function_of_a_users_file_is_pickled_by_value(tmp_path, monkeypatch) -> None:
    """The worker cannot import the file; neither can this process when it reads the loss back."""
    path = tmp_path / "my_losses.py"
    source = "import nemo_rl\nSCALE = 3\n@nemo_rl.token_loss\ndef mine(logprobs, data):\n    return -SCALE * logprobs\n"
    path.write_text(source)
    module = types.ModuleType("my_losses")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "my_losses", module)
    exec(compile(source, str(path), "exec"), module.__dict__)
    make_portable(module.mine)
    sent = cloudpickle.dumps(module.mine)
    monkeypatch.delitem(sys.modules, "my_losses")
    logprobs, data = weighted_batch()
    received = cloudpickle.loads(sent)
    loss, metrics = received(logprobs, data, **denominators(data))
    assert loss.item() == pytest.approx(3 * metrics["nll"].item())
