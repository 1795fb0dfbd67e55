"""Define the keys of overlapping sampling and training: `overlap`, and NeMo RL's `async_grpo` and `async_rl`.

NeMo RL's two sections have the same settings under other names. `AsyncGRPOConfig.overlap` and `AsyncRLConfig.overlap`
translate them.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from nemo_rl.config.base.availability import OnlyWith
from nemo_rl.config.base.section import Section
from nemo_rl.config.base.value_types import Count, CountOrZero, FactorOrZero, Seconds

_AHEAD = OnlyWith("mode", ("ahead",))


def _known_mode(mode: object) -> object:
    if mode == "stream":
        raise PydanticCustomError("overlap_mode", "use 'ahead', which samples while the policy trains, or 'none'")
    return mode


class GroupFailuresConfig(Section):
    """Attempts for groups of answers that cannot be sampled, with `mode=ahead`.

    A group fails if an engine cannot be kept running or a deadline passes. An environment's error is recorded with its
    sample, and the group does not fail.
    """

    max_attempts_per_prompt: Count | None = None
    """Number of attempts to sample the group of a prompt; null: only max_generation_failures limits the failures."""
    backoff_base_s: FactorOrZero = 1.0
    """Seconds before the second attempt. The wait doubles before each further attempt."""
    max_backoff_s: FactorOrZero = 30.0
    """Longest wait before an attempt, in seconds."""
    max_skipped_prompts: CountOrZero = 0
    """Number of prompts that a run may skip after max_attempts_per_prompt failures. Their samples have no reward and do
    not count in the loss. After that number of skipped prompts, a further failure ends the run."""
    min_step_fraction: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Smallest share of a step's prompts that must remain after skipping. With fewer, the run ends."""


class OverlapConfig(Section):
    """Overlap of sampling and training."""

    ignored: ClassVar[dict[str, str]] = {"groups_per_part": "a step is trained on when all of its groups are finished"}

    mode: Annotated[Literal["none", "ahead"], BeforeValidator(_known_mode)] = "none"
    """none: sampling and training alternate; ahead: the engines sample for later steps while the policy trains."""
    max_age_steps: Annotated[Count, _AHEAD] = 1
    """ahead: largest number of training steps between the weights at a group's start and the step that trains on the
    group. A prompt is started only if its group can meet this limit, so no group is dropped."""
    order: Annotated[Literal["in_order", "ready_first", "weight_fifo", "freshest_first"], _AHEAD] = "in_order"
    """ahead: the groups that a step trains on. in_order: the oldest groups, even if the step has to wait for them. The
    other orders take finished groups first, and wait only for groups that would become too old. Among finished groups,
    ready_first takes the oldest, weight_fifo those with the oldest weights, and freshest_first the newest."""
    in_flight_weight_updates: Annotated[bool, _AHEAD] = False
    """ahead: true: running answers continue with new weights; false: each update of the engines waits until all started
    groups are finished. With false and order=in_order, a run can be repeated bit for bit."""
    validation: Literal["stop", "hold_updates", "through_updates"] = "stop"
    """stop: training waits for each validation. With the other values training goes on meanwhile. hold_updates measures
    the weights of one step, and the next update of the engines waits for it. With through_updates nothing waits, and
    running answers continue with new weights, so a validation measures several versions."""
    partial_responses: Annotated[Literal["continue", "restart"], _AHEAD] = "continue"
    """ahead: treatment of unfinished groups in a checkpoint. continue: their finished samples, turns and tokens so far
    are stored, and a resumed run samples the rest; restart: a resumed run samples these groups again from their
    prompts. No effect with in_flight_weight_updates=false, because a checkpoint then waits for all started groups."""
    max_inflight_prompts: Annotated[Count | None, _AHEAD] = None
    """ahead: largest number of prompts that are sampled at the same time; null: no limit."""
    max_buffered_groups: Annotated[Count | None, _AHEAD] = None
    """ahead: most groups that are started but not trained on; null: as many as max_age_steps allows."""
    max_generation_failures: Annotated[CountOrZero, _AHEAD] = 0
    """ahead: number of consecutive failures of groups after which the run ends. Before that, a failed group is sampled
    again. Not used with group_failures.max_attempts_per_prompt."""
    group_failures: Annotated[GroupFailuresConfig, _AHEAD] = Field(default_factory=GroupFailuresConfig)
    """ahead: number of attempts for each prompt, and of prompts that may be skipped."""


class AsyncGRPOConfig(Section):
    """NeMo RL's section for overlap, the same as `overlap` with `mode=ahead` and `order=in_order`."""

    enabled: bool = False
    """Sample for later steps while the policy trains."""
    max_trajectory_age_steps: Count = 1
    """Same as overlap.max_age_steps."""
    max_generation_failures: CountOrZero = 0
    """Same as overlap.max_generation_failures."""
    in_flight_weight_updates: bool = False
    """Same as overlap.in_flight_weight_updates."""
    recompute_kv_cache_after_weight_updates: bool | None = None
    """Same as policy.generation.weight_sync.recompute_kv_cache, with backend=vllm; null: that key decides."""

    @property
    def overlap(self) -> OverlapConfig:
        """Return the section `overlap` with the same meaning."""
        return OverlapConfig(
            mode="ahead",
            max_age_steps=self.max_trajectory_age_steps,
            in_flight_weight_updates=self.in_flight_weight_updates,
            max_generation_failures=self.max_generation_failures,
        )


