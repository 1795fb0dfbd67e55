"""What a machine lacks for a configuration: found before Ray starts."""

import socket
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from nemo_rl.algorithms import grpo, sft, start
from nemo_rl.config import REPOSITORY_ROOT, GRPOMasterConfig, SFTMasterConfig, load_config
from nemo_rl.config.base.names import ROW
from nemo_rl.environments.workers.loading import load_env_class
from nemo_rl.launch.checks import Moment, make_checks, recipe_of
from nemo_rl.launch.command_line import launch
from nemo_rl.models.capacity.hub_configs import with_local_configs
from nemo_rl.models.huggingface.reachable import TIMEOUT_VARIABLE, TOKENIZER_FILE, check_reachable
from nemo_rl.utils.errors import ConfigError, DataError

SFT = REPOSITORY_ROOT / "examples/configs/sft_cpu.yaml"
GRPO = REPOSITORY_ROOT / "examples/configs/grpo_math_cpu.yaml"
LINEAR = "torch.optim.lr_scheduler.LinearLR"

OWN_ENVIRONMENT = """
from nemo_rl.environments.interfaces import EnvironmentInterface

class Mine(EnvironmentInterface):
    def step(self, message_log_batch, metadata, return_extracted_answer=False): ...
    def global_post_process_and_metrics(self, batch): ...
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.optimizer.name=torch.optim.AdamX", "policy.optimizer.name='torch.optim.AdamX' cannot be imported"),
        (
            "+policy.optimizer.kwargs.lrr=1",
            "do not fit torch.optim.AdamW: it has no argument lrr. Did you mean 'lr'",
        ),
        (
            "policy.optimizer.kwargs.lr=-1",
            "policy.optimizer.kwargs do not fit torch.optim.AdamW: Invalid learning rate",
        ),
        ("policy.scheduler={name: mine.Nope, kwargs: {}}", "policy.scheduler.name='mine.Nope' cannot be imported"),
        (f"policy.scheduler={{name: {LINEAR}, kwargs: {{start: 1}}}}", f"kwargs do not fit {LINEAR}"),
        (f"policy.scheduler={{name: {LINEAR}, kwargs: {{start_factor: 7}}}}", f"kwargs do not fit {LINEAR}"),
    ],
)
def test_optimizer_and_schedule(override, message):
    make_checks(load_config(SFT, schema=SFTMasterConfig), Moment.LIBRARIES)
    with pytest.raises(ConfigError, match=message):
        make_checks(load_config(SFT, [override], schema=SFTMasterConfig), Moment.LIBRARIES)


def test_environments_that_the_data_asks_for():
    with pytest.raises(ConfigError, match="unknown environment 'mathe'. Did you mean 'math'?"):
        config = load_config(GRPO, ["+env.mathe={}", "data.default.env_name=mathe"], schema=GRPOMasterConfig)
        make_checks(config, Moment.LIBRARIES)
    with pytest.raises(ConfigError, match="env.mathe is used by no data"):
        load_config(GRPO, ["+env.mathe={}"], schema=GRPOMasterConfig)
    inherited = load_config(GRPO, ["+env.code={}"], schema=GRPOMasterConfig)  # as an inherited file may have it
    make_checks(inherited, Moment.LIBRARIES)


def test_what_is_wrong_before_any_file_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NRL_LOG_LEVEL", "bogus")
    assert launch("", GRPO, GRPOMasterConfig, print, []) == 2
    assert "ConfigError: NRL_LOG_LEVEL=BOGUS is not a log level; choose one of DEBUG" in capsys.readouterr().err
    monkeypatch.delenv("NRL_LOG_LEVEL")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert launch("", GRPO, GRPOMasterConfig, print, []) == 2
    assert "ConfigError: the current folder does not exist any more" in capsys.readouterr().err


def test_a_class_in_the_folder_the_run_was_started_from(tmp_path, monkeypatch, capsys):
    """As with `python /elsewhere/run_grpo.py`: Python itself looks next to the script only."""
    Path("own_environment_here.py").write_text(OWN_ENVIRONMENT)
    path = [entry for entry in sys.path if entry not in ("", str(tmp_path))]
    monkeypatch.setattr("sys.path", path)
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_env_class("own_environment_here.Mine")
    keys = ["+env={own_environment_here.Mine: {}}", "data.default.env_name=own_environment_here.Mine"]
    ran = []
    assert launch("", GRPO, GRPOMasterConfig, ran.append, keys) == 0, capsys.readouterr().err
    assert len(ran) == 1 and sys.path[-1] == str(tmp_path)


def test_environments_of_reward_functions_with_two_own_names() -> None:
    entries = [f"{{dataset_name: arithmetic, num_samples: 8, env_name: {name}}}" for name in ("first", "second")]
    keys = [f"data.train=[{','.join(entries)}]", "data.validation.env_name=first", "env.second.stop_strings=[x]"]
    functions = ["env.first.function=builtins.len", "env.second.function={a: builtins.len, b: math.nosuch}"]
    config = load_config(GRPO, [*functions, *keys])
    with pytest.raises(ConfigError, match=r"env\.second\.function\.b='math\.nosuch' cannot be imported"):
        make_checks(config, Moment.LIBRARIES)
    config.env["second"]["function"] = "builtins.len"
    make_checks(config, Moment.LIBRARIES)
    rows = recipe_of(config).data.train
    assert [rows[index]["task_name"] for index in (0, 8)] == ["first", "second"]
    assert [rows[index].get("stop_strings") for index in (0, 8)] == [None, ["x"]]
    assert all(ROW in rows[index]["extra_env_info"] for index in (0, 8))


def test_a_hub_that_does_not_answer(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv(TIMEOUT_VARIABLE, "0.3")
        started = time.monotonic()
        with pytest.raises(
            ConfigError, match=f"and the hub at {endpoint} (gave no answer in 0.3 s|could not be reached)"
        ):
            check_reachable("policy.model_name", "no-such-user/nothing")
        assert time.monotonic() - started < 20


@pytest.mark.parametrize("name", ["tiny-chatt", "tinychat"])
def test_a_misspelled_model_of_the_library_is_suggested(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    models = "Models of the library: tiny-chat, tiny-player, tiny-teacher, tiny-tools, tiny-vision"
    with pytest.raises(ConfigError, match=rf"Did you mean 'tiny-chat'\? {models}\.$"):
        check_reachable("policy.model_name", name)
    config = load_config("grpo_math_cpu.yaml", [f"policy.model_name={name}"])
    with pytest.raises(ConfigError, match=rf"Did you mean 'tiny-chat'\? {models}\.$"):
        with_local_configs(config)


def test_folders_and_names(tmp_path):
    check_reachable("policy.model_name", str(REPOSITORY_ROOT / "examples/assets/tiny-chat"))
    check_reachable("policy.tokenizer.name", str(tmp_path), TOKENIZER_FILE)
    with pytest.raises(ConfigError, match=r"is a folder without config\.json"):
        check_reachable("policy.model_name", str(tmp_path))
    for name in ("a b", "-x", "a..b"):
        with pytest.raises(ConfigError, match="neither an existing folder nor a hub id"):
            check_reachable("policy.model_name", name)


def test_models_in_the_cache_of_the_hub_need_no_network(tmp_path, monkeypatch):
    commit = "0" * 40
    folder = tmp_path / "models--no-such-user--something"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "snapshots" / commit / "config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_reachable("policy.model_name", "no-such-user/something")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        check_reachable("policy.model_name", "no-such-user/else")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train.num_samples=4", "the data set has 4 rows, fewer than one batch"),
        ("logger.wandb_enabled=true", "login"),
    ],
)
@pytest.mark.parametrize(
    ("setup", "path", "schema"),
    [(grpo.setup, GRPO, GRPOMasterConfig), (sft.setup, SFT, SFTMasterConfig)],
)
def test_what_can_be_refused_is_refused_before_ray(monkeypatch, setup, path, schema, override, message):
    monkeypatch.setattr(start, "init_ray", lambda *_: pytest.fail("Ray was started"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", "absent")
    with pytest.raises((ConfigError, DataError), match=message):
        setup(load_config(path, [override], schema=schema))
