"""The section `overlap`, NeMo RL's two sections for it, and the rules on them."""

from pathlib import Path

import pytest

from nemo_rl.config import GRPOMasterConfig, OverlapConfig, busy_engines, load_config, save_resolved
from nemo_rl.config.schema.algorithms.overlap import GroupFailuresConfig
from nemo_rl.models.generation.factory import engine_settings
from nemo_rl.utils.errors import ConfigError

CPU = Path(__file__).resolve().parents[3] / "examples/configs/grpo_math_cpu.yaml"


def overlap_of(*overrides: str) -> OverlapConfig:
    config = load_config(CPU, list(overrides))
    assert isinstance(config, GRPOMasterConfig)
    return config.grpo.overlap


def test_nothing_overlaps_unless_asked() -> None:
    assert overlap_of().mode == "none"
    assert overlap_of("grpo.async_grpo=null").mode == "none"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=8"),
            {"max_age_steps": 8, "order": "in_order", "in_flight_weight_updates": False},
        ),
        (
            (
                "grpo.async_grpo.enabled=true",
                "grpo.async_grpo.in_flight_weight_updates=true",
                "grpo.async_grpo.max_generation_failures=3",
            ),
            {"max_age_steps": 1, "in_flight_weight_updates": True, "max_generation_failures": 3},
        ),
        (
            ("+async_rl={sampler: {name: in_order, max_lookahead_versions: 2}}",),
            {
                "max_age_steps": 2,
                "order": "in_order",
                "in_flight_weight_updates": True,
                "max_inflight_prompts": 32,
                "max_buffered_groups": 64,
            },
        ),
        (
            ("+async_rl={sampler: {name: windowed, max_staleness_versions: 4, sample_freshest_first: true}}",),
            {"max_age_steps": 4, "order": "freshest_first"},
        ),
        (("+async_rl={sampler: {name: windowed}}",), {"order": "ready_first"}),
        (
            ("grpo.async_grpo.enabled=true", "grpo.overlap.validation=hold_updates"),
            {"validation": "hold_updates"},
        ),
        (("+async_rl={sampler: {name: weight_fifo}, max_inflight_prompts: 9}",), {"max_inflight_prompts": 9}),
        (
            ("+async_rl={rollout_failure: {max_infra_attempts_per_prompt: 3, max_skipped_prompts: 2}}",),
            {
                "group_failures": GroupFailuresConfig.build(max_attempts_per_prompt=3, max_skipped_prompts=2),
            },
        ),
    ],
)
def test_sections_of_nemo_rl_fill_in_the_overlap(overrides: tuple[str, ...], expected: dict[str, object]) -> None:
    overlap = overlap_of(*overrides)
    assert overlap.mode == "ahead"
    assert {name: overlap[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("grpo.async_grpo.enabled=true", "+async_rl={}"), "Keep one"),
        (("+async_rl={max_buffered_rollouts: 7}",), r"=7 .* less than the 8 groups"),
        (
            (
                "grpo.overlap={mode: ahead, max_buffered_groups: 15}",
                "grpo.use_dynamic_sampling=true",
                "grpo.batch_multiplier=2",
            ),
            r"=15 .* less than the 16 groups",
        ),
        (("grpo.overlap.mode=ahead", "grpo.overlap.max_age_steps=0"), "max_age_steps"),
        (("grpo.overlap.order=newest",), "in_order"),
        (("grpo.overlap.mode=stream",), r"mode='stream' .* not allowed: use 'ahead', .* Allowed: none or ahead"),
        (("grpo.overlap.validation=hold_updates",), r"overlap.mode=none lets .* take turns"),
        (("+async_rl={rollout_failure: {on_dropped_prompt: replace}}",), "shrink"),
        (("grpo.overlap={mode: ahead, group_failures: {max_skipped_prompts: 1}}",), "max_attempts_per_prompt attempts"),
        (
            ("grpo.overlap.mode=ahead", "grpo.seq_logprob_error_threshold=2"),
            "seq_logprob_error_threshold=2 masks no answer of older weights",
        ),
    ],
)
def test_an_overlap_that_cannot_work_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        overlap_of(*overrides)


