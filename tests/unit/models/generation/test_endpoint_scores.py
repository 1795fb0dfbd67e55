"""Log-probabilities of a teacher's endpoint: equal to those of its model, asked for again, and checked before a run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from chat_server import KEY, ChatServer, Stall
from starlette.responses import JSONResponse, Response
from transformers import AutoModelForCausalLM

from nemo_rl.config import TeacherEndpointConfig
from nemo_rl.config.base.paths import REPOSITORY_ROOT
from nemo_rl.config.schema.model.policy import TokenizerConfig
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.remote.scores import EndpointScores
from nemo_rl.utils.errors import ConfigError, EndpointUnusableError

TEACHER = str(Path(REPOSITORY_ROOT) / "examples/assets/tiny-teacher")
TOKENIZER = get_tokenizer(TokenizerConfig.build(name=TEACHER))
MODEL = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval()
ROWS = [[257, 84, 82, 198], [17, 16, 10, 16, 22, 28, 258], [84]]
SECTION = "on_policy_distillation.endpoints.math"


def scores_of(ids: list[int]) -> list[float | None]:
    with torch.no_grad():
        logprobs = MODEL(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [None, *(float(logprobs[place, token]) for place, token in enumerate(ids[1:]))]


def answer_of(ids: list[int], shift: float = 0.0, texts: list[str] | None = None) -> dict[str, Any]:
    values = [value if value is None else value + shift for value in scores_of(ids)]
    tokens = texts or [TOKENIZER.decode([token]) for token in ids]
    return {"choices": [{"text": "", "logprobs": {"tokens": [*tokens, "x"], "token_logprobs": [*values, -1.0]}}]}


async def scored(body: dict[str, Any]) -> dict[str, Any]:
    assert body["echo"] is True and body["temperature"] == 1.0 and body["model"] == "tiny"
    return answer_of(body["prompt"])


def rows_of(rows: list[list[int]]) -> BatchedDataDict[Any]:
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return BatchedDataDict(input_ids=padded, input_lengths=torch.tensor([len(row) for row in rows]))


def teacher(server: ChatServer, **keys: Any) -> EndpointScores:
    keys = {"base_url": server.url, "model": "tiny", "backoff_s": 0.01, "timeout_s": 5.0, **keys}
    return EndpointScores(TeacherEndpointConfig.build(**keys), SECTION)


def test_the_numbers_are_those_of_the_model() -> None:
    with ChatServer(scored) as server:
        found = teacher(server, max_concurrent_requests=2).get_logprobs(rows_of(ROWS))["logprobs"]
    assert found.shape == (3, 7)
    for row, ids in zip(found, ROWS, strict=True):
        assert row[: len(ids)].tolist() == pytest.approx([0.0, *scores_of(ids)[1:]], abs=1e-6)
        assert not row[len(ids) :].any()
    assert server.most_at_once <= 2 and len(server.bodies) == 3


def test_a_failed_request_is_sent_again_and_at_last_named() -> None:
    busy = JSONResponse({"error": "busy"}, 503)
    with ChatServer(scored, [busy, Stall(b"{}")]) as server:
        found = teacher(server, timeout_s=0.5).get_logprobs(rows_of(ROWS[:1]))["logprobs"]
        assert found[0].tolist() == pytest.approx([0.0, *scores_of(ROWS[0])[1:]], abs=1e-6)
        server.script = [busy] * 3
        with pytest.raises(EndpointUnusableError, match=r"status 503.*\(attempt 3 of 3\)"):
            teacher(server, max_attempts=3).get_logprobs(rows_of(ROWS[:1]))


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (JSONResponse({"choices": [{"text": ""}]}), "must accept `echo` and `logprobs`"),
        (JSONResponse(answer_of([1, 2, 3])), "scored 4 tokens in place of 7; it must take token ids"),
        (JSONResponse({"error": {"message": f"no {KEY}"}}, 401), r"status 401.*no \*\*\*"),
        (Response('{"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [null]}}]}'), "scored 1 tokens"),
    ],
)
def test_an_answer_without_scores_is_refused_once(response, message, monkeypatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    with ChatServer(scored, [response]) as server:
        with pytest.raises(EndpointUnusableError, match=message):
            teacher(server, api_key_env="TEACHER_KEY").get_logprobs(rows_of(ROWS[1:2]))
        assert len(server.bodies) == 1


def test_a_budget_ends_the_run_before_it_is_exceeded() -> None:
    with ChatServer(scored) as server:
        limited = teacher(server, max_tokens=12)
        limited.get_logprobs(rows_of(ROWS))
        with pytest.raises(EndpointUnusableError, match=r"endpoints\.math\.max_tokens=12: .* would send 13 tokens"):
            limited.get_logprobs(rows_of(ROWS[2:]))
        assert len(server.bodies) == 3


def test_the_check_accepts_the_same_model() -> None:
    with ChatServer(scored) as server:
        teacher(server).check(TOKENIZER)


def test_the_check_refuses_another_vocabulary() -> None:
    async def shifted(body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        return answer_of(ids, texts=[TOKENIZER.decode([(token + 1) % 256]) for token in ids])

    with (
        ChatServer(shifted) as server,
        pytest.raises(ConfigError, match=r"tokens of model 'tiny' are not the policy's"),
    ):
        teacher(server).check(TOKENIZER)


def test_the_check_refuses_a_server_whose_answers_change(caplog) -> None:
    shifts = iter([0.0, -0.01, 0.0, -0.2])

    async def changing(body: dict[str, Any]) -> dict[str, Any]:
        return answer_of(body["prompt"], next(shifts))

    with ChatServer(changing) as server:
        teacher(server).check(TOKENIZER)
        assert "two equal requests differ by 0.01 nats" in caplog.text
        with pytest.raises(ConfigError, match=r"differ by 0\.2 nats"):
            teacher(server).check(TOKENIZER)


def test_the_check_names_an_endpoint_that_cannot_be_reached() -> None:
    with ChatServer(scored) as server:
        closed = teacher(server, max_attempts=1)
    with pytest.raises(ConfigError, match=r"cannot be reached[\s\S]*Check base_url, model and api_key_env of"):
        closed.check(TOKENIZER)
