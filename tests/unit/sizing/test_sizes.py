"""`nemo_rl size`: what fits, what does not and by how much, engines, reasons, files; memory against hand arithmetic."""

import re
from pathlib import Path

import pytest
import yaml

from nemo_rl.__main__ import main
from nemo_rl.commands.size.candidates import Candidate, batching, candidates, layouts, update_seconds, values_of
from nemo_rl.commands.size.jobs import GPUS, Job, chosen_gpu, memory_of, with_values
from nemo_rl.commands.size.proposal import described, placed, propose
from nemo_rl.commands.size.report import reasons
from nemo_rl.commands.size.search import Rejected, Search
from nemo_rl.config import REPOSITORY_ROOT, DPOMasterConfig, GRPOMasterConfig, load_config
from nemo_rl.utils.errors import ConfigError

RECIPES = REPOSITORY_ROOT / "examples/configs/recipes/llm"
LLAMA = RECIPES / "grpo-llama3.1-8b-instruct-1n8g-fsdp.yaml"
GIB = 2**30


def job_of(*overrides: str, gpu_gb: float = 80.0) -> Job:
    gpu = chosen_gpu(None, gpu_gb)
    config = load_config(LLAMA, overrides, schema=GRPOMasterConfig, check=False)
    return Job(described(config, gpu), "policy", gpu)


def test_gpus_by_name_and_by_size() -> None:
    assert chosen_gpu("H100", None) == GPUS["h100"]
    assert chosen_gpu("h200", 100.0).memory_gib == 100.0
    assert memory_of("80GiB") == memory_of("80") == memory_of("81920 MiB") == 80.0
    for wrong in ("80GB", "0", "-3", "much", "."):
        with pytest.raises(ConfigError, match="GiB or MiB"):
            memory_of(wrong)
    with pytest.raises(ConfigError, match="Did you mean"):
        chosen_gpu("h10", None)


def test_layouts_divide_the_ranks_and_every_axis_occurs() -> None:
    job = job_of()
    found = list(layouts(job))
    assert all(layout.num_ranks == 8 for layout in found) and len(set(found)) == len(found)
    for axis, sizes in {"tp": {1, 2, 4, 8}, "cp": {1, 2}, "pp": {1, 2, 4, 8}, "ep": {1}}.items():
        assert {getattr(layout, axis) for layout in found} == sizes
    assert all(candidate.rows * job.length <= 65536 * candidate.layout.cp for candidate in candidates(job))


def test_operations_by_hand() -> None:
    """8 ranks of FSDP: 64 rows of 4096 tokens each, one at a time, 3 passes of 2 operations for a parameter."""
    job = job_of()
    layout = next(each for each in layouts(job) if each.dp_shard == 8)
    seconds = update_seconds(job, Candidate(layout, "none", False, 1))
    matrices = 8.03e9 - 128256 * 4096
    scores = 32 * 2 * 4096 * 4096
    by_hand = 64 * (4096 + 256) * 3 * (2 * matrices + scores) / (989.4e12 * 0.45)
    assert seconds.compute == pytest.approx(by_hand, rel=0.01)
    assert seconds.total == seconds.compute, "nothing is exchanged that computation does not hide"
    again = update_seconds(job, Candidate(layout, "full", False, 1))
    assert again.total == pytest.approx(seconds.total * 4 / 3)


def test_tensor_parallel_exchange_by_hand() -> None:
    """Four all-reduces of a layer, each 2 x 7/8 x 4096 x 2 bytes a token, at 70 % of 450 GB/s."""
    job = job_of()
    layout = next(each for each in layouts(job) if each.tp == 8)
    seconds = update_seconds(job, Candidate(layout, "none", False, 1))
    by_hand = 512 * 4096 * 32 * 4 * 2 * 7 / 8 * 4096 * 2 / (450e9 * 0.7)
    assert seconds.tensor == pytest.approx(by_hand, rel=0.001)


def test_rules_of_the_library_refuse_sizes() -> None:
    """14 heads do not divide by 4; the reason is the backend's."""
    job = job_of("policy.hf_config_overrides={num_attention_heads: 14, num_key_value_heads: 2, head_dim: 128}")
    search = Search.of(job)
    refused = search.judge(next(each for each in search.ranked if each.layout.tp == 4))
    assert isinstance(refused, Rejected) and refused.needs == 0 and "14" in refused.reason


def test_batches_that_do_not_divide_are_refused() -> None:
    job = job_of("policy.train_global_batch_size=4", "grpo.num_prompts_per_step=1", "grpo.num_generations_per_prompt=4")
    found = propose(job.config, job.gpu)
    assert found is not None and 4 % found.models["policy"].candidate.layout.data_parallel_size == 0


def test_pairs_stay_together_in_a_microbatch() -> None:
    gpu = chosen_gpu(None, 80.0)
    path = RECIPES / "dpo-llama3.1-8b-instruct-1n8g-fsdp.yaml"
    job = Job(described(load_config(path, schema=DPOMasterConfig), gpu), "policy", gpu)
    assert {candidate.rows % 2 for candidate in candidates(job)} == {0}
    unpacked = with_values(job.config, {"policy.sequence_packing.enabled": False})
    assert batching(Job(unpacked, "policy", gpu), 4, 4) == {
        "policy.train_micro_batch_size": 2,
        "policy.logprob_batch_size": 4,
    }


