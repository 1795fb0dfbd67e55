"""The LLM judge over a real local server that misbehaves: verdicts, retries, deadlines, memory, limits, secrets."""

import asyncio
import json
import logging
import re
import time

import pytest
import torch
from judge_server import KEY, JudgeServer

from nemo_rl.__main__ import main as nemo_rl_command
from nemo_rl.config import load_config
from nemo_rl.config.schema.judges import LLMJudgeConfig
from nemo_rl.data.datasets.setup import setup_response_data
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.judges.interfaces import JudgeError
from nemo_rl.environments.judges.llm_judge import LLMJudgeEnvironment
from nemo_rl.environments.judges.verdicts import JudgePrompts, read_reward
from nemo_rl.environments.utils import create_env
from nemo_rl.utils.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def server():
    server = JudgeServer()
    yield server
    server.close()


def section(url, **keys):
    return {
        "base_url": url,
        "model": "judge",
        "backoff_s": 0.02,
        "request_timeout_s": 3.0,
        "deadline_s": 20.0,
        "max_attempts": 3,
        **keys,
    }


def chat(answer, question="What is 1+1?"):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def judged(environment, answers, metadata=None):
    """Judge answers at the same time; return the reward or the error of each."""

    async def main():
        steps = [environment.step([chat(answer)], [metadata]) for answer in answers]
        return await asyncio.gather(*steps)

    outcomes = asyncio.run(main())
    assert all(outcome.terminateds.tolist() == [True] for outcome in outcomes)
    return [outcome.errors[0] or outcome.rewards.item() for outcome in outcomes]


def metrics_of(environment):
    batch = BatchedDataDict({"rewards": torch.tensor([0.5])})
    return environment.global_post_process_and_metrics(batch)[1]


def test_a_score_becomes_a_reward_with_costs_and_latency(server):
    prices = {"price_per_million_prompt_tokens": 3.0, "price_per_million_completion_tokens": 10.0}
    environment = LLMJudgeEnvironment(section(server.url, system_prompt="Be fair.", extra_body={"seed": 1}, **prices))
    assert judged(environment, ["two"]) == [pytest.approx((7 - 1) / (10 - 1))]
    (body,) = server.bodies
    assert body["model"] == "judge" and body["temperature"] == 0.0 and body["seed"] == 1
    assert body["messages"][0] == {"role": "system", "content": "Be fair."}
    assert (
        "What is 1+1?" in body["messages"][1]["content"]
        and "<answer>\ntwo\n</answer>" in body["messages"][1]["content"]
    )
    metrics = metrics_of(environment)
    assert metrics["num_requests"] == 1 and metrics["cost"] == pytest.approx((100 * 3.0 + 20 * 10.0) / 1e6)
    assert 0 < metrics["latency_s_mean"] <= metrics["latency_s_max"] < 5
    assert metrics_of(environment)["num_requests"] == 0


PASSING = {"fail_twice": 3, "busy": 2, "nonsense_once": 2}


@pytest.mark.parametrize(("behaviour", "num_requests"), PASSING.items())
def test_a_failure_that_passes_is_tried_again(server, behaviour, num_requests):
    environment = LLMJudgeEnvironment(section(server.url))
    started = time.monotonic()
    assert judged(environment, [f"do:{behaviour} x"]) == [pytest.approx(2 / 3)]
    assert server.requests[behaviour] == num_requests and metrics_of(environment)["num_retries"] == num_requests - 1
    if behaviour == "busy":
        assert time.monotonic() - started >= 1.0  # the server's Retry-After, which is longer than the backoff


FAILING = {
    "down": ("status 503: down for maintenance", 3),
    "refuse": ("status 401", 1),
    "redirect": ("status 307", 1),
    "nonsense": ("wrote no verdict.*turtles", 3),
    "too_high": ("score 11 is not in 1 to 10", 3),
    "silence": ("sent no chat completion", 3),
    "html": ("sent no chat completion: <html>login", 3),
    "deep": ("sent no chat completion", 3),
    "list": ("sent no chat completion", 3),
    "flood": ("sent more than 1048576 bytes", 3),
    "hang": (r"no answer in 2 s", 3),
    "trickle": (r"no answer in 2 s", 3),
    "reset": ("cannot be reached", 3),
    "noise": ("cannot be reached", 3),
    "short": ("cannot be reached", 3),
}


