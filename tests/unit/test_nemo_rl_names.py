"""Public names of NeMo RL's examples, documentation and research code, each called as its users call it."""

import asyncio
import importlib
import inspect
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import datasets
import pytest
import ray
import torch
from omegaconf import OmegaConf

from nemo_rl.algorithms import distillation, dpo, grpo, rm, sft, start
from nemo_rl.algorithms.grpo import MasterConfig
from nemo_rl.algorithms.setup.user_parts import UserParts
from nemo_rl.algorithms.utils import get_tokenizer, set_seed
from nemo_rl.compat.public_names import ELSEWHERE, NOT_BUILT, OTHER_NAMES
from nemo_rl.config import (
    ClusterConfig,
    DistillationMasterConfig,
    DPOMasterConfig,
    GenerationConfig,
    RMMasterConfig,
    SFTMasterConfig,
)
from nemo_rl.config import load_config as load_checked
from nemo_rl.config.loading.algorithms import ALGORITHMS, algorithm_of
from nemo_rl.config.loading.all_errors import collect_errors
from nemo_rl.data.datasets import AllTaskProcessedDataset, load_response_dataset
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.utils import setup_preference_data, setup_response_data
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.user_environments import environment_of
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers
from nemo_rl.utils.errors import ConfigError, DataError, NemoRLError
from nemo_rl.utils.timer import Timer

ROOT = Path(__file__).resolve().parents[2]
GRPO = ROOT / "examples/configs/grpo_math_cpu.yaml"
CHAT = str(ROOT / "examples/assets/tiny-chat")
SUMS = {"dataset_name": "arithmetic", "num_samples": 40, "seed": 1}
ENV = {"math": {"num_workers": 1}}

NAMES = [
    ("nemo_rl.models.generation", "configure_generation_config"),
    ("nemo_rl.models.generation.interfaces", "configure_generation_config"),
    ("nemo_rl.data.utils", "setup_response_data"),
    ("nemo_rl.data.utils", "setup_preference_data"),
    ("nemo_rl.utils.logger", "log_container_init_timing"),
    *(("nemo_rl.algorithms.grpo", name) for name in ("setup", "refit_policy_generation", "shutdown_environments")),
    *(("nemo_rl.algorithms.grpo", name) for name in ("ColocatablePolicyInterface", "EnvironmentInterface", "Logger")),
    *(("nemo_rl.algorithms.grpo", name) for name in ("GenerationInterface", "StatefulDataLoader", "TokenizerType")),
    *((f"nemo_rl.algorithms.{name}", "setup") for name in ("distillation", "dpo", "rm", "sft")),
    ("nemo_rl.models.generation.vllm", "VllmGeneration"),
    ("nemo_rl.models.generation.vllm", "VllmConfig"),
    ("nemo_rl.data", "DataConfig"),
    *(("nemo_rl.data.datasets", name) for name in ("load_eval_dataset", "merge_datasets")),
    ("nemo_rl.data.datasets", "update_single_dataset_config"),
    ("nemo_rl.data.datasets.eval_datasets", "load_eval_dataset"),
    ("nemo_rl.evals.eval", "run_env_eval"),
    ("nemo_rl.evals.eval", "setup"),
    ("nemo_rl.utils.native_checkpoint", "convert_dcp_to_hf"),
    ("nemo_rl.distributed.ray_actor_environment_registry", "ACTOR_ENVIRONMENT_REGISTRY"),
    ("nemo_rl.distributed.ray_actor_environment_registry", "get_actor_python_env"),
    ("nemo_rl.distributed.virtual_cluster", "PY_EXECUTABLES"),
    ("nemo_rl.utils.prefetch_venvs", "prefetch_venvs"),
    ("nemo_rl.utils.venvs", "create_local_venv"),
    ("nemo_rl.utils.venvs", "create_local_venv_on_each_node"),
    ("nemo_rl.utils.venvs", "make_actor_runtime_env"),
    ("nemo_rl.data.datasets.response_datasets", "load_response_dataset"),
    ("nemo_rl.algorithms.grpo", "async_grpo_train"),
    *(("nemo_rl.algorithms.ppo", name) for name in ("MasterConfig", "async_ppo_train", "ppo_train", "setup")),
    *(("nemo_rl.algorithms.ppo", name) for name in ("AsyncPPOConfig", "PPOConfig", "PPOLoggerConfig", "PPOSaveState")),
    ("nemo_rl.algorithms.advantage_estimator", "GeneralizedAdvantageEstimator"),
    ("nemo_rl.algorithms.advantage_estimator", "RawRewardAdvantageEstimator"),
    *(("nemo_rl.algorithms.loss", name) for name in ("MseValueLossConfig", "MseValueLossFn")),
    ("nemo_rl.algorithms.grpo", "AsyncGRPOConfig"),
    *(("nemo_rl.agents.nemo_gym", name) for name in ("NemoGym", "NemoGymConfig", "should_use_nemo_gym")),
    *(("nemo_rl.agents.nemo_gym", name) for name in ("DEFAULT_INVALID_TOOL_CALL_PATTERNS",)),
    ("nemo_rl.agents.nemo_gym", "extract_reward_components"),
    ("nemo_rl.data.processors", "nemo_gym_data_processor"),
]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module}.{name}" for module, name in NAMES])
def test_every_name_of_nemo_rl_is_importable(module: str, name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"from {module} import {name}", namespace)
    assert namespace[name] is not None


