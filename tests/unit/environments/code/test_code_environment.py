"""The code environment as rollouts use it: turns, observations, rewards and errors."""

import asyncio
import json

import pytest
import torch

from nemo_rl.kits.code.blocks import code_to_run, final_code
from nemo_rl.kits.code.environment import CodeEnvironment
from nemo_rl.kits.code.jaccard import CodeJaccardEnvironment, jaccard_similarity
from nemo_rl.sandbox import why_unavailable
from nemo_rl.sandbox.mechanisms import IN_ORDER
from nemo_rl.utils.errors import ConfigError, SandboxError

pytestmark = pytest.mark.skipif(all(why_unavailable(one) for one in IN_ORDER), reason="no sandbox works here")

TESTS = json.dumps({"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]})


def environment(**keys):
    return CodeEnvironment({"num_workers": 2, "wall_time_s": 8.0, **keys})


def step(env, *texts, metadata=None, **more):
    logs = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in texts]
    return asyncio.run(env.step(logs, metadata or [{"ground_truth": TESTS}] * len(texts), **more))


def test_programs_are_graded_by_the_share_of_tests_that_they_pass():
    right, half = "```python\ndef add(a, b): return a + b\n```", "<code>def add(a, b): return 3</code>"
    outcome = step(environment(), f"So:\n{right}", half, "no idea", return_extracted_answer=True)
    assert outcome.rewards.tolist() == [1.0, 0.5, 0.0]
    assert outcome.terminateds.tolist() == [True] * 3 and outcome.errors == [None] * 3
    assert [one["content"] for one in outcome.observations] == [
        "Environment: 2 of 2 tests passed",
        "Environment: 1 of 2 tests passed",
        "Environment: no code found",
    ]
    assert outcome.answers == ["def add(a, b): return a + b\n", "def add(a, b): return 3", None]
    assert step(environment(reward="all"), right, half).rewards.tolist() == [1.0, 0.0]


def test_code_runs_over_several_turns_and_keeps_its_variables():
    env = environment(terminate_on_evaluation=False)
    metadata = [{"ground_truth": TESTS, "context": {"start": (40, {"a": 2})}}]
    first = step(env, "<code>total = start[0] + start[1]['a']\nprint('once')\ntotal", metadata=metadata)
    assert first.observations[0]["content"] == "<result>\nonce\n42\n</result>"
    assert not first.terminateds.any() and first.next_stop_strings == [["</code>"]]
    second = step(env, "<code>\n```python\n1 / 0\n```\n</code>", metadata=first.metadata)
    assert "ZeroDivisionError: division by zero" in second.observations[0]["content"]
    assert 'File "<code>", line 1' in second.observations[0]["content"]
    third = step(env, "<code>total + 1</code>", metadata=second.metadata)
    assert third.observations[0]["content"] == "<result>\n43\n</result>"
    last = step(env, "```\ndef add(a, b): return a + b\n```", metadata=third.metadata)
    assert last.rewards.tolist() == [1.0] and last.terminateds.all()


def test_a_block_that_a_limit_ends_is_told_and_forgotten():
    env = environment(terminate_on_evaluation=False, wall_time_s=1.0)
    outcome = step(env, "<code>import time; time.sleep(60)</code>", metadata=[{}])
    assert "beyond the limit of wall time" in outcome.observations[0]["content"]
    assert outcome.metadata == [{}]
    after = step(env, "<code>6 * 7</code>", metadata=outcome.metadata)
    assert after.observations[0]["content"] == "<result>\n42\n</result>"


def test_long_output_is_cut_in_the_middle():
    outcome = step(environment(observation_chars=20), "<code>print('a' * 1000 + 'b' * 1000)</code>", metadata=[{}])
    assert outcome.observations[0]["content"] == (
        "<result>\naaaaaaaaaa\n... 1980 characters left out ...\nbbbbbbbbbb\n</result>"
    )


def test_files_of_a_folder_are_copied_and_never_changed(tmp_path):
    (tmp_path / "data.txt").write_text("seven")
    code = "<code>print(open('data.txt').read()); open('data.txt', 'w').write('x')</code>"
    outcome = step(environment(), code, metadata=[{"working_dir": str(tmp_path)}])
    assert "seven" in outcome.observations[0]["content"]
    assert (tmp_path / "data.txt").read_text() == "seven"


def test_what_cannot_be_graded_is_an_error_of_its_sample(tmp_path):
    right = "```\ndef add(a, b): return a + b\n```"
    bad = [{"ground_truth": TESTS}, {"ground_truth": "no tests"}, {"ground_truth": '{"inputs": ["1"], "outputs": []}'}]
    outcome = step(environment(), right, right, right, metadata=bad)
    assert outcome.errors[0] is None
    assert "neither {tests, setup, names} nor {inputs, outputs}" in outcome.errors[1]
    assert "1 inputs and 0 outputs" in outcome.errors[2]
    missing = step(environment(), "<code>1</code>", metadata=[{"working_dir": str(tmp_path / "none")}])
    assert "is no folder" in missing.errors[0]


def test_metrics_tell_what_ended_programs():
    env = environment(wall_time_s=1.0)
    texts = ("```\ndef add(a, b): return a + b\n```", "```\nimport time; time.sleep(60)\n```")
    outcome = step(env, *texts)
    batch = {"extra_env_info": outcome.metadata, "rewards": outcome.rewards, "text": ["one", "one"]}
    _, metrics = env.global_post_process_and_metrics(batch)
    assert metrics["accuracy"] == metrics["share_of_tests_passed"] == metrics["ended_by_wall_time"] == 0.5
    assert metrics["pass@samples_per_prompt"] == 1.0 and metrics["ended_by_memory"] == 0


def test_a_sandbox_that_does_not_work_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    why_unavailable.cache_clear()
    try:
        with pytest.raises(SandboxError, match=r"never run without one.*\n.*bwrap is not installed"):
            environment(sandbox="bubblewrap")
    finally:
        why_unavailable.cache_clear()
    with pytest.raises(ConfigError, match="sandbox"):
        environment(sandbox="none")


@pytest.mark.parametrize(
    ("text", "to_run", "final"),
    [
        ("a <code>x = 1</code> b", "x = 1", None),
        ("<code>x</code> then <code>y", "y", None),
        ("```python\nx\n```", None, "x\n"),
        ("```py\nx\n```\nand\n```\ny\n```", None, "x\n"),
        ("<code>\n```python\nx\n```\n</code>", "x\n", None),
        ("no code", None, None),
    ],
)
def test_code_is_found_in_texts(text, to_run, final):
    assert code_to_run(text) == to_run
    assert final_code(text) == final


def test_similarity_is_that_of_jaccard():
    assert jaccard_similarity("a + b", "a - b") == 2 / 4
    assert jaccard_similarity("", "") == 1.0 and jaccard_similarity("a", "") == 0.0
    env = CodeJaccardEnvironment({})
    logs = [[{"role": "assistant", "content": "```\na + b\n```"}], [{"role": "assistant", "content": "a + b"}]]
    outcome = env.step(logs, [{"ground_truth": "a + b"}, {"ground_truth": "a * b"}], return_extracted_answer=True)
    assert torch.equal(outcome.rewards, torch.tensor([1.0, 0.5])) and outcome.terminateds.all()