def test_every_failure_is_an_error_of_its_sample_only(server):
    environment = LLMJudgeEnvironment(section(server.url, request_timeout_s=2.0, deadline_s=30.0))
    started = time.monotonic()
    *failed, good = judged(environment, [*(f"do:{behaviour} x" for behaviour in FAILING), "fine"])
    assert good == pytest.approx(2 / 3) and time.monotonic() - started < 30
    for (behaviour, (reason, num_requests)), error in zip(FAILING.items(), failed, strict=True):
        assert isinstance(error, str), (behaviour, error)
        assert re.search(reason, error), (behaviour, error)
        assert f"(attempt {num_requests} of 3)" in error and 1 <= server.requests[behaviour] <= num_requests, behaviour
    assert metrics_of(environment)["num_failed"] == len(FAILING)


def test_a_judge_that_is_not_there_is_an_error(server):
    environment = LLMJudgeEnvironment(section("http://127.0.0.1:9/v1"))
    (error,) = judged(environment, ["two"])
    assert "cannot be reached" in error and "attempt 3 of 3" in error


def test_the_deadline_ends_retries(server):
    environment = LLMJudgeEnvironment(section(server.url, deadline_s=1.0, max_attempts=100, backoff_s=0.2))
    started = time.monotonic()
    (error,) = judged(environment, ["do:down x"])
    assert time.monotonic() - started < 2.0
    assert "no verdict in 1 s (deadline_s); the last error: the judge" in error and "503" in error