LATER = [
    ("nemo_rl.algorithms.grpo_sync", "grpo_train_sync", "data plane"),
    ("nemo_rl.algorithms.single_controller_utils", "WatchdogConfig", "single controller"),
    ("nemo_rl.data.datasets.eval_datasets", "_is_multimodal_dataset", "VLM"),
    ("nemo_rl.experience.rollouts", "run_nemo_gym_rollout_sync", "NeMo-Gym"),
    ("nemo_rl.models.generation.vllm.config", "materialize_vllm_video_config", "VLM"),
    ("nemo_rl.models.megatron.community_import", "export_model_from_megatron", "Megatron"),
    ("nemo_rl.models.policy.tq_policy", "TQPolicy", "data plane"),
    ("nemo_rl.models.policy.utils", "get_runtime_env_for_policy_worker", "policy workers"),
    ("nemo_rl.models.policy.workers.dtensor_policy_worker_v2", "DTensorPolicyWorkerV2Impl", "policy workers"),
    ("nemo_rl.utils.checkpoint_engines.base", "CheckpointEngine", "checkpoint engines"),
    ("nemo_rl.utils.checkpoint_engines", "create_checkpoint_engine", "checkpoint engines"),
    ("nemo_rl.distributed.checkpoint_engine", "create_checkpoint_engine", "checkpoint engines"),
    ("nemo_rl.models.generation.sglang", "SGLangGeneration", "SGLang"),
    ("nemo_rl.models.generation.sglang.sglang_generation", "SGLangGeneration", "SGLang"),
]


@pytest.mark.parametrize(("module", "name", "feature"), LATER, ids=[f"{module}.{name}" for module, name, _ in LATER])
def test_a_name_of_a_later_feature_raises_with_its_feature(module: str, name: str, feature: str) -> None:
    with pytest.raises(ImportError, match=f"belongs to .*{feature}.*not built yet") as refused:
        exec(f"from {module} import {name}")
    assert isinstance(refused.value, NemoRLError)


def test_the_version_is_that_of_the_project() -> None:
    import nemo_rl

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert nemo_rl.__version__ == project["version"]


