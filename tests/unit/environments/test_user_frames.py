"""Errors of a user's own code are shown by the user's lines."""

import importlib
import sys
from pathlib import Path

import pytest

from nemo_rl.algorithms.setup.user_parts import UserParts
from nemo_rl.config import GRPOMasterConfig, load_config
from nemo_rl.environments.user_errors import MOST_LINES, report, user_lines
from nemo_rl.launch.command_line import show_uncaught
from nemo_rl.utils.errors import ConfigError

LOSSES = """
import torch
from nemo_rl.losses.loss_function import LossInputType, LossType

class Base:
    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    needs_reference = False

    def __call__(self, logprobs, /, data, global_valid_seqs, global_valid_toks):
        return self.of(logprobs, data)

class Shape(Base):
    def of(self, logprobs, data):
        return (logprobs * data["advantages"]).sum(), {}

class Key(Base):
    def of(self, logprobs, data):
        return (logprobs * data["advantage"][:, 1:]).sum(), {}

class Kind(Base):
    def of(self, logprobs, data):
        return logprobs.sum()

class Right(Base):
    def of(self, logprobs, data):
        return (logprobs * data["advantages"][:, 1:]).sum(), {}

class Further(Base):
    def of(self, logprobs, data):
        return (logprobs * data["a_key_of_another_algorithm"]).sum(), {}
"""


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "losses_of_a_test.py").write_text(LOSSES)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    sys.modules.pop("losses_of_a_test", None)
    return "losses_of_a_test"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Shape", "RuntimeError: The size of tensor a (7) must match the size of tensor b (8)"),
        ("Key", "Did you mean 'advantages'?"),
        ("Kind", "returns Tensor () for one row"),
    ],
)
def test_a_loss_is_tried_on_one_row(losses: str, name: str, message: str) -> None:
    config: GRPOMasterConfig = load_config("examples/configs/grpo_math_cpu.yaml", [f"loss_fn.name={losses}.{name}"])
    with pytest.raises(ConfigError) as refused:
        UserParts().loss(None, config.loss_fn)
    text = str(refused.value)
    assert message in text
    assert len(text.splitlines()) <= MOST_LINES
    if name != "Kind":
        assert f"{losses}.py" in text.splitlines()[-1]


@pytest.mark.parametrize("name", ["Right", "Further"])
def test_a_loss_that_may_be_right_is_accepted(losses: str, name: str) -> None:
    config: GRPOMasterConfig = load_config("examples/configs/grpo_math_cpu.yaml", [f"loss_fn.name={losses}.{name}"])
    assert type(UserParts().loss(None, config.loss_fn)).__name__ == name


def test_the_lines_of_a_remote_traceback_are_found_in_its_text() -> None:
    frames = [f'  File "{__file__}", line {number}, in step_{number}\n    call({number})' for number in range(30)]
    library = '  File "/usr/lib/python3.12/site-packages/torch/nn.py", line 7, in forward\n    x'
    rows = ["ray::f()", "Traceback (most recent call last):", *frames, library, "KeyError: 'x'"]
    error = RuntimeError("\x1b[36m" + "\n".join(rows))
    assert [line.number for line in user_lines(error)] == list(range(30))
    text = report(error)
    assert text is not None
    assert len(text.splitlines()) <= MOST_LINES
    assert text.endswith("call(29)\nRuntimeError: KeyError: 'x'")
    assert "site-packages" not in text and "\x1b" not in text


def test_an_error_of_the_library_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        load_config(7)  # type: ignore[arg-type]
    except Exception as error:
        own = [line for line in user_lines(error) if Path(line.file) != Path(__file__)]
        assert own == []
        show_uncaught(type(error), error, error.__traceback__)
    assert "test_user_frames.py" in capsys.readouterr().err
