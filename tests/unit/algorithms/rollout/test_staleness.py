"""Batches of older weights: which tokens are stale, and what the ratio, the probe and the weight sync make of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from numbered_prompts import make_stream

from nemo_rl.algorithms.rollout.batches import (
    StoredVersion,
    age_metrics,
    build_training_batch,
    check_staleness,
    num_stale_tokens,
)
from nemo_rl.algorithms.rollout.refit import Refitter
from nemo_rl.algorithms.rollout.source import DynamicSampling, Group, SampledGroups
from nemo_rl.algorithms.rollout.sync_setup import SyncProbe
from nemo_rl.algorithms.runtime.device_sharing import MemorySharing
from nemo_rl.algorithms.runtime.run import StepBatch
from nemo_rl.algorithms.scoring import PolicyScoring, corrects_staleness, policy_scoring
from nemo_rl.config import load_config
from nemo_rl.data.streams.prompt_stream import PromptPosition
from nemo_rl.experience.trajectory import Outcome, Trajectory
from nemo_rl.models.batch_rows import stale_tokens
from nemo_rl.models.generation.interfaces import VersionSpan
from nemo_rl.weight_sync.transport import TransportSpec

pytestmark = pytest.mark.fast


def message(role: str, *ids: int) -> dict[str, Any]:
    written = {"generation_logprobs": torch.full((len(ids),), -0.5)} if role == "assistant" else {}
    return {"role": role, "content": role, "token_ids": torch.tensor(ids), **written}


def sampled(*spans: tuple[int, int]) -> Trajectory:
    """Two prompt tokens, three of an answer, one of an observation, two of an answer."""
    log = [message("user", 1, 2), message("assistant", 3, 4, 5), message("user", 6), message("assistant", 7, 8)]
    versions = [VersionSpan(*span) for span in spans]
    return Trajectory(0, 0, 0, "math", log, 2, reward=1.0, weight_versions=versions)


def stale(rollouts: list[Trajectory], version: int, *, mixes_weights: bool = False) -> torch.Tensor:
    """Return which tokens of a batch are stale."""
    num_stale_B = num_stale_tokens(rollouts, version, mixes_weights=mixes_weights)
    assert num_stale_B is not None
    return stale_tokens(build_training_batch(rollouts, 0, mask_truncated=False), num_stale_B)


def test_tokens_are_stale_from_the_span_of_an_older_version_to_the_next_span() -> None:
    stale_BT = stale([sampled((2, 3), (4, 4), (6, 5)), sampled((2, 5), (6, 5))], 5)
    assert stale_BT.int().tolist() == [[0, 0, 1, 1, 1, 1, 0, 0], [0] * 8]
    assert num_stale_tokens([sampled((2, 5), (6, 5)), sampled()], 5) is None
    assert stale([sampled((2, 5), (6, 4))], 5).int().tolist() == [[0, 0, 1, 1, 1, 1, 1, 1]], "up to the last stale one"


def test_tokens_drawn_with_keys_and_values_of_older_weights_are_stale() -> None:
    rollouts = [sampled((2, 3), (4, 4), (6, 5)), sampled((2, 5), (6, 5))]
    stale_BT = stale(rollouts, 5, mixes_weights=True)
    assert stale_BT.int().tolist() == [[0, 0, 1, 1, 1, 1, 1, 1], [0] * 8]
    for mixes_weights, ends in ((False, [6, 0]), (True, [8, 0])):
        found = num_stale_tokens(rollouts, 5, mixes_weights=mixes_weights)
        assert found is not None and found.tolist() == ends


def test_a_batch_older_than_its_source_states_is_refused() -> None:
    rollouts = [sampled((2, 3), (6, 5)), sampled((2, 5))]
    check_staleness(rollouts, 5, 2)
    with pytest.raises(ValueError, match="sampled 2 weight versions ago; its max_staleness is 1. Drop such groups"):
        check_staleness(rollouts, 5, 1)
    assert age_metrics(rollouts, 5) == {"avg_trajectory_age": 1.0, "max_trajectory_age": 2.0}


class Scorer:
    """A policy that gives every token the log-probability -2."""

    num_calls = 0

    def get_logprobs(self, batch: Any) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        return {"logprobs": torch.full(batch["input_ids"].shape, -2.0)}


def scored(version: int, corrects: bool = False, needs_prev: bool = False) -> tuple[Scorer, StepBatch]:
    """A batch of two trajectories that is scored by a policy of some version."""
    rollouts = [sampled((2, 3), (6, 3)), sampled((2, 3), (6, 4))]
    tensors = build_training_batch(rollouts, 0, mask_truncated=False)
    batch = StepBatch(tensors, rollouts, num_stale_B=num_stale_tokens(rollouts, version))
    scorer = Scorer()
    PolicyScoring(scorer, needs_prev, False, None, corrects).apply(batch)  # type: ignore[arg-type]
    return scorer, batch


def test_the_ratio_of_stale_tokens_is_to_the_policy_that_sampled_them() -> None:
    scorer, batch = scored(4)
    counted = batch.tensors["token_mask"] > 0
    assert batch.tensors["prev_logprobs"][counted].tolist() == [-0.5] * 5 + [-0.5] * 3 + [-2.0] * 2
    assert scorer.num_calls == 1
    scorer, batch = scored(5)
    assert batch.tensors["prev_logprobs"][counted].tolist() == [-0.5] * 10
    assert scorer.num_calls == 0, "no token is of the current weights"


def test_fresh_batches_are_scored_as_ever() -> None:
    scorer, batch = scored(3)
    assert ("prev_logprobs" in batch.tensors, batch.tensors["num_counted_samples"].tolist()) == (False, [2.0, 2.0])
    scorer, batch = scored(3, needs_prev=True)
    assert batch.tensors["prev_logprobs"].unique().tolist() == [-2.0]
    assert scorer.num_calls == 1


@pytest.mark.parametrize(("needs_prev", "num_calls"), [(False, 0), (True, 1)])
def test_importance_weights_keep_the_ratio_to_the_policy_before_the_update(needs_prev: bool, num_calls: int) -> None:
    scorer, batch = scored(4, corrects=True, needs_prev=needs_prev)
    assert ("prev_logprobs" in batch.tensors, scorer.num_calls) == (needs_prev, num_calls)
    if needs_prev:
        assert batch.tensors["prev_logprobs"].unique().tolist() == [-2.0]


def test_a_comparison_of_the_engine_with_itself_is_not_logged() -> None:
    """Where the engine's numbers stand for the policy's, every measure of the mismatch would be perfect."""
    update = {"loss": 1.0, "token_mult_prob_error": 1.0, "gen_kl_error": 0.0, "js_divergence_error": 0.0}
    for version, corrects, needs_prev in ((4, False, False), (5, False, False), (5, False, True)):
        _, batch = scored(version, corrects, needs_prev)
        assert batch.measured(update) == {"loss": 1.0}
    for version, corrects, needs_prev in ((3, False, False), (3, False, True), (5, True, False), (5, True, True)):
        _, batch = scored(version, corrects, needs_prev)
        assert batch.measured(update) == update


@pytest.mark.parametrize(
    ("version", "corrects", "is_measured"), [(3, False, True), (4, False, False), (4, True, True), (5, True, True)]
)
def test_errors_of_sequences_are_logged_where_they_are_measured(
    version: int, corrects: bool, is_measured: bool
) -> None:
    rollouts = [sampled((2, 3), (6, 3)), sampled((2, 3), (6, 4))]
    tensors = build_training_batch(rollouts, 0, mask_truncated=False)
    batch = StepBatch(tensors, rollouts, num_stale_B=num_stale_tokens(rollouts, version))
    metrics = PolicyScoring(Scorer(), True, False, None, corrects).apply(batch)  # type: ignore[arg-type]
    names = {f"{kind}_seq_mult_prob_error" for kind in ("min", "mean", "max")}
    assert (names <= metrics.keys()) is is_measured and "num_masked_seqs" in metrics
    assert is_measured or not {name for name in metrics if "mult_prob_error" in name}


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [
        (("grpo.overlap.mode=ahead",), True),
        (("grpo.overlap.mode=ahead", "loss_fn.use_importance_sampling_correction=true"), False),
        (("grpo.overlap.mode=none",), False),
    ],
)
def test_the_start_says_what_is_not_measured(
    overrides: tuple[str, ...], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = load_config("examples/configs/grpo_math_cpu.yaml", list(overrides))
    policy_scoring(config, Scorer(), False, False)  # type: ignore[arg-type]
    assert ("the mismatch of policy and engines is not measured" in caplog.text) is is_told


@pytest.mark.parametrize(
    ("override", "corrects"),
    [
        ("loss_fn.force_on_policy_ratio=false", False),
        ("loss_fn.force_on_policy_ratio=true", True),
        ("loss_fn.use_importance_sampling_correction=true", True),
    ],
)
def test_which_losses_correct_staleness(override: str, corrects: bool) -> None:
    config = load_config("examples/configs/grpo_math_cpu.yaml", [override])
    assert corrects_staleness(config) is corrects  # type: ignore[arg-type]


def test_the_probe_compares_tokens_of_the_current_weights_only() -> None:
    """A trainer that is right on fresh tokens and far off on stale ones, whose weights it has no more."""
    rollouts = [sampled((2, 3), (6, 4))]
    tensors = build_training_batch(rollouts, 0, mask_truncated=False)
    right = {"logprobs": torch.tensor([[0, 0, -9.0, -9, -9, 0, -0.5, -0.5]])}
    calls = []
    policy = SimpleNamespace(get_logprobs=lambda batch: calls.append(batch) or right)
    engines = SimpleNamespace(membership=1)
    probe = SyncProbe(policy, engines, None, 1.05, timeout_s=1.0, precision="float32")  # type: ignore[arg-type]
    probe.check(tensors, torch.tensor([8]))
    assert calls == [], "a batch without fresh tokens says nothing about the engines"
    probe.check(tensors, num_stale_tokens(rollouts, 4))
    probe.check(tensors, None)
    assert len(calls) == 1, "these engines are proven"
    assert tensors["token_mask"].sum() == 5, "the batch itself is not changed"


class Engines:
    """Engines whose lock tells whether it is taken."""

    def __init__(self) -> None:
        self.membership = 0
        self.workers_per_engine = 1
        self.weight_version = 0
        self.is_held = False
        self.load_weights: Any = None

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        self.is_held, before = True, self.is_held
        yield
        self.is_held = before

    def follow_number(self) -> None:
        assert not self.is_held

    @contextmanager
    def changing(self) -> Iterator[None]:
        assert self.is_held
        yield


@pytest.mark.parametrize("shared", [False, True])
def test_what_engines_sample_ends_before_they_get_new_weights_or_sleep(shared: bool) -> None:
    """Waited for without the locks, which the revival of a dead engine needs."""
    engines, events = Engines(), []
    policy = SimpleNamespace(weight_version=0, held=engines.exclusively)
    turns = SimpleNamespace(rest=lambda: events.append("sleep"), wake=lambda: events.append("wake"))
    memory = MemorySharing(*([{"generation": turns}] if shared else []))
    refitter = Refitter(policy, engines, TransportSpec("shared_memory", run_id="t"), 1.0, memory)  # type: ignore[arg-type]
    refitter.before_update.append(lambda: events.append(f"drained, locked: {engines.is_held}"))

    def sync() -> None:
        events.append("sync")
        refitter._synced = (policy.weight_version, engines.membership)

    refitter.sync = sync  # type: ignore[method-assign]
    for version in (0, 0, 1):
        policy.weight_version = version
        refitter.ensure_fresh()
    assert refitter.weight_version == 1
    drained = "drained, locked: False"
    assert [event for event in events if event != "wake"] == [drained, "sync", drained, "sync"]
    refitter.before_training()
    assert (events[-1] == drained) is shared


def test_a_version_means_the_same_weights_after_a_resume() -> None:
    policy = SimpleNamespace(weight_version=7)
    state = StoredVersion(policy).state_dict()
    resumed = SimpleNamespace(weight_version=0)
    StoredVersion(resumed).load_state_dict(state)
    assert resumed.weight_version == 7


def test_sampled_groups_travel_through_a_checkpoint(tmp_path: Any) -> None:
    sample = sampled((2, 3), (6, 4))
    sample.outcome, sample.reward_components, sample.episode = Outcome.TRUNCATED, {"right": 0.5}, object()
    groups = [Group((1, 0), [sample], PromptPosition(0, 1))]
    torch.save(SampledGroups(groups, {"math/accuracy": 0.25}).state_dict(), tmp_path / "groups.pt")

    prompts = make_stream(4, 2, 1, shuffle=False)
    restored = SampledGroups.from_state(torch.load(tmp_path / "groups.pt", weights_only=True), prompts)
    (group,) = restored.groups
    (found,) = group.trajectories
    assert (group.order, group.prompt, group.trains) == ((1, 0), PromptPosition(0, 1), True)
    assert restored.metrics == {"math/accuracy": 0.25}
    assert found.outcome is Outcome.TRUNCATED
    assert (found.reward, found.reward_components, found.episode) == (1.0, {"right": 0.5}, None)
    assert found.weight_versions == sample.weight_versions
    pairs = zip(found.message_log, sample.message_log, strict=True)
    assert all(mine["token_ids"].equal(other["token_ids"]) for mine, other in pairs)
    assert num_stale_tokens([found], 4) is not None
    assert prompts.next_batch().positions == [PromptPosition(0, 0), PromptPosition(0, 2)]


def test_dynamic_sampling_states_the_staleness_of_what_it_wraps() -> None:
    inner = SimpleNamespace(max_staleness=3)
    assert DynamicSampling(inner, 1, 1).max_staleness == 3  # type: ignore[arg-type]