def test_dev_and_test_are_extras_and_groups() -> None:
    """`uv sync --extra dev` installs what `--group dev` does: each is written once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    for name, tool in (("dev", "ruff"), ("test", "pytest")):
        assert groups[name] == [f"nemo-rl[{name}]"]
        assert any(text.startswith(f"{tool}>=") for text in extras[name])
    assert "nemo-rl[test]" in extras["dev"]


PEERS_FILES = {
    "grpo_math_8B": "grpo",
    "grpo_smoke": "grpo",
    "gdpo_math_1B": "grpo",
    "prorlv2.v2": "grpo",
    "sft_openmathinstruct2": "sft",
    "distillation_math_megatron": "distillation",
}


@pytest.mark.parametrize("name", PEERS_FILES)
def test_a_config_file_under_nemo_rls_name_loads(name: str) -> None:
    path = ROOT / f"examples/configs/{name}.yaml"
    config = load_checked(path, schema=ALGORITHMS[PEERS_FILES[name]])
    assert algorithm_of(path) == PEERS_FILES[name] and collect_errors(path, PEERS_FILES[name]) == []
    prompt = config.data.train_entries[0].prompt_file
    assert prompt is None or "Is 7 odd?" in Path(prompt).read_text().format("Is 7 odd?")


@pytest.mark.parametrize("module", ELSEWHERE)
def test_a_module_under_another_name_raises_with_the_new_name(module: str) -> None:
    """The error names a path that exists."""
    with pytest.raises(ImportError, match=re.escape(f"there is no {module} here: ")) as refused:
        importlib.import_module(module)
    assert isinstance(refused.value, NemoRLError) and not (ROOT / f"{module.replace('.', '/')}.py").exists()
    for name in re.findall(r"\bnemo_rl(?:\.\w+)+", ELSEWHERE[module]):
        importlib.import_module(name)


@pytest.mark.parametrize("module", OTHER_NAMES)
def test_a_function_under_another_name_raises_with_the_new_name(module: str) -> None:
    for name, instead in OTHER_NAMES[module].items():
        with pytest.raises(ImportError, match=re.escape(f"there is no {module}.{name} here: ")) as refused:
            exec(f"from {module} import {name}")
        assert isinstance(refused.value, NemoRLError)
        home, _, new_name = re.findall(r"\bnemo_rl(?:\.\w+)+", instead)[0].rpartition(".")
        assert hasattr(importlib.import_module(home), new_name)


def test_no_existing_name_is_listed_as_a_later_feature() -> None:
    """No name that exists is in the table of missing ones."""
    for module, (_, names) in NOT_BUILT.items():
        path = ROOT / module.replace(".", "/")
        assert (path.with_suffix(".py").exists() or path.is_dir()) == bool(names), module
        if names:
            assert not set(names) & set(vars(importlib.import_module(module)))


def test_unknown_names_raise_ordinary_errors() -> None:
    with pytest.raises(ImportError, match="cannot import name 'grpo_trian'"):
        exec("from nemo_rl.algorithms.grpo import grpo_trian")
    with pytest.raises(ModuleNotFoundError, match="No module named 'nemo_rl.no_such'"):
        exec("import nemo_rl.no_such")


SETUPS = [
    (grpo, "dataset"),
    (distillation, "train_dataset"),
    (sft, "train_dataset"),
    (dpo, "train_dataset"),
    (rm, "train_dataset"),
]


@pytest.mark.parametrize(("algorithm", "rows"), SETUPS, ids=["grpo", "distillation", "sft", "dpo", "rm"])
def test_setup_has_the_arguments_of_nemo_rl(algorithm: Any, rows: str) -> None:
    arguments = list(inspect.signature(algorithm.setup).parameters)
    assert arguments[:4] == ["master_config", "tokenizer", rows, "val_dataset"]


def plain_config(*overrides: str) -> dict[str, Any]:
    """Make a configuration as NeMo RL's scripts do."""
    register_omegaconf_resolvers()
    config = parse_hydra_overrides(load_config(GRPO), list(overrides))
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return plain


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return get_tokenizer({"name": CHAT})