@pytest.mark.parametrize(
    ("overrides", "engines"),
    [
        ((), 0),
        (("grpo.overlap.mode=ahead",), 1),
        (("grpo.overlap.mode=ahead", "cluster.ranks_per_node=4"), 4),
        (
            (
                "grpo.overlap.mode=ahead",
                "cluster.ranks_per_node=4",
                "policy.generation.colocated.enabled=false",
                "policy.generation.colocated.resources.ranks_per_node=2",
            ),
            2,
        ),
        (
            (
                "grpo.overlap.mode=ahead",
                "cluster.num_nodes=3",
                "policy.generation.colocated.enabled=false",
                "policy.generation.colocated.resources.num_nodes=1",
            ),
            0,
        ),
    ],
)
def test_ranks_share_their_cores_with_engines_that_sample_ahead(overrides: tuple[str, ...], engines: int) -> None:
    config = load_config(CPU, list(overrides))
    assert isinstance(config, GRPOMasterConfig)
    assert busy_engines(config.grpo.overlap, config.cluster, config.policy) == engines


def test_engines_that_share_gpus_with_the_policy_cannot_sample_while_it_trains() -> None:
    from nemo_rl.config.rules.overlap import check_overlap

    config = load_config(CPU, ["grpo.overlap.mode=ahead"])
    assert list(check_overlap("grpo", config.grpo, config.policy, config.cluster)) == []
    config.cluster.device = "cuda"
    config.cluster.gpus_per_node = 8
    (problem,) = check_overlap("grpo", config.grpo, config.policy, config.cluster)
    assert "policy.generation.colocated.enabled=false" in problem


@pytest.mark.parametrize(
    ("overrides", "recomputes"),
    [
        ((), True),
        (("grpo.async_grpo.recompute_kv_cache_after_weight_updates=false",), False),
        (("policy.generation.weight_sync.recompute_kv_cache=false",), False),
        (("grpo.async_grpo.recompute_kv_cache_after_weight_updates=false", "policy.generation.backend=hf"), True),
    ],
)
def test_the_key_for_cached_keys_and_values_has_its_meaning(overrides: tuple[str, ...], recomputes: bool) -> None:
    config = load_config(CPU, ["grpo.async_grpo.enabled=true", *overrides])
    assert isinstance(config, GRPOMasterConfig) and config.policy.generation is not None
    assert config.policy.generation.weight_sync.recompute_kv_cache is recomputes
    assert engine_settings(config.policy, config.cluster, seed=0, load_weights=False).recomputes_cache is recomputes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (
                "policy.generation.weight_sync.recompute_kv_cache=false",
                "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true",
            ),
            r"weight_sync\.recompute_kv_cache=false and grpo\.async_grpo disagree: .* recompute_kv_cache=true",
        ),
        (("grpo.overlap.max_age_steps=3",), r"overlap\.max_age_steps=3 .* means max_age_steps=1"),
        (("grpo.overlap.order=weight_fifo",), r"overlap\.order=weight_fifo and grpo\.async_grpo disagree"),
    ],
)
def test_two_keys_that_disagree_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(CPU, ["grpo.async_grpo.enabled=true", *overrides])


def test_two_keys_that_agree_are_accepted(tmp_path: Path) -> None:
    asked = ["grpo.async_grpo={enabled: true, max_trajectory_age_steps: 3}", "grpo.overlap.max_age_steps=3"]
    config = load_config(CPU, [*asked, "grpo.overlap.mode=ahead", "grpo.overlap.validation=hold_updates"])
    assert (config.grpo.overlap.mode, config.grpo.overlap.validation) == ("ahead", "hold_updates")
    save_resolved(config, tmp_path / "again.yaml")
    assert load_config(tmp_path / "again.yaml") == config


def test_engines_that_always_compute_again_are_named() -> None:
    with pytest.raises(ConfigError, match=r"recompute_kv_cache=false works with the backends vllm and sglang only.*hf"):
        load_config(CPU, ["policy.generation.weight_sync.recompute_kv_cache=false", "policy.generation.backend=hf"])


@pytest.mark.parametrize(
    "overrides",
    [
        ("grpo.overlap.mode=ahead", "loss_fn.use_importance_sampling_correction=true"),
        ("grpo.overlap.mode=ahead", "loss_fn.force_on_policy_ratio=true"),
        (),
    ],
)
def test_a_threshold_of_the_mismatch_is_accepted_where_it_is_measured(overrides: tuple[str, ...]) -> None:
    load_config(CPU, ["grpo.seq_logprob_error_threshold=2", *overrides])