def test_the_key_is_sent_and_never_shown(server, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    environment = LLMJudgeEnvironment(section(server.url, api_key_env="JUDGE_KEY"))
    reward, error = judged(environment, ["two", "do:refuse x"])
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert reward == pytest.approx(2 / 3)
    assert "wrong key Bearer ***" in error and KEY not in error + caplog.text


def test_a_missing_key_is_refused(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="JUDGE_KEY, but this environment variable is not set"):
        LLMJudgeEnvironment(section("http://127.0.0.1:9/v1", api_key_env="JUDGE_KEY"))


def test_equal_texts_are_asked_once_and_errors_are_not_remembered(server):
    environment = LLMJudgeEnvironment(section(server.url, max_attempts=1))

    async def main():
        first = await asyncio.gather(*(environment.step([chat(text)], [None]) for text in ["do:slow a"] * 5))
        later = await environment.step([chat("do:slow a")], [None])
        failed = [await environment.step([chat("do:fail_twice x")], [None]) for _ in range(3)]
        return [*first, later], failed

    same, failed = asyncio.run(main())
    assert {outcome.rewards.item() for outcome in same} == {(4 - 1) / 9} and server.requests["slow"] == 1
    assert [outcome.errors[0] is None for outcome in failed] == [False, False, True]
    assert metrics_of(environment)["num_from_memory"] == 5


def test_the_memory_is_bounded(server):
    environment = LLMJudgeEnvironment(section(server.url, cache_size=2))

    async def main():
        for text in ("a", "b", "c", "c", "b", "a"):
            await environment.step([chat(text)], [None])

    asyncio.run(main())
    assert server.requests["well"] == 4  # a, b, c, and a again


def test_no_more_requests_at_once_than_allowed(server):
    environment = LLMJudgeEnvironment(section(server.url, max_concurrency=3, request_timeout_s=10.0, deadline_s=3.0))
    assert judged(environment, [f"do:slow {n}" for n in range(40)]) == [pytest.approx(1 / 3)] * 40
    assert server.most_at_once <= 3


def test_two_orders_of_answers_cancel_a_preference_for_the_first(server):
    pairwise = section(server.url, mode="pairwise")

    def compared(answers, metadata, **keys):
        return judged(LLMJudgeEnvironment(pairwise | keys), answers, metadata)

    answers = ["do:longest " + "x" * 20, "do:longest", "do:longest 12345"]
    assert compared(answers, {"ground_truth": "do:longest 54321"}) == [1.0, 0.0, 0.5]
    assert compared(["do:first x"], {"ground_truth": "y"}) == [0.5]
    assert compared(["do:first x"], {"ground_truth": "y"}, both_orders=False) == [1.0]
    (error,) = compared(["do:first x"], {})
    assert "metadata has no ground_truth" in error


def config(**keys):
    return LLMJudgeConfig.build(base_url="http://localhost:1/v1", model="m", **keys)


def test_a_template_has_the_fields_of_the_row():
    prompts = JudgePrompts(config(template="{level}: {question} = {answer}? ({reference}) {{x}}"))
    text = prompts.of(chat("2"), {"ground_truth": "two", "level": 3})
    assert text == ["3: What is 1+1? = 2? (two) {x}"]
    with pytest.raises(DataError, match="has the fields level, reference"):
        prompts.of(chat("2"), None)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"template": "grade {answer"}, "Write braces that are no field twice"),
        ({"template": "grade {answer.__class__}"}, "which is no name"),
        ({"template": "grade it"}, "does not have {answer}"),
        ({"template": "{answer}", "mode": "pairwise"}, "{answer_a}, {answer_b}"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(keys, reason):
    with pytest.raises(ConfigError, match=reason):
        JudgePrompts(config(**keys))


@pytest.mark.parametrize(
    "keys",
    [
        {"score_pattern": "("},
        {"score_pattern": "score"},
        {"winner_pattern": "(a)(b)"},
        {"min_score": 5, "max_score": 5},
        {"max_attempts": 0},
        {"mode": "best"},
    ],
)
def test_keys_out_of_range_are_refused(keys):
    with pytest.raises(ConfigError):
        config(**keys)


@pytest.mark.parametrize(
    ("text", "score"),
    [("Score: 7", 7), ("**Score:** 8.5", 8.5), ("score = 3\nOn reflection, Score: 4", 4), ("SCORE 10/10", 10)],
)
def test_the_last_score_counts(text, score):
    assert read_reward(config(), text) == pytest.approx((score - 1) / 9)


@pytest.mark.parametrize("text", ["7", "Score: many", "Score: 0", "Score: -7", "Score: nan", ""])
def test_a_text_without_a_score_is_no_verdict(text):
    with pytest.raises(JudgeError):
        read_reward(config(), text)


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_the_environment_runs_in_its_actor(server):
    client = create_env("llm_judge", section(server.url, request_timeout_s=10.0))
    try:

        async def main():
            return await asyncio.gather(*(client.step(chat(text), {}) for text in ("two", "do:down x")))

        good, bad = asyncio.run(main())
        assert good.reward == pytest.approx(2 / 3) and bad.reward is None and "503" in bad.error
    finally:
        client.shutdown()


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_stored_samples_are_judged_again(server, tmp_path, capsys):
    """`nemo_rl regrade` rewards the samples of a run by another environment, and leaves their file as it is."""
    judge = f"env.llm_judge={{base_url: '{server.url}', model: judge, max_attempts: 1}}"
    file, keys = "examples/configs/grpo_math_cpu.yaml", ["data.validation.num_samples=3", judge]
    config = load_config(file, keys)
    data = setup_response_data(get_tokenizer(config.policy.tokenizer), config.data, config.env)
    rows = []
    for idx, (answer, reward) in enumerate([("two", 1.0), ("do:slow x", 0.0), ("do:down x", 1.0)]):
        prompt = data.validation[idx]["message_log"][0]["content"]
        content = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        rows.append({"idx": idx, "group": idx, "sample": 0, "task_name": "math", "content": content, "rewards": reward})
    run = tmp_path / "exp_001"
    run.mkdir()
    stored = run / "val_data_step5.jsonl"
    stored.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = stored.read_bytes()
    command = ["regrade", str(tmp_path), "--config", file, "--environment", "llm_judge", *keys]
    assert nemo_rl_command(command) == 0
    graded = [json.loads(line) for line in (run / "regraded.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in graded] == [pytest.approx(2 / 3), pytest.approx(1 / 3), None]
    assert "503" in graded[2]["error"] and stored.read_bytes() == before
    assert "3 of 3 rewards changed." in capsys.readouterr().out
    assert nemo_rl_command(command) == 2  # the new file exists
