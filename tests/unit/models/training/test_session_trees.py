"""Rows of a session share answers, also trained ones: loss and gradients are those of separate rows, in float64."""

from typing import Any

import pytest
import torch
from policy_helpers import VOCAB, hf_logprobs, hf_logprobs_with_grad, policy_config, process_group, tiny_model

from nemo_rl.agents.endpoint.call_tree import Call, CallTree
from nemo_rl.agents.endpoint.player import record
from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.config import ClippedPGLossConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.runners.stored import located, split
from nemo_rl.experience.trajectory import Rollouts, Trajectory
from nemo_rl.losses.policy_gradient import ClippedPGLossFn
from nemo_rl.models.attention.registered import register_varlen_attention
from nemo_rl.models.dtensor.backend import DTensorBackend
from nemo_rl.models.dtensor.build import Built
from nemo_rl.models.dtensor.checkpoints.lazy_weights import LazyWeights
from nemo_rl.models.dtensor.heads import build_causal_lm
from nemo_rl.models.policy.batching import count_valid, logprob_strategy, shard_batch, training_strategy
from nemo_rl.models.policy.workers.rank import PolicyWorker
from nemo_rl.models.training.shared_prefixes import spread

CPU = torch.device("cpu")
LOSSES: dict[str, dict[str, Any]] = {
    "clipped": {},
    "with a reference": {"reference_policy_kl_penalty": 0.1},
    "mean of each row": {"token_level_loss": False},
}


def ids(seed: int, count: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def tree_batch() -> BatchedDataDict[Any]:
    """Make rows of a tree, in which every row trains all of its answers, with an advantage and old scores of its own.

    Two rows share a prompt and two answers, a third one the prompt and the first answer, the fourth one the system
    prompt only. The fifth row is equal to the first one, and the last one is the beginning of the first one.
    """
    system, prompt, first, tool, second = ids(0, 12), ids(1, 9), ids(2, 15), ids(3, 3), ids(4, 11)
    paths = [
        [system, prompt, first, tool, second, ids(5, 4)],
        [system, prompt, first, tool, second, ids(6, 7)],
        [system, prompt, first, ids(7, 9)],
        [system, ids(8, 10), ids(9, 8)],
        [system, prompt, first, tool, second, ids(5, 4)],
        [system, prompt, first],
    ]
    rows = [torch.cat(path) for path in paths]
    width, lengths = max(map(len, rows)), torch.tensor([len(row) for row in rows])
    generator = torch.Generator().manual_seed(10)
    written = torch.stack([torch.arange(width) >= 21 for _ in rows])
    written[:, 36:39] = False
    mask = written & (torch.arange(width)[None] < lengths[:, None])
    noise = [torch.rand(len(rows), width, generator=generator, dtype=torch.float64) for _ in range(4)]
    return BatchedDataDict(
        {
            "input_ids": torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows]),
            "input_lengths": lengths,
            "token_mask": mask.double(),
            "sample_mask": torch.ones(len(rows), dtype=torch.float64),
            "advantages": noise[0] * 4 - 2,
            "noise": noise[1] - 0.5,
            "generation_logprobs": -noise[2] - 3,
            "reference_policy_logprobs": -noise[3] - 3,
        }
    )


def worker_of(config: Any, arch: str) -> PolicyWorker:
    model: Any = tiny_model(arch).double()
    return PolicyWorker(DTensorBackend(config, CPU, build=lambda *_: built(model)), config)


def built(model: Any) -> Built:
    model.set_attn_implementation(register_varlen_attention())
    return Built(build_causal_lm(model), LazyWeights(), True)


def trained(config: Any, data: Any, loss: Any, *, shares: bool) -> tuple[torch.Tensor, float, dict[str, Any], int]:
    """Return scores, loss, gradients and the number of shared tokens."""
    with process_group():
        worker = worker_of(config, "qwen2")
        scored = shard_batch(data, 1, logprob_strategy(config), shares_prompts=shares)
        scores = scored.restore([worker.get_logprobs(scored.data[0], scored.sizes[0])])
        gradients: dict[str, torch.Tensor] = {}

        def keep() -> tuple[float, bool]:
            gradients.update({name: p.grad.clone() for name, p in worker.backend.model.hf.named_parameters()})
            return 0.0, True

        worker.backend.clip_and_step = keep  # type: ignore[method-assign]
        batch = shard_batch(data, 1, training_strategy(config), shares_prompts=shares)
        result = worker.train(batch.data[0], batch.sizes[0], loss, count_valid(data))
    return scores, result.loss, gradients, batch.num_shared_tokens


