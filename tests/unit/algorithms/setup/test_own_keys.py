"""The own keys of an environment, an engine and a training backend, checked before anything starts."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
from pydantic import PositiveInt

from nemo_rl.config import ClusterConfig, GRPOMasterConfig, PolicyConfig, load_config
from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.launch.checks import Moment, make_checks
from nemo_rl.models.generation.factory import check_engine_model, engine_settings
from nemo_rl.models.generation.stepped import SteppedEngine
from nemo_rl.models.training.backends import TrainingBackend, training_backend
from nemo_rl.utils.errors import ConfigError

GRPO = "examples/configs/grpo_math_cpu.yaml"
CLUSTER = ClusterConfig(device="cpu", gpus_per_node=0)


@dataclass
class Board:
    rows: PositiveInt
    name: str = "chess"


class Game(EnvironmentInterface):
    config_class: ClassVar[type | None] = Board

    def step(self, message_log_batch, metadata):
        raise NotImplementedError


class Engine(SteppedEngine):
    config_class: ClassVar[type | None] = Board


for _name in SteppedEngine.__abstractmethods__:
    setattr(Engine, _name, lambda self, *args: None)
Engine.__abstractmethods__ = frozenset()


class Backend(TrainingBackend):
    rank_class = "unused"
    config_class: ClassVar[type | None] = Board


for _name in TrainingBackend.__abstractmethods__:
    setattr(Backend, _name, lambda self, *args: None)
Backend.__abstractmethods__ = frozenset()

WRONG = [
    ({"rows": 3, "nam": "go"}, r"\.nam is no argument of Board. Did you mean 'name'"),
    ({"rows": 0}, r"\.rows=0 does not fit Board: Input should be greater than 0"),
    ({}, r"\.rows has no value, and Board needs it"),
]


@pytest.mark.parametrize(("keys", "message"), WRONG)
def test_keys_of_an_environment(keys, message):
    name = f"{__name__}.Game"
    overrides = [f"data.default.env_name={name}", f"+env={{{name}: {{rows: 3}}}}"]
    config = load_config(GRPO, overrides, schema=GRPOMasterConfig)
    make_checks(config, Moment.LIBRARIES)
    config.env[name] = keys
    with pytest.raises(ConfigError, match=rf"env\.{name}{message}"):
        make_checks(config, Moment.LIBRARIES)


@pytest.mark.parametrize(("keys", "message"), WRONG)
def test_keys_of_an_engine(keys, message):
    def of(engine_kwargs: dict) -> PolicyConfig:
        generation = {"backend": f"{__name__}.Engine", "engine_kwargs": engine_kwargs}
        return PolicyConfig.build(model_name="m", generation=generation, optimizer=None)

    check_engine_model(of({"rows": 3}), CLUSTER)
    assert engine_settings(of({"rows": 3}), CLUSTER, 0, load_weights=False).engine_kwargs == {"rows": 3}
    with pytest.raises(ConfigError, match=rf"policy\.generation\.engine_kwargs{message}"):
        check_engine_model(of(keys), CLUSTER)


@pytest.mark.parametrize(("keys", "message"), WRONG)
def test_keys_of_a_training_backend(keys, message):
    def of(kwargs: dict) -> PolicyConfig:
        section = {"name": f"{__name__}.Backend", "kwargs": kwargs}
        return PolicyConfig.build(model_name="m", dtensor_cfg={"enabled": False}, training_backend=section)

    assert type(training_backend(of({"rows": 3}))) is Backend
    with pytest.raises(ConfigError, match=rf"policy\.training_backend\.kwargs{message}"):
        training_backend(of(keys))
