"""Keys of judges: NeMo RL's reward-model section, devices, checkpoints, contradictions."""

import pytest

from nemo_rl.config import GRPOMasterConfig, PolicyConfig, load_config
from nemo_rl.config.loading.all_errors import collect_errors
from nemo_rl.config.runs.rollouts import RolloutMasterConfig
from nemo_rl.utils.errors import ConfigError

CPU = "examples/configs/grpo_math_cpu.yaml"
ONE_GPU = "examples/configs/grpo_rm_1B.yaml"

OF_NEMO_RL = """{enabled: true, model_name: examples/assets/tiny-chat, tokenizer: {name: examples/assets/tiny-chat},
 precision: float32, batch_size: 4, checkpoint_path: null, max_model_len: 2048, logprob_batch_size: 4,
 resources: {gpus_per_node: 1, num_nodes: 1}, reward_model_cfg: {enabled: true, reward_model_type: bradley_terry},
 dtensor_cfg: {enabled: true, cpu_offload: false, sequence_parallel: false, tensor_parallel_size: 1},
 dynamic_batching: {enabled: false}, sequence_packing: {enabled: false}, max_grad_norm: null, generation: null,
 offload_optimizer_for_logprob: false, processor: null}""".replace("\n", "")


def loaded(*overrides: str, file: str = CPU) -> RolloutMasterConfig:
    return load_config(file, overrides, schema=GRPOMasterConfig)


def test_the_section_of_nemo_rl_is_the_section_of_ranks():
    config = loaded(f"env.reward_model={OF_NEMO_RL}", "data.default.env_name=reward_model")
    assert config.reward_model is not None
    section = config.reward_model.as_policy()
    assert isinstance(section, PolicyConfig) and section.reward_model_cfg.enabled and section.generation is None
    assert (section.max_total_sequence_length, section.logprob_batch_size) == (2048, 4)
    assert section.model_name.endswith("examples/assets/tiny-chat") and not config.reward_model.uses_gpu
    assert [key for key, _, _ in config.model_keys()] == ["policy.model_name", "env.reward_model.model_name"]


def test_an_unused_section_takes_no_devices():
    assert loaded(f"env.reward_model={OF_NEMO_RL}").reward_model is None


def test_the_reward_model_has_gpus_that_the_policy_does_not_get():
    assert not collect_errors(ONE_GPU, "grpo", ())
    config = loaded("cluster.gpus_per_node=8", "env.reward_model.resources.gpus_per_node=4", file=ONE_GPU)
    assert config.model_cluster.gpus_per_node == config.policy_cluster.gpus_per_node == 4
    several = loaded("cluster.num_nodes=3", "env.reward_model.resources.num_nodes=1", file=ONE_GPU)
    assert (several.model_cluster.num_nodes, several.cluster.num_nodes) == (2, 3)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("env.reward_model.resources.gpus_per_node=null", "resources.gpus_per_node is not set"),
        ("env.reward_model.resources.gpus_per_node=2", "leaves no device for the policy: cluster.gpus_per_node=2"),
        ("env.reward_model.enabled=false", "enabled=false, but data names the environment"),
        ("cluster.rollout_runners=1", "each runner would start a reward model of its own"),
        ("env.reward_model.reward_model_cfg.enabled=false", "gives no scores"),
        ("env.reward_model.generation={temperature: 1}", "a reward model that writes"),
        ("env.reward_model.dtensor_cfg.lora_cfg.enabled=true", "adds untrained adapters"),
        ("env.reward_model.megatron_cfg.enabled=true", "two training backends"),
        ("env.reward_model.dynamic_batching.enabled=true", "exclude each other"),
        ("env.reward_model.batch_sise=1", "batch_size"),
    ],
)
def test_contradictions_are_refused_before_anything_starts(override, reason):
    with pytest.raises(ConfigError, match=reason):
        loaded(override, file=ONE_GPU)


def test_a_checkpoint_without_a_model_is_refused(tmp_path):
    keys = [f"env.reward_model={OF_NEMO_RL}", "data.default.env_name=reward_model"]
    with pytest.raises(ConfigError, match="has no model"):
        loaded(*keys, f"env.reward_model.checkpoint_path={tmp_path}")


def test_a_checkpoint_brings_its_tokenizer(tmp_path):
    folder = tmp_path / "step_3/policy/weights/model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    keys = [f"env.reward_model={OF_NEMO_RL}", "data.default.env_name=reward_model"]
    config = loaded(*keys, f"env.reward_model.checkpoint_path={tmp_path / 'step_3'}")
    assert config.reward_model is not None and config.reward_model.ends_with_turn
    section = config.reward_model.as_policy()
    assert section.model_name == section.tokenizer.name == str(folder)


ENGINE = "{model_name: examples/assets/tiny-chat, max_model_len: 512, generation: {backend: hf, top_p: 0.9}}"
ON_ENGINES = (
    f"env.llm_judge={{engine: {ENGINE}, temperature: 0.5, max_tokens: 20}}",
    "data.default.env_name=llm_judge",
)


def test_a_judge_on_engines_has_the_section_of_a_policy():
    config = loaded(*ON_ENGINES)
    assert config.llm_judge is not None and config.llm_judge.engine is not None
    section = config.llm_judge.as_policy()
    assert section.generation is not None
    generation = section.generation
    assert (generation.backend, generation.top_p) == ("hf", 0.9)
    assert (generation.temperature, generation.max_new_tokens) == (0.5, 20)
    assert (generation.engine.max_model_len, section.precision) == (512, "bfloat16")
    assert [key for key, _, _ in config.model_keys()][1] == "env.llm_judge.engine.model_name"
    assert section.tokenizer.name.endswith("examples/assets/tiny-chat") and not config.llm_judge.engine.uses_gpu
    assert loaded(ON_ENGINES[0]).llm_judge is None  # no data names it


def test_all_judges_together_have_gpus_that_the_policy_does_not_get():
    judge = ("env.llm_judge={engine: {model_name: examples/assets/tiny-chat, resources: {gpus_per_node: 2}}}",)
    entries = (f"{{dataset_name: OpenMathInstruct-2, env_name: {name}}}" for name in ("reward_model", "llm_judge"))
    both = (*judge, f"data.train=[{', '.join(entries)}]", "grpo.val_period=0", "cluster.gpus_per_node=4")
    assert loaded(*both, file=ONE_GPU).model_cluster.gpus_per_node == 1
    with pytest.raises(ConfigError, match="leave no device for the policy: cluster.gpus_per_node=3"):
        loaded(*both[:-1], "cluster.gpus_per_node=3", file=ONE_GPU)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("env.llm_judge.base_url=http://127.0.0.1/v1", "either base_url"),
        ("env.llm_judge.engine=null", "either base_url"),
        ("env.llm_judge.model=x", "model belong to base_url"),
        ("env.llm_judge.engine.generation={temperature: 1}", "write env.llm_judge.temperature"),
        ("env.llm_judge.engine.generation={colocated: {enabled: true}}", "has no meaning for a judge"),
        ("env.llm_judge.engine.generation={top: 1}", "there is no key top"),
        ("cluster.rollout_runners=1", "start engines of its own"),
    ],
)
def test_contradictions_of_a_judge_on_engines_are_refused(override, reason):
    with pytest.raises(ConfigError, match=reason):
        loaded(*ON_ENGINES, override)


def test_a_judge_at_an_address_needs_a_model():
    with pytest.raises(ConfigError, match="name the model at base_url"):
        loaded("env.llm_judge={base_url: 'http://127.0.0.1/v1'}", "data.default.env_name=llm_judge")
