"""Parts chosen by a name: what is accepted, and what is refused before anything starts."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

import pytest
from pydantic import BaseModel, PositiveInt

from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.named_parts import Registry, check_own_keys, fitting_arguments


class Scale(Protocol):
    unit: str

    def weigh(self, mass: float) -> float: ...

    def reset(self) -> None: ...


class KitchenScale:
    unit = "g"

    def __init__(self, factor: float, labels: list[str] | None = None):
        if factor <= 0:
            raise ValueError("factor must be positive")
        self.factor, self.labels = factor, labels

    def weigh(self, mass: float) -> float:
        return mass * self.factor

    def reset(self) -> None:
        pass


class WrappedScale:
    def __init__(self, inner: Scale, extra: int = 0):
        self.inner, self.extra = inner, extra

    def __getattr__(self, name: str):
        return getattr(self.inner, name)


class NoReset:
    unit = "g"

    def weigh(self, mass: float) -> float:
        return mass


class OnlyDerived(Scale):
    """It inherits the protocol's empty methods, and has none of its own."""


class NoUnit:
    def weigh(self, mass: float) -> float:
        return mass

    def reset(self) -> None:
        pass


class Shelf(ABC):
    @abstractmethod
    def put(self) -> None: ...


class Board(Shelf):
    def put(self) -> None:
        pass


class HalfBoard(Shelf):
    pass


SCALES: Registry[Scale] = Registry("scale", Scale, {"kitchen": f"{__name__}.KitchenScale"}, attributes=("unit",))
SHELVES: Registry[Shelf] = Registry("open shelf", Shelf)


def make(name: str, **arguments: object) -> Scale:
    return SCALES.make(f"{__name__}.{name}", "shop.scale", arguments)


def test_a_built_in_name_and_a_path_lead_to_classes() -> None:
    assert SCALES.class_of("kitchen", "x") is SCALES.class_of(f"{__name__}.KitchenScale", "x")
    assert SHELVES.class_of(f"{__name__}.Board", "x") is Board
    assert [SCALES.is_own(name) for name in ("kitchen", "my.Scale", "kitchn")] == [False, True, False]


def test_arguments_are_converted_to_the_types_of_the_constructor() -> None:
    scale = make("KitchenScale", factor="2.5", labels=["a"])
    assert (scale.weigh(2.0), scale.labels) == (5.0, ["a"])


def test_a_part_may_wrap_one_that_the_library_passes() -> None:
    wrapped = SCALES.make(f"{__name__}.WrappedScale", "shop.scale", {"extra": 3}, KitchenScale(1.0))
    assert (wrapped.extra, wrapped.unit, wrapped.weigh(2.0)) == (3, "g", 2.0)
    SCALES.check_arguments(f"{__name__}.WrappedScale", "shop.scale", {"extra": 3}, num_given=1)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("NoReset", {}, r"shop.scale.name=.*NoReset' is not a scale: it lacks the methods reset of .*\.Scale\. Add"),
        ("OnlyDerived", {}, r"it lacks the methods weigh, reset of"),
        ("NoUnit", {}, r"its objects lack the attributes unit of .*\.Scale\. Add"),
        ("make", {}, "is not a class. Use one of kitchen, or the dotted path"),
        ("Nothing", {}, r"Nothing' cannot be imported \(.*Use one of kitchen"),
        ("KitchenScale", {"factr": 1}, "kwargs.factr is no argument of KitchenScale. Did you mean 'factor'"),
        ("KitchenScale", {}, "kwargs.factor has no value, and KitchenScale needs it"),
        ("KitchenScale", {"factor": "much"}, "kwargs.factor='much' does not fit KitchenScale: .*valid number"),
        ("KitchenScale", {"factor": -1}, "kwargs do not fit .*KitchenScale: factor must be positive"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_key(name: str, arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, **arguments)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{__name__}.KitchenScale", r"is not an open shelf: derive it from .*\.Shelf\."),
        (f"{__name__}.make", "is not an open shelf: derive it from"),
        (f"{__name__}.HalfBoard", "it lacks the methods put of"),
        ("board", "x is unknown. Give the dotted path of a class"),
    ],
)
def test_a_class_of_an_abc_derives_from_it(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SHELVES.class_of(name, "x")


def test_a_misspelled_name_gets_the_right_one() -> None:
    with pytest.raises(ConfigError, match="unknown scale 'kitchn'. Did you mean 'kitchen'"):
        SCALES.path_of("kitchn")


@dataclass
class GameConfig:
    board: PositiveInt
    rules: list[str] = field(default_factory=list)


class GameModel(BaseModel):
    board: PositiveInt


@pytest.mark.parametrize("config_class", [GameConfig, GameModel])
def test_own_keys_are_checked_by_the_class_that_describes_them(config_class: type) -> None:
    game = type("Game", (), {"config_class": config_class})
    check_own_keys(game, "env.game", {"board": 3})
    check_own_keys(Board, "env.game", {"anything": 3})
    for keys, message in (
        ({"bord": 3}, "env.game.bord is no argument of Game.*'board'"),
        ({"board": 0}, "env.game.board=0 does not fit Game.*greater than 0"),
        ({}, "env.game.board has no value"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_own_keys(game, "env.game", keys)


def test_a_constructor_with_free_keywords_takes_any() -> None:
    class Free:
        def __init__(self, **keys: int):
            self.keys = keys

    assert fitting_arguments(Free, "k", {"a": 1}) == {"a": 1}