@pytest.mark.parametrize("tokens", [400, 70], ids=["one_microbatch", "several"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_equal_those_of_separate_rows(name: str, tokens: int) -> None:
    data, reference = tree_batch(), tiny_model("qwen2").eval().double()
    with torch.no_grad():
        data["prev_logprobs"] = hf_logprobs(reference, data) + 0.3 * data.data.pop("noise")
    loss = ClippedPGLossFn(ClippedPGLossConfig.build(**{"reference_policy_kl_penalty": 0.0} | LOSSES[name]))
    want = hf_logprobs_with_grad(reference, data)
    seqs, toks = (torch.tensor(count) for count in count_valid(data))
    want_loss, _ = loss(want[:, 1:], data=data, global_valid_seqs=seqs, global_valid_toks=toks)
    want_loss.backward()
    packing = {"enabled": True, "train_mb_tokens": tokens, "logprob_mb_tokens": tokens}
    config = policy_config("m", sequence_packing=packing, max_total_sequence_length=70)
    scores, got_loss, gradients, num_shared = trained(config, data, loss, shares=True)
    assert num_shared > (100 if tokens == 400 else 40)
    torch.testing.assert_close(scores.double(), want.detach(), rtol=0, atol=1e-5)
    assert got_loss == pytest.approx(want_loss.item(), abs=1e-6)
    worst = max((gradients[key] - p.grad).abs().max().item() for key, p in reference.named_parameters())
    largest = max(p.grad.abs().max().item() for p in reference.parameters())
    assert largest > 0.01 and worst < 1e-6, (worst, largest)
    _, separate_loss, separate, none = trained(config, data, loss, shares=False)
    assert none == 0 and got_loss == pytest.approx(separate_loss, abs=1e-6)
    assert max((gradients[key] - separate[key]).abs().max().item() for key in gradients) < 1e-6


@pytest.mark.parametrize("shape", [(5,), (5, 3)])
def test_each_place_of_a_shared_score_adds_to_its_gradient(shape: tuple[int, ...]) -> None:
    scores = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    score_N = torch.tensor([3, 0, 2, 3, 4, 1, 0, 3])
    assert torch.autograd.gradcheck(lambda values: spread(values, score_N), (scores,))


def call(name: str, parent: Call | None, added: int, answer: int) -> Call:
    """Make a call with random tokens, of which `added` are new before the answer."""
    seed = 1000 + sum(map(ord, name))
    new = {"role": "user", "content": "", "token_ids": ids(seed, added)}
    said = {"role": "assistant", "content": name, "token_ids": ids(seed + 100, answer)}
    said["generation_logprobs"] = torch.full((answer,), -3.0)
    return Call(name, parent, new, said, [], None)


def session(number: int) -> Trajectory:
    """Make a sample of a program: three turns, of which the second was answered twice, and a sub-agent."""
    first = call("a", None, 40, 20)
    first.answer["token_ids"] = ids(2000 + number, 20)
    second, again = call("b", first, 10, 15), call("c", first, 10, 12)
    again.added = second.added
    calls = [first, second, again, call("d", second, 9, 8), call("e", None, 30, 10)]
    sample = Trajectory(0, number, 0, "task", [], 0, reward=float(number))
    record(sample, CallTree(calls), "all")
    return sample


def test_branches_of_a_session_have_one_copy_of_its_turns() -> None:
    """By hand: two sessions with a common first prompt, whose last token belongs to both, as at each branch."""
    samples = [session(0), session(1)]
    assert [len(sample.branches) for sample in samples] == [2, 2]
    dense = build_training_batch(samples, 0, mask_truncated=False)
    strategy = training_strategy(policy_config("m", sequence_packing={"enabled": True, "train_mb_tokens": 2048}))
    sharded = shard_batch(dense, 1, strategy, shares_prompts=True)
    rows = [82, 102, 40]
    assert sorted(dense["input_lengths"].tolist()) == sorted(2 * rows)
    of_branches, of_prompts = 2 * (40 + 20 + 10 - 1), 40 - 1
    assert sharded.num_shared_tokens == of_branches + of_prompts + 39
    light, packed = split([samples], reads_collections=False)
    reference: Any = "in the store"
    light = located(Rollouts(light), reference).trajectories
    stored = build_training_batch(light, 0, mask_truncated=False)
    stored_shards = shard_batch(stored, 1, strategy, shares_prompts=True)
    assert stored_shards.num_shared_tokens == sharded.num_shared_tokens
    assert torch.equal(stored_shards.data[0]["shared_prefixes"], sharded.data[0]["shared_prefixes"])