class AsyncRLSamplerConfig(Section):
    """The order in which `async_rl` trains on groups."""

    name: Literal["in_order", "ready_first", "windowed", "weight_fifo"] = "in_order"
    """Same as overlap.order. windowed is ready_first, or freshest_first with sample_freshest_first."""
    max_lookahead_versions: CountOrZero = 1
    """With in_order: same as overlap.max_age_steps; 0: sampling and training alternate."""
    max_staleness_versions: CountOrZero = 1
    """With other names: same as overlap.max_age_steps; 0: sampling and training alternate."""
    sample_freshest_first: bool = False
    """With windowed: prefer the newest finished groups."""


class AsyncRLRolloutFailureConfig(Section):
    """NeMo RL's names for `overlap.group_failures`."""

    idle: ClassVar[dict[str, str]] = {
        "max_data_attempts_per_prompt": "what an environment raises is recorded with its sample, which gets no reward",
        "max_consecutive_dropped_prompts": "max_skipped_prompts and min_step_batch_fraction bound all skipped prompts",
        "max_replacement_attempts": "a skipped prompt is not replaced",
        "replacement_reserve_prompts": "a skipped prompt is not replaced",
        "native": "deadlines are keys of cluster.timeouts: rollout_s, engine_silence_s and environment_s",
        "nemo_gym": "a rollout of NeMo Gym is not sent again; its deadline is env.nemo_gym.timeout_s",
    }

    max_infra_attempts_per_prompt: Count = 5
    """Same as overlap.group_failures.max_attempts_per_prompt."""
    backoff_base_s: FactorOrZero = 1.0
    """Same as overlap.group_failures.backoff_base_s."""
    max_backoff_s: Seconds = 30.0
    """Same as overlap.group_failures.max_backoff_s."""
    max_skipped_prompts: CountOrZero = 0
    """Same as overlap.group_failures.max_skipped_prompts."""
    min_step_batch_fraction: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Same as overlap.group_failures.min_step_fraction."""
    on_dropped_prompt: Literal["shrink"] = "shrink"
    """The samples of a skipped prompt do not count in the loss, so the step has fewer samples."""
    max_data_attempts_per_prompt: Count = 2
    """Has no effect."""
    max_consecutive_dropped_prompts: CountOrZero = 0
    """Has no effect."""
    max_replacement_attempts: CountOrZero = 1
    """Has no effect."""
    replacement_reserve_prompts: CountOrZero = 1
    """Has no effect."""
    native: dict[str, Any] | None = None
    """Has no effect."""
    nemo_gym: dict[str, Any] | None = None
    """Has no effect."""

    @property
    def group_failures(self) -> GroupFailuresConfig:
        """Return the section `overlap.group_failures` with the same meaning."""
        return GroupFailuresConfig(
            max_attempts_per_prompt=self.max_infra_attempts_per_prompt,
            backoff_base_s=self.backoff_base_s,
            max_backoff_s=self.max_backoff_s,
            max_skipped_prompts=self.max_skipped_prompts,
            min_step_fraction=self.min_step_batch_fraction,
        )


class AsyncRLConfig(Section):
    """NeMo RL's newer section for overlap. With it, running answers always continue with new weights."""

    later: ClassVar[dict[str, str]] = {
        "generation_router": "a router in front of the engines",
    }
    idle: ClassVar[dict[str, str]] = {
        "min_groups_for_streaming_train": "an update begins when all groups of its step are finished",
    }
    ignored: ClassVar[dict[str, str]] = {
        "diagnostics": "the metrics of overlap are always logged",
        "generation_fleet_health": "engines that die or hang are always replaced (cluster.max_actor_restarts)",
        "stall_watchdog": "every wait has a deadline (cluster.timeouts)",
    }

    sampler: AsyncRLSamplerConfig = Field(default_factory=AsyncRLSamplerConfig)
    """The groups that a step trains on."""
    rollout_failure: AsyncRLRolloutFailureConfig = Field(default_factory=AsyncRLRolloutFailureConfig)
    """Same as overlap.group_failures."""
    max_inflight_prompts: Count = 32
    """Same as overlap.max_inflight_prompts."""
    max_buffered_rollouts: Count = 64
    """Same as overlap.max_buffered_groups."""
    min_groups_for_streaming_train: Count = 32
    """Has no effect."""
    recompute_kv_cache_after_weight_updates: bool | None = None
    """Same as policy.generation.weight_sync.recompute_kv_cache, with backend=vllm; null: that key decides."""

    @property
    def overlap(self) -> OverlapConfig:
        """Return the section `overlap` with the same meaning."""
        sampler = self.sampler
        windowed: Literal["freshest_first", "ready_first"] = (
            "freshest_first" if sampler.sample_freshest_first else "ready_first"
        )
        in_order = sampler.name == "in_order"
        age = sampler.max_lookahead_versions if in_order else sampler.max_staleness_versions
        if age == 0:
            return OverlapConfig()
        return OverlapConfig(
            mode="ahead",
            max_age_steps=age,
            order=windowed if sampler.name == "windowed" else sampler.name,
            in_flight_weight_updates=True,
            max_inflight_prompts=self.max_inflight_prompts,
            max_buffered_groups=self.max_buffered_rollouts,
            group_failures=self.rollout_failure.group_failures,
        )