def test_a_configuration_can_be_used_as_in_nemo_rl_scripts(tokenizer: Any, tmp_path: Path) -> None:
    from nemo_rl.utils.logger import get_next_experiment_dir, log_container_init_timing

    config = MasterConfig(**plain_config("grpo.max_num_steps=3"))
    log_container_init_timing()
    config.logger["log_dir"] = str(tmp_path)
    config.logger["log_dir"] = get_next_experiment_dir(config.logger["log_dir"])
    assert config.logger.log_dir == str(tmp_path / "exp_001")
    config.policy["generation"] = configure_generation_config(config.policy["generation"], tokenizer)
    assert config.policy["generation"]["stop_token_ids"] == [tokenizer.eos_token_id]
    assert config["policy"]["generation"]["vllm_cfg"]["tensor_parallel_size"] == 1
    config["policy"]["generation"]["vllm_cfg"]["gpu_memory_utilization"] = 0.5
    assert config.policy.generation.engine.gpu_memory_utilization == 0.5
    assert config.policy.generation.vllm_cfg.gpu_memory_utilization == 0.5
    assert "gpu_memory_utilization" in config.policy.generation.vllm_cfg
    assert {**config.loss_fn}["ratio_clip_min"] == config.loss_fn.ratio_clip_min
    assert config.grpo.get("max_num_steps") == 3
    assert config.grpo.get("no_such_key", 7) == 7
    assert list(config)[:2] == ["policy", "data"]
    with pytest.raises(ConfigError, match="max_model_len"):
        config["policy"]["generation"]["vllm_cfg"]["max_model_len"] = -1
    with pytest.raises(KeyError, match="no_such_key is not a key here"):
        config["grpo"]["no_such_key"]


def test_a_section_assigned_as_a_dict_is_filled_in() -> None:
    config = load_checked(GRPO, schema=MasterConfig)
    config["policy"]["generation"] = {"temperature": 0.5, "vllm_cfg": {"max_model_len": 64}}
    generation = config.policy.generation
    assert isinstance(generation, GenerationConfig)
    assert (generation.engine.max_model_len, generation.val_temperature, generation.top_p) == (64, 0.5, 1.0)


@pytest.mark.parametrize(
    "config",
    [
        {"stop_token_ids": None},
        GenerationConfig.build(max_new_tokens=8, engine={"max_model_len": 16, "precision": "float32"}),
    ],
    ids=["dict", "section"],
)
def test_configure_generation_config_sets_the_stop_tokens(config: Any, tokenizer: Any) -> None:
    made = configure_generation_config(config, tokenizer, is_eval=True)
    assert made is config
    assert made["stop_token_ids"] == [tokenizer.eos_token_id]
    assert configure_generation_config(config, tokenizer, trains_mtp=True) is config


def test_setup_response_data_returns_data_and_environments(tokenizer: Any) -> None:
    data = {"max_input_seq_length": 64, "train": SUMS, "validation": {**SUMS, "seed": 2}}
    train, val, environments, val_environments = setup_response_data(tokenizer, data, ENV)  # type: ignore[misc]
    assert (len(train), len(val)) == (40, 40)
    assert train[0]["task_name"] == "math"
    assert environments["math"].num_workers == 1
    assert environments["math"].timeout_s == 10.0
    assert val_environments == environments
    assert len(setup_response_data(tokenizer, data)) == 2
    with pytest.raises(NemoRLError, match="VLM"):
        setup_response_data(tokenizer, data, ENV, is_vlm=True)


def test_setup_preference_data_returns_train_and_validation(tokenizer: Any, tmp_path: Path) -> None:
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n' * 4)
    entry = {"dataset_name": "BinaryPreferenceDataset", "data_path": str(rows)}
    data = {"max_input_seq_length": 64, "train": entry, "validation": [{**entry, "name": "held"}, entry]}
    train, val = setup_preference_data(tokenizer, data)
    assert len(train) == 4
    assert {name: len(part) for name, part in val.items()} == {"held": 4, "default": 4}
    user_parts = UserParts(tokenizer, train, val)
    config = user_parts.checked(
        load_checked(ROOT / "examples/configs/dpo_cpu.yaml", schema=DPOMasterConfig), DPOMasterConfig
    )
    made = dpo.recipe(config, user_parts).data
    assert made.validation is val["default"]
    assert made.named_validation == {"held": val["held"]}


