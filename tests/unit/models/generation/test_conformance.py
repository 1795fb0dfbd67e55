"""The conformance suite holds for the Hugging Face engine, and each of its properties can fail."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from faulty_engines import FAULTS
from generation_helpers import make_model, make_settings, save_model

from nemo_rl.commands.conformance import (
    DECLARED,
    PROPERTIES,
    Case,
    ContractError,
    NotOffered,
    Report,
    check_engine,
    check_property,
    table,
)
from nemo_rl.commands.conformance.__main__ import main
from nemo_rl.commands.conformance.run import check_all
from nemo_rl.models.generation.hf import HfEngine
from nemo_rl.models.generation.interfaces import EngineSettings
from nemo_rl.models.generation.rows import Row


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute on one thread: more wait for each other, since the model is tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, make_model("qwen2", True, seed=1))
    return make_settings(folder, "hf", load_weights=True)


@pytest.fixture(scope="module")
def case(settings: EngineSettings) -> Case:
    return Case(settings.model_name)


@pytest.fixture(scope="module")
def engine(settings: EngineSettings) -> HfEngine:
    return HfEngine(settings)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.mark.parametrize("name", PROPERTIES)
def test_the_hugging_face_engine_holds(runner: asyncio.Runner, engine: HfEngine, case: Case, name: str) -> None:
    runner.run(check_property(engine, case, name))


@pytest.mark.parametrize(("name", "faulty", "words"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_fault_is_found(settings: EngineSettings, case: Case, name: str, faulty: type, words: str) -> None:
    case = replace(case, deadline_s=3.0) if "no end" in words else case
    with pytest.raises(ContractError, match=words):
        asyncio.run(check_property(faulty(settings), case, name))


def test_every_property_has_a_fault() -> None:
    assert {name for name, _, _ in FAULTS} == PROPERTIES.keys()


def test_the_command_prints_the_table_of_an_engine_that_ends_its_process(
    settings: EngineSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    dying = "faulty_engines.DiesInItsProcess"
    names = ("layer_outputs", "greedy", "sleep")
    options = [option for name in names for option in ("--only", name)]
    assert main([dying, "--model", settings.model_name, *options]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert {"| `layer_outputs` | yes |", "| `greedy` | FAILS |", "| `sleep` | FAILS |"} <= set(lines)
    assert f"- {dying}, `greedy`: its process ended" in lines


def test_what_an_engine_does_not_promise_is_told(runner: asyncio.Runner, engine: HfEngine, case: Case) -> None:
    exempt = replace(case, exempt={"filters": "it reports them unfiltered"})
    report = runner.run(check_all(engine, exempt, Report("hf"), ["filters"]))
    assert report.not_promised == exempt.exempt
    assert "- hf, `filters`: it reports them unfiltered" in table([report]).splitlines()


class DependsOnTheBatch(HfEngine):
    """It declares answers that do not depend on the batch, and their last bits do."""

    batch_invariant = True

    def extend(self, rows: Sequence[Row], logits_bV: torch.Tensor) -> None:
        super().extend(rows, logits_bV * (1 + 1e-6 * len(self._active)))


def test_declared_properties_are_checked(settings: EngineSettings, case: Case) -> None:
    for name in DECLARED:
        with pytest.raises(NotOffered):
            asyncio.run(check_property(HfEngine(settings), case, name))
        with pytest.raises(ContractError, match="has other bits"):
            asyncio.run(check_property(DependsOnTheBatch(settings), case, name))


@pytest.mark.parametrize("backend", ["hf", "megatron"])
def test_engines_without_mismatch_do_not_depend_on_the_batch(
    settings: EngineSettings, case: Case, backend: str
) -> None:
    asked = replace(settings, backend=backend, zero_mismatch=True)
    report = check_engine(asked, case, tuple(DECLARED))
    assert report.failures == {} and report.holding == [*DECLARED]
