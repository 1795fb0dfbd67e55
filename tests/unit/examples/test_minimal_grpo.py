"""The single-file example runs, and its rewards are those of the text it prints."""

import importlib.util
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/minimal_grpo.py"


def load_example():
    spec = importlib.util.spec_from_file_location("minimal_grpo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_steps(capsys):
    example = load_example()
    example.VALIDATION_SAMPLES = 8
    rewards = example.main(["--steps", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert len(rewards) == 2 and all(0 < reward < 1 for reward in rewards)
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 2
    assert all("mult_err=1.0000" in line for line in steps), "trainer and sampler disagree"


def test_only_the_last_boxed_number_counts():
    reward_of = load_example().reward_of
    assert reward_of(r"\boxed{1} then \boxed{ 122 }", "122") == 1.0
    assert reward_of(r"\boxed{122} then \boxed{1}", "122") == 0.0
    assert reward_of("122", "122") == 0.0


def test_the_file_stays_readable_in_one_go():
    assert len(EXAMPLE.read_text().splitlines()) < 250