def test_megatron_has_uneven_stages() -> None:
    """61 layers in 16 stages: 15 x 4 and one."""
    gpu = chosen_gpu(None, 80.0)
    from nemo_rl.config import SFTMasterConfig

    path = RECIPES / "sft-deepseek-v3-32n8g-megatron.yaml"
    job = Job(described(load_config(path, schema=SFTMasterConfig), gpu), "policy", gpu)
    values = values_of(job, next(each for each in candidates(job) if each.layout.pp == 16))
    config = with_values(job.config, values).policy.megatron_cfg
    assert (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage) == (None, 1)


def test_less_memory_divides_more_or_computes_again() -> None:
    """80 GiB hold the activations of a row of 4096 tokens, 40 GiB do not."""
    large, small = (propose(job.config, job.gpu) for job in (job_of(), job_of(gpu_gb=40.0)))
    assert large is not None and large.models["policy"].candidate.recompute == "none"
    assert small is not None
    assert small.models["policy"].plan.peak < 40 * GIB * 0.93 < large.models["policy"].plan.peak
    assert small.train_seconds > large.train_seconds


def test_an_engine_by_hand() -> None:
    """Weights are 2 x 8.03e9 bytes; a token caches 32 layers x 2 x 8 heads x 128 x 2 bytes = 128 KiB."""
    job = job_of()
    found = propose(job.config, job.gpu)
    assert found is not None and found.engine is not None
    engine, ranks = found.engine, found.engine.tensor * found.engine.stages
    assert engine.answers * engine.engines == 64 * 16
    group = next(iter(found.forecast.groups.values()))
    assert group.moments["generation"]["engine's weights"] == pytest.approx(2 * 8.03e9 / ranks, rel=0.001)
    room = found.forecast.cache_tokens
    assert room is not None and engine.room == int(room / 4096) and engine.room >= 1
    assert group.peak <= 80 * GIB * 0.93


def test_separate_engines_divide_the_machine() -> None:
    job = job_of("grpo.overlap.mode=ahead", "policy.generation.colocated.enabled=false")
    found = placed("separate", job.config, job.gpu)
    assert found is not None and found.engine is not None
    engines = found.values["policy.generation.colocated.resources.gpus_per_node"]
    assert engines in (2, 4, 6) and found.engine.engines * found.engine.tensor * found.engine.stages == engines
    assert found.seconds == max(found.train_seconds, found.engine.seconds)


def test_every_size_has_a_reason_with_numbers() -> None:
    job = job_of()
    found = propose(job.config, job.gpu)
    assert found is not None
    told = list(reasons(found))
    assert {"tensor parallel", "microbatch", "recomputation", "engines", "engines' share"} <= {
        each.what for each in told
    }
    assert all(re.search(r"\d", each.sentence) for each in told)


def test_the_command_writes_a_file_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "sized.yaml"
    arguments = ["size", str(LLAMA), "--gpu-memory", "48GiB", "grpo.seed=7", "--write", str(target)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "Overrides" in said and "fits 93% of the 48 GiB of each GPU" in said
    written = load_config(target, schema=GRPOMasterConfig)
    assert written.grpo.seed == 7 and written.cluster.gpu_memory_gb == 48.0
    for key, value in re.findall(r"^  policy\.generation\.engine\.(\w+)=(\S+)", said, re.MULTILINE):
        assert str(getattr(written.policy.generation.engine, key)) == value  # type: ignore[union-attr]
    assert yaml.safe_load(target.read_text())["defaults"].endswith(LLAMA.name)
    assert main(arguments) == 2 and "Name a new file" in capsys.readouterr().err


def test_what_is_short_and_how_many_gpus_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    """16 x 8.03e9 bytes / 2 GPUs = 59.8 GiB of state, and 10 GiB each; an engine's weights are 7.5 GiB of each."""
    assert main(["size", str(LLAMA), "--gpu-memory", "10GiB", "cluster.gpus_per_node=2"]) == 1
    said = capsys.readouterr().out
    needs, more, usable = map(float, re.findall(r"needs ([\d.]+) GiB of each GPU, ([\d.]+) .* the ([\d.]+)", said)[0])
    assert usable == pytest.approx(10 * 0.93, abs=0.1) and needs - usable == pytest.approx(more, abs=0.11)
    assert needs > 16 * 8.03e9 / 2 / GIB
    nodes, gpus = map(int, re.findall(r"num_nodes=(\d+) cluster.gpus_per_node=(\d+)", said)[0])
    assert 16 * 8.03e9 / GIB / (nodes * gpus) < 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["examples/configs/grpo_math_cpu.yaml"], "predicted for GPUs only"),
        ([str(LLAMA), "--gpu", "h10"], "Did you mean"),
        (["examples/configs/evals/eval.yaml"], "an evaluation trains nothing"),
        ([str(RECIPES / "sft-llama3.1-8b-1n8g-fsdp.yaml"), "--engines", "separate"], "samples nothing"),
        ([str(LLAMA), "--engines", "separate", "cluster.gpus_per_node=1"], "has one"),
        ([str(LLAMA), "--write", "no-such-folder/sized.yaml"], "there is no folder"),
        ([str(LLAMA), "--write", "sized.yaml", "~policy.optimizer"], "which removes a key"),
        ([str(LLAMA), "policy.model_name=no-such-user/knows-this"], "is not here"),
    ],
)
def test_wrong_requests(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", *arguments]) == 2
    assert message in capsys.readouterr().err
