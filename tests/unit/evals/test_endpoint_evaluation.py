"""An evaluation at an endpoint: the same scores and records as with own engines, and nothing is lost silently."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from chat_server import KEY, ChatServer, completion
from eval_helpers import BoxedNumbers, InProcessEngine, eval_config, make_prompts, make_sampler
from starlette.responses import JSONResponse, Response

from nemo_rl.config.runs.eval import EvalMasterConfig
from nemo_rl.config.schema.agents import AgentEnvironmentConfig
from nemo_rl.data.messages.encoding import encode_text, render_chat
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.environments.interfaces import StepResult
from nemo_rl.evals import evaluator
from nemo_rl.evals.evaluator import Sampler, ask_all, evaluate
from nemo_rl.evals.models import data_of, key_stays_here, limits_of, sampling_of, tokenizer_of
from nemo_rl.evals.prompts import EvalPrompts
from nemo_rl.evals.records import AnswerRecord, RecordStore
from nemo_rl.evals.report import format_report, make_report
from nemo_rl.experience.event_loop import EventLoopThread
from nemo_rl.experience.rollouts import RolloutRunner
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams
from nemo_rl.models.generation.remote.model import ChatModel
from nemo_rl.utils.errors import ConfigError, EndpointUnusableError

SMALL = ("data.num_samples=7", "eval.num_tests_per_prompt=2", "generation.max_new_tokens=24")


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    loop = EventLoopThread()
    yield loop
    loop.close()


class TinyChat:
    """The tiny model on a server: it renders messages with its own chat template."""

    def __init__(self) -> None:
        config = eval_config()
        self.tokenizer = get_tokenizer(config.tokenizer)
        self.engine = InProcessEngine(config)
        own = make_sampler(config, EventLoopThread())[0].sampling
        self._stops = own.stop_token_ids

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        text = render_chat(body["messages"], self.tokenizer, add_generation_prompt=True)
        sampling = SamplingParams(
            temperature=body["temperature"],
            top_p=body["top_p"],
            max_new_tokens=body["max_tokens"],
            stop_token_ids=self._stops,
        )
        ids = encode_text(text, self.tokenizer).tolist()
        result = await self.engine.generate(GenerationRequest(ids, sampling, body["seed"]))
        written = self.tokenizer.decode(result.token_ids, skip_special_tokens=True)
        return completion(written, result.finish_reason, len(result.token_ids))


def at(server: ChatServer, *overrides: str) -> EvalMasterConfig:
    given = ("base_url=" + server.url, "model=tiny", "backoff_s=0.01", "max_attempts=2")
    return eval_config(*SMALL, *(f"generation.endpoint.{each}" for each in given), *overrides)


def ask(
    config: EvalMasterConfig, loop: EventLoopThread, environment: Any = None, batches: int | None = None
) -> list[AnswerRecord]:
    """Return all answers, or those of the first batches."""
    tokenizer = tokenizer_of(config)
    prompts = EvalPrompts(data_of(config), tokenizer)
    assert config.generation.endpoint is not None
    model = ChatModel(config.generation.endpoint, tokenizer)
    runner = RolloutRunner(model, {"math": environment or BoxedNumbers()}, tokenizer, limits_of(config), loop)
    store = RecordStore(config, len(prompts) if batches is None else min(batches, len(prompts)))
    shown = prompts if batches is None else _First(prompts, batches)
    try:
        ask_all(config, shown, store, Sampler(runner, sampling_of(config, tokenizer), model))
    finally:
        store.close()
    return store.records


class _First:
    """The first prompts."""

    def __init__(self, prompts: EvalPrompts, count: int) -> None:
        self.batch, self.topic, self._count = prompts.batch, prompts.topic, count

    def __len__(self) -> int:
        return self._count


def test_scores_and_records_are_those_of_own_engines(loop: EventLoopThread) -> None:
    own_config = eval_config(*SMALL)
    store = RecordStore(own_config, 7)
    ask_all(own_config, make_prompts(own_config), store, make_sampler(own_config, loop)[0])
    with ChatServer(TinyChat().answer) as server:
        config = at(server)
        remote = ask(config, loop)
    assert len(remote) == 14 and len({record.response for record in remote}) > 5
    assert [replace(record, prompt="") for record in remote] == [replace(each, prompt="") for each in store.records]
    assert remote[0].prompt.startswith("[user]\n") and remote[0].prompt.endswith("[assistant]\n")
    report = make_report(config, remote)
    own_report = make_report(own_config, store.records)
    assert (report.score, report.companions, report.answers) == (
        *(own_report.score, own_report.companions, own_report.answers),
    )
    assert report.model_name == "tiny" and f"endpoint={server.url}" in format_report(report)


async def _right(body: dict[str, Any]) -> dict[str, Any]:
    left, right = body["messages"][-1]["content"].strip().rstrip("=").split("+")
    return completion(rf"\boxed{{{int(left) + int(right)}}}")


def test_an_interrupted_evaluation_goes_on_and_asks_nothing_again(loop: EventLoopThread, tmp_path: Any) -> None:
    with ChatServer(_right) as server:
        config = at(server, f"eval.save_path={tmp_path}", "generation.num_prompts_per_step=2")
        first = ask(config, loop, batches=4)
        assert len(first) == 8 == len(server.bodies)
        file = tmp_path / "evaluation_data.jsonl"
        claimed = json.loads((tmp_path / "config.json").read_text())
        claimed["inputs"]["num_prompts"] = 7
        (tmp_path / "config.json").write_text(json.dumps(claimed))
        again = at(server, f"eval.save_path={tmp_path}", "generation.endpoint.max_concurrent_requests=1")
        records = ask(again, loop)
    assert len(server.bodies) == 14 and records[:8] == first and all(record.is_correct for record in records)
    assert len(file.read_text().splitlines()) == 14
    assert len({body["seed"] for body in server.bodies}) == 14
    with pytest.raises(ConfigError, match="generation.endpoint.model was 'tiny' and is 'other'"):
        RecordStore(at(server, f"eval.save_path={tmp_path}", "generation.endpoint.model=other"), 7)


def test_a_question_without_an_answer_is_an_error_of_its_sample(loop: EventLoopThread) -> None:
    async def sometimes(body: dict[str, Any]) -> Response | dict[str, Any]:
        if body["seed"] % 2:
            return JSONResponse({"error": "down"}, 503)
        return completion("nonsense", tokens=None)

    with ChatServer(sometimes) as server:
        records = ask(at(server), loop)
    failed = [record for record in records if record.error is not None]
    assert 0 < len(failed) < 14
    assert all("status 503" in str(each.error) and "(attempt 2 of 2)" in str(each.error) for each in failed)
    assert {(each.reward, each.outcome, each.response) for each in failed} == {(None, "reward_error", "")}
    assert {each.response_length for each in failed} == {None}
    answered = [record for record in records if record.error is None]
    assert {(each.reward, each.response_length) for each in answered} == {(0.0, None)}
    report = make_report(at(server), records)
    assert report.answers["num_not_graded"] == len(failed) and "mean_response_length" not in report.answers


def test_a_batch_without_any_answer_ends_the_run_and_is_not_written(loop: EventLoopThread, tmp_path: Any) -> None:
    async def down(body: dict[str, Any]) -> Response:
        return JSONResponse({"error": "down"}, 503)

    with ChatServer(_right) as server:
        config = at(server, f"eval.save_path={tmp_path}", "generation.num_prompts_per_step=2")
        server.script = []
        server._answer = _after(4, _right, down)
        with pytest.raises(EndpointUnusableError, match="no answer to any of 4 conversations.*status 503"):
            ask(config, loop)
        assert len((tmp_path / "evaluation_data.jsonl").read_text().splitlines()) == 4
        server._answer = _right
        assert len(ask(config, loop)) == 14


def _after(count: int, first: Any, then: Any) -> Any:
    seen = iter(range(10**6))

    async def answer(body: dict[str, Any]) -> Any:
        return await (first if next(seen) < count else then)(body)

    return answer


def test_requests_that_are_all_refused_end_the_evaluation_at_its_beginning_only(loop: EventLoopThread) -> None:
    async def refuses(body: dict[str, Any]) -> Response:
        return JSONResponse({"error": {"message": "unknown field"}}, 400)

    with ChatServer(refuses) as server, pytest.raises(EndpointUnusableError, match="unknown field"):
        ask(at(server), loop)
    with ChatServer(_after(4, _right, refuses)) as server:
        records = ask(at(server, "generation.num_prompts_per_step=2"), loop)
    assert [record.error is None for record in records] == [True] * 4 + [False] * 10


class TwoTurns(BoxedNumbers):
    """Asks a second time, and grades the second answer."""

    async def step(self, message_log: list[dict[str, Any]], metadata: Any) -> StepResult:
        if sum("generation_logprobs" in message for message in message_log) == 1:
            said = [{"role": "tool", "name": "check", "content": "17"}, {"role": "environment", "content": "Really?"}]
            return StepResult({"role": "environment", "content": "17 Really?", "messages": said}, metadata, 0.0, False)
        return await super().step(message_log, metadata)


def test_observations_are_messages_of_the_next_request(loop: EventLoopThread) -> None:
    call = {"id": "c9", "type": "function", "function": {"name": "check", "arguments": "{}"}}

    async def answer(body: dict[str, Any]) -> dict[str, Any]:
        if len(body["messages"]) == 1:
            return completion(None, "tool_calls", message={"tool_calls": [call], "reasoning_content": "hm"})
        return await _right({"messages": body["messages"][:1]})

    with ChatServer(answer) as server:
        config = at(server, "eval.max_rollout_turns=2", "data.num_samples=1", "eval.num_tests_per_prompt=1")
        (record,) = ask(config, loop, TwoTurns())
    assert record.is_correct and record.error is None and record.response_length == 6 and record.reasoning == "hm"
    assert record.response.startswith('<tool_call>\n{"name": "check", "arguments": {}}\n</tool_call>')
    assert server.bodies[1]["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "check", "content": "17", "tool_call_id": "c9"},
        {"role": "user", "content": "Really?"},
    ]


@pytest.mark.parametrize(("turns", "outcome"), [(1, "prompt_too_long"), (2, "truncated")])
def test_a_conversation_that_does_not_fit_is_no_error(loop: EventLoopThread, turns: int, outcome: str) -> None:
    async def full(body: dict[str, Any]) -> Response | dict[str, Any]:
        if len(body["messages"]) < turns:
            return completion("short")
        text = "This model's maximum context length is 128 tokens."
        return JSONResponse({"error": {"message": text, "code": 400}}, 400)

    with ChatServer(full) as server:
        records = ask(at(server, "eval.max_rollout_turns=2"), loop, TwoTurns())
    assert {(record.outcome, record.error) for record in records} == {(outcome, None)}


def test_a_cut_answer_is_truncated(loop: EventLoopThread) -> None:
    async def cut(body: dict[str, Any]) -> dict[str, Any]:
        return completion("half of it", "length", 24)

    with ChatServer(cut) as server:
        records = ask(at(server), loop)
    assert {(record.outcome, record.response_length) for record in records} == {("truncated", 24)}


def test_nothing_starts_if_the_endpoint_does_not_answer(monkeypatch: Any) -> None:
    monkeypatch.setattr(evaluator, "init_ray", lambda **_: pytest.fail("Ray was started"))
    with pytest.raises(ConfigError, match="Start the server, or correct"):
        evaluate(
            eval_config("generation.endpoint.base_url=http://127.0.0.1:9/v1", "generation.endpoint.model=tiny", *SMALL)
        )


def test_the_key_is_not_in_the_variables_of_processes_that_start(monkeypatch: Any) -> None:
    monkeypatch.setenv("REMOTE_KEY", KEY)
    with ChatServer(_right) as server:
        config = at(server, "generation.endpoint.api_key_env=REMOTE_KEY")
    with key_stays_here(config):
        assert "REMOTE_KEY" not in os.environ
    assert os.environ["REMOTE_KEY"] == KEY
    assert KEY not in json.dumps(config.model_dump(mode="json"))
    grader = {"name": "llm_judge", "kwargs": {"api_key_env": "REMOTE_KEY"}}
    for section in ({"judges": [{"api_key_env": "REMOTE_KEY"}]}, AgentEnvironmentConfig.of(_agent(grader))):
        config.env["mine"], config.data.env_name = section, "mine"
        with key_stays_here(config):
            assert os.environ["REMOTE_KEY"] == KEY
    config.env["mine"] = {"api_key_env": "OTHER"}
    monkeypatch.delenv("REMOTE_KEY")
    with key_stays_here(config):
        pass
    assert "REMOTE_KEY" not in os.environ


def _agent(grader: dict[str, Any]) -> dict[str, Any]:
    return {"program": "some.program", "grader": grader}


def test_a_field_that_is_left_out_now_is_another_evaluation(tmp_path: Any) -> None:
    with ChatServer(_right) as server:
        given = [f"eval.save_path={tmp_path}", "+generation.endpoint.extra_body.a=1"]
        store = RecordStore(at(server, *given), 1)
        store.append([AnswerRecord(0, 0, "p", "r", "1", "1", 1.0, "finished", 1)])
        store.close()
        RecordStore(at(server, *given), 1).close()
        with pytest.raises(ConfigError, match=r"extra_body was \{'a': 1\} and is \{'a': 1, 'temperature': None\}"):
            RecordStore(at(server, *given, "+generation.endpoint.extra_body.temperature=null"), 1)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.max_input_seq_length=7", "counts tokens"),
        ("tokenizer.name=other", "tokenizer.name=other has no effect"),
        ("+tokenizer.chat_template_kwargs.x=1", "renders the messages"),
    ],
)
def test_keys_about_tokens_are_refused(override: str, told: str) -> None:
    with ChatServer(_right) as server, pytest.raises(ConfigError, match=told):
        at(server, override)


def test_no_gpu_and_no_model_are_needed(monkeypatch: Any) -> None:
    from nemo_rl.config import check_device
    from nemo_rl.launch.checks import Moment, make_checks

    with ChatServer(_right) as server:
        config = at(
            server,
            *("cluster.device=cuda", "cluster.gpus_per_node=8", "generation.model_name=no/such-model"),
            *("generation.max_new_tokens=100000", "generation.engine.tensor_parallel_size=4"),
        )
    check_device(config, gpu_count=0)
    make_checks(config, Moment.FIRST)
    assert list(config.model_keys()) == [] and config.policy.generation is None