def test_load_response_dataset_returns_a_dataset_with_its_parts(tokenizer: Any) -> None:
    data = load_response_dataset({**SUMS, "split_validation_size": 0.25})
    assert len(data.val_dataset or ()) == 10
    processors = {data.task_name: (data.task_spec, data.processor)}
    rows = AllTaskProcessedDataset(data.dataset, tokenizer, data.task_spec, processors, max_seq_length=64)  # type: ignore[arg-type]
    assert rows[0]["extra_env_info"]["ground_truth"]


def test_load_eval_dataset_returns_its_rows(tokenizer: Any) -> None:
    from nemo_rl.data.datasets import load_eval_dataset

    problems = load_eval_dataset({"dataset_name": "arithmetic", "num_samples": 5, "max_input_seq_length": 64})
    rows = AllTaskProcessedDataset(
        dataset=problems.rows,
        tokenizer=tokenizer,
        default_task_data_spec=problems.task_spec,
        task_data_processors=problems.processor,
        max_seq_length=64,
    )
    assert len(rows) == 5
    assert rows[4]["extra_env_info"]["ground_truth"] == problems.raw.dataset[4]["messages"][1]["content"]


def test_merge_datasets_concatenates_rows() -> None:
    from nemo_rl.data.datasets import merge_datasets

    first, second = (datasets.Dataset.from_dict({"a": values}) for values in ([1, 2], [3]))
    assert merge_datasets([first, second])["a"][:] == [1, 2, 3]
    assert merge_datasets([first]) is first
    assert list(merge_datasets([[1, 2], first])) == [1, 2, {"a": 1}, {"a": 2}]
    with pytest.raises(DataError, match="at least one"):
        merge_datasets([])


def test_update_single_dataset_config_fills_in_defaults() -> None:
    from nemo_rl.data.datasets import update_single_dataset_config

    entry: dict[str, Any] = {"dataset_name": "gsm8k", "prompt_file": None}
    update_single_dataset_config(entry, {"prompt_file": "cot.txt", "env_name": "math"})
    assert entry == {"dataset_name": "gsm8k", "prompt_file": None, "env_name": "math"}


def test_data_config_builds_from_keywords() -> None:
    from nemo_rl.data import DataConfig

    assert DataConfig.build(train=SUMS)["train"]["dataset_name"] == "arithmetic"


def test_timer_accepts_should_log() -> None:
    timer = Timer({"run": 1})
    timer.start("a", should_log=False)
    timer.stop("a", should_log=False)
    with timer.time("b", should_log=False):
        pass
    assert sorted(timer.get_timing_metrics("sum")) == ["a", "b"]
    set_seed(1)


def test_losses_accept_a_dict() -> None:
    from nemo_rl.algorithms.loss import ClippedPGLossFn, DistillationLossFn

    assert not ClippedPGLossFn({"reference_policy_kl_penalty": 0.0}).needs_reference
    assert DistillationLossFn({"kl_type": "reverse"}).cfg.kl_type == "reverse"
    with pytest.raises(ConfigError, match="ratio_clip"):
        ClippedPGLossFn({"ratio_clip_min": "x"})


def test_unpacking_a_run_is_refused_with_advice() -> None:
    from nemo_rl.algorithms.runtime.run import Run

    run = Run(*[None] * 7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=re.escape("run = setup(...)")):
        _policy, _generation = run


# Parts passed by the user, without starting anything


class Own(EnvironmentInterface):
    """An environment that rewards every answer."""

    def __init__(self, cfg: dict[str, Any] | None = None) -> None:
        self.reward = (cfg or {}).get("reward", 0.25)

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
        """Return the same for each sample."""
        num = len(metadata)
        rewards, ended = torch.full((num,), self.reward), torch.ones(num, dtype=torch.bool)
        return EnvironmentReturn([{"role": "environment", "content": ""}] * num, metadata, [None] * num, rewards, ended)

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        """Count the batches."""
        return batch, {"seen": len(batch["rewards"])}


