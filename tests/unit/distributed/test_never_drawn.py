"""Tokens that the sampler never draws: log-probabilities, entropies and gradients without them."""

import pytest
import torch

from nemo_rl.distributed.parallel_logprobs import SamplingDensity, token_logprobs

pytestmark = pytest.mark.fast

NEVER = (3, 5)


def expected(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log-softmax over the tokens that may be drawn and the target, which was drawn in any case."""
    logits = hidden @ weight.t() / temperature
    banned = torch.zeros_like(logits, dtype=torch.bool)
    banned[:, list(NEVER)] = True
    banned.scatter_(1, targets[:, None], False)
    return logits.masked_fill(banned, -torch.inf).log_softmax(-1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_distribution_has_no_tokens_that_are_never_drawn(temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(size, 6, generator=generator, dtype=torch.float64) for size in (7, 11))
    targets = torch.tensor([0, 3, 1, 5, 10, 4, 2])  # 3 and 5 are placeholders of a prompt
    given = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    reference = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    density = SamplingDensity(temperature, never=NEVER)
    logprobs, entropy = token_logprobs(*given, targets, density=density, chunk_size=3)
    wanted = expected(*reference, targets, temperature)
    torch.testing.assert_close(logprobs, wanted)
    assert entropy.isfinite().all()
    factors = torch.linspace(-1, 2, 7, dtype=torch.float64)
    (logprobs * factors).sum().backward()
    (wanted * factors).sum().backward()
    for ours, theirs in zip(given, reference, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_filters_come_after_the_tokens_that_are_never_drawn() -> None:
    hidden = torch.eye(4, dtype=torch.float64)[:1]
    weight = torch.tensor([[1.0], [9.0], [2.0], [3.0]], dtype=torch.float64) * hidden
    logprobs, _ = token_logprobs(hidden, weight, torch.tensor([3]), density=SamplingDensity(1.0, 2, never=(1,)))
    torch.testing.assert_close(logprobs, torch.tensor([2.0, 3.0], dtype=torch.float64).log_softmax(0)[1:])