class OwnLoss:
    """A loss as NeMo RL's users write it."""


def own_processor(row: Any, spec: Any, tokenizer: Any, max_seq_length: Any, idx: int) -> dict[str, Any]:
    ids = torch.tensor(tokenizer(row, add_special_tokens=False)["input_ids"])
    log = [{"role": "user", "content": row, "token_ids": ids}]
    return {
        "message_log": log,
        "length": len(ids),
        "extra_env_info": {},
        "loss_multiplier": 1.0,
        "idx": idx,
        "task_name": spec.task_name,
    }


def own_rows(tokenizer: Any, task: str = "own") -> AllTaskProcessedDataset:
    return AllTaskProcessedDataset(["1+1=", "2+2=", "3+3="] * 4, tokenizer, TaskDataSpec(task), own_processor)  # type: ignore[arg-type]


def test_grpo_setup_accepts_tokenizer_data_environments_and_loss(tokenizer: Any) -> None:
    rows, loss = own_rows(tokenizer), OwnLoss()
    user_parts = UserParts(tokenizer, rows, rows, {"own": Own}, loss)
    config = user_parts.checked(plain_config(), MasterConfig)
    made = grpo.recipe(config, user_parts)
    assert made.tokenizer is tokenizer
    assert made.loss_fn is loss
    assert dict(made.sampling.environments) == {"own": Own}
    assert (len(made.data.train), len(made.data.validation or ())) == (12, 12)
    assert made.data.task_env == {"own": "own"}
    assert config.env["own"] == {}
    assert config.data.train is None
    assert grpo.forward_passes(config, loss, for_credit=False) == (True, False)  # type: ignore[arg-type]


def test_a_config_needs_no_data_entries_if_rows_are_passed(tokenizer: Any) -> None:
    plain = plain_config()
    plain["data"] = {"num_workers": 0}
    with pytest.raises(ConfigError, match="data.train is empty"):
        UserParts().checked(plain, MasterConfig)
    assert UserParts(dataset=own_rows(tokenizer)).checked(plain, MasterConfig).data.num_workers == 0


def test_a_dict_is_checked_as_a_file_is() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'grpo.max_num_steps'"):
        UserParts().checked(plain_config("+grpo.max_num_step=3"), MasterConfig)
    with pytest.raises(ConfigError, match="train_global_batch_size"):
        UserParts().checked(plain_config("policy.train_global_batch_size=63"), MasterConfig)
    with pytest.raises(ConfigError, match="takes a GRPOMasterConfig"):
        UserParts().checked(load_checked(ROOT / "examples/configs/sft_cpu.yaml", schema=SFTMasterConfig), MasterConfig)  # type: ignore[arg-type]


def test_wrong_parts_are_refused_before_ray_starts(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "init_ray", lambda *_: pytest.fail("Ray was started"))
    rows = own_rows(tokenizer)
    with pytest.raises(ConfigError, match="task 'own', which no environment rewards; there are: math"):
        grpo.setup(plain_config(), tokenizer, rows)
    with pytest.raises(ConfigError, match="is not an environment"):
        grpo.setup(plain_config(), tokenizer, rows, environments={"own": OwnLoss})
    with pytest.raises(DataError, match="has no len"):
        grpo.setup(plain_config(), tokenizer, iter([]), environments={"own": Own})
    with pytest.raises(DataError, match="no task_name"):
        grpo.setup(plain_config(), tokenizer, [{"message_log": [], "length": 0}], environments={"own": Own})
    with pytest.raises(DataError, match="one data loader for each set"):
        grpo.setup(plain_config(), tokenizer, {"a": rows}, environments={"own": Own})


@pytest.mark.parametrize(
    ("algorithm", "file", "schema", "rows_per_unit"),
    [
        (sft, "sft_cpu.yaml", SFTMasterConfig, 1),
        (dpo, "dpo_cpu.yaml", DPOMasterConfig, 2),
        (rm, "rm_cpu.yaml", RMMasterConfig, 2),
        (distillation, "distillation_math_cpu.yaml", DistillationMasterConfig, 1),
    ],
    ids=["sft", "dpo", "rm", "distillation"],
)
def test_the_other_setups_accept_parts_too(
    algorithm: Any, file: str, schema: Any, rows_per_unit: int, tokenizer: Any
) -> None:
    loss = OwnLoss()
    plain = load_config(ROOT / "examples/configs" / file)
    user_parts = UserParts(tokenizer, own_rows(tokenizer), None, {}, loss)
    made = algorithm.recipe(user_parts.checked(plain, schema), user_parts)
    assert made.tokenizer is tokenizer
    assert made.loss_fn is loss
    assert loss.rows_per_unit == rows_per_unit  # type: ignore[attr-defined]
    assert (len(made.data.train), made.data.validation) == (12, None)


def test_eval_setup_accepts_tokenizer_and_data(tokenizer: Any) -> None:
    from nemo_rl.evals.eval import setup

    plain = OmegaConf.to_container(load_config(ROOT / "examples/configs/evals/eval_cpu.yaml"), resolve=True)
    generation, dataloader, config = setup(plain, tokenizer, own_rows(tokenizer))  # type: ignore[arg-type]
    assert generation.tokenizer is tokenizer
    assert len(dataloader) == 12
    assert dataloader.batch(1, 3)["task_name"] == ["own", "own"]
    assert config.data.env_name == "math"


# With Ray: engines, a policy and user environments


@pytest.fixture(scope="module")
def cpu_cluster(local_ray: Path) -> Any:
    cluster = RayVirtualCluster(
        bundle_ct_per_node_list=[1], use_gpus=False, max_colocated_worker_groups=2, num_gpus_per_node=1, name="names"
    )
    yield cluster
    cluster.shutdown()


@pytest.mark.ray
def test_engines_and_policy_work_without_a_run(cpu_cluster: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Generate, refit with an untrained and a trained policy, and export, as research code does."""
    from nemo_rl.algorithms.grpo import refit_policy_generation
    from nemo_rl.algorithms.loss import NLLLossFn
    from nemo_rl.data.chat_batch import chat_batch
    from nemo_rl.models.generation.vllm import VllmConfig, VllmGeneration
    from nemo_rl.models.policy.lm_policy import Policy
    from nemo_rl.utils.native_checkpoint import convert_dcp_to_hf

    policy_config = load_checked(GRPO, schema=MasterConfig).policy
    engine = {"max_model_len": 64, "precision": "float32"}
    config = configure_generation_config(
        VllmConfig(backend="hf", model_name=CHAT, max_new_tokens=12, vllm_cfg=engine, top_k=None),
        tokenizer,
        is_eval=True,
    )
    policy = Policy(cpu_cluster, policy_config.model_dump(), tokenizer, init_reference_model=False)
    generation = VllmGeneration(cluster=cpu_cluster, config=config)
    try:
        prompts = [
            tokenizer(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
            for text in ("10+11=", "3+4=")
        ]
        width = max(map(len, prompts))
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in prompts])
        data = BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor([len(row) for row in prompts])})
        before = generation.generate(data, greedy=True)
        for row, prompt in enumerate(prompts):
            assert before["output_ids"][row, : len(prompt)].tolist() == prompt
            assert before["unpadded_sequence_lengths"][row] == len(prompt) + before["generation_lengths"][row]
            assert (before["logprobs"][row, : len(prompt)] == 0).all()
        own = policy.get_logprobs(
            BatchedDataDict(input_ids=before["output_ids"], input_lengths=before["unpadded_sequence_lengths"])
        )["logprobs"]
        answered = before["logprobs"] != 0
        assert torch.allclose(own[answered], before["logprobs"][answered], atol=1e-4)
        text = generation.generate_text(BatchedDataDict({"prompts": [tokenizer.decode(prompts[0])]}), greedy=True)
        assert len(text["texts"]) == 1
        batch = chat_batch(tokenizer, [[{"role": "user", "content": "10+11="}, {"role": "assistant", "content": "no"}]])
        for _ in range(8):
            policy.train(batch, NLLLossFn(), gbs=1)
        timer = Timer()
        told = refit_policy_generation(policy, generation, colocated_inference=True, timer=timer)
        assert told["num_tensors"] > 5
        assert timer.get_elapsed("refit")
        after = generation.generate(data, greedy=True)
        scored = policy.get_logprobs(
            BatchedDataDict(input_ids=after["output_ids"], input_lengths=after["unpadded_sequence_lengths"])
        )["logprobs"]
        answered = after["logprobs"] != 0
        assert torch.allclose(scored[answered], after["logprobs"][answered], atol=1e-4)
        assert not torch.equal(after["logprobs"], before["logprobs"])
        policy.save_checkpoint(tmp_path / "step_1/policy/weights")
        arguments = {"model_name_or_path": CHAT, "tokenizer_name_or_path": CHAT, "hf_overrides": {"note": 3}}
        exported = convert_dcp_to_hf(str(tmp_path / "step_1/policy/weights"), str(tmp_path / "hf"), **arguments)  # type: ignore[arg-type]
        assert exported == str(tmp_path / "hf")
        assert '"note": 3' in (tmp_path / "hf/config.json").read_text()
        with pytest.raises(NemoRLError, match="not empty"):
            convert_dcp_to_hf(str(tmp_path / "step_1/policy/weights"), str(tmp_path / "hf"), CHAT, CHAT)
        convert_dcp_to_hf(str(tmp_path / "step_1/policy/weights"), str(tmp_path / "hf"), CHAT, CHAT, overwrite=True)
        assert "note" not in (tmp_path / "hf/config.json").read_text()
    finally:
        generation.shutdown()
        policy.shutdown()


@pytest.mark.ray
@pytest.mark.asyncio
async def test_environments_of_every_kind_give_rewards(cpu_cluster: Any, request: pytest.FixtureRequest) -> None:
    """A class, an object, an actor of the program's own and a client; concurrently, because each starts a process."""
    from nemo_rl.algorithms.grpo import shutdown_environments
    from nemo_rl.environments.registry import ENV_REGISTRY
    from nemo_rl.environments.utils import create_env, register_env

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # an actor cannot import a test as a module
    register_env("own_for_names", f"{__name__}.Own")
    request.addfinalizer(lambda: ENV_REGISTRY.pop("own_for_names"))
    remote = ray.remote(num_cpus=0)(Own)
    actor = remote.remote({"reward": 0.5})
    given = [remote, Own({"reward": 0.5}), actor, create_env("own_for_names", {"reward": 0.5})]
    running: list[Any] = [environment_of("own", one) for one in given]
    running = [one({"reward": 0.5}, ClusterConfig()) if callable(one) else one for one in running]
    assert running[-1] is given[-1]
    log = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    for result in await asyncio.gather(*(one.step(log, {"idx": 3}) for one in running)):
        assert (result.reward, result.error, result.metadata) == (0.5, None, {"idx": 3})
    batch = BatchedDataDict(rewards=torch.zeros(3))
    for _, metrics in await asyncio.gather(*(one.global_post_process_and_metrics(batch) for one in running)):
        assert metrics == {"seen": 3}
    for one in running[:3]:
        one.shutdown()
    assert ray.get(actor.step.remote([log], [{}])).rewards.tolist() == [0.5]  # the program's own actor keeps running
    shutdown_environments({"actor": actor, "client": given[3], "class": Own}, {"actor": actor})
    with pytest.raises(ray.exceptions.RayActorError):
        for _ in range(100):  # Ray does not wait until a killed actor has exited
            ray.get(actor.step.remote([log], [{}]))
            await asyncio.sleep(0.1)
    with pytest.raises(NemoRLError, match="shut down"):
        await running[3].step(log, {})
