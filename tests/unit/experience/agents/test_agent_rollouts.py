"""Programs with the unmodified package openai sample through the endpoint, and their tokens are recorded."""

from collections.abc import Mapping
from typing import Any

import pytest
from agent_parts import TOKENIZERS, ProgramEnvironment, play
from openai import AsyncOpenAI
from random_model import RandomModelEngine
from transformers import AutoTokenizer

from nemo_rl.experience.rows import rows_of
from nemo_rl.experience.trajectory import Ending, Outcome


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TOKENIZERS / "qwen3")


def client_of(task: Mapping[str, Any], **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"], **options)


async def conversation(task: Mapping[str, Any]) -> float:
    """Three turns, whose history grows."""
    async with client_of(task) as client:
        messages = list(task["messages"])
        for turn in range(3):
            answer = await client.chat.completions.create(model=task["model"], messages=messages)
            messages += [
                answer.choices[0].message.model_dump(exclude_none=True),
                {"role": "user", "content": str(turn)},
            ]
    return 1.0


def test_a_growing_conversation_is_one_row_of_the_sampled_tokens(tokenizer: Any) -> None:
    engine = RandomModelEngine(tokenizer, [])
    (sample,) = play(engine, ProgramEnvironment(conversation), tokenizer)
    assert (sample.reward, sample.outcome, sample.ended_by) == (1.0, Outcome.FINISHED, Ending.ENVIRONMENT), sample.error
    assert sample.num_turns == 3 and not sample.branches
    ids = [token for message in sample.message_log for token in message["token_ids"].tolist()]
    assert len(engine.sampled) == 3
    for (start, end), (prompt, written) in zip(sample.turn_spans, engine.sampled, strict=True):
        assert (ids[:start], ids[start:end]) == (prompt, written)
    assert sample.turn_rewards == [0.0, 0.0, 1.0]
    assert "api_key" not in str(sample.state_dict())


def test_an_edited_history_is_a_second_row_and_each_token_trains_once(tokenizer: Any) -> None:
    async def edits(task: Mapping[str, Any]) -> float:
        async with client_of(task) as client:
            question = list(task["messages"])
            first = await client.chat.completions.create(model="any", messages=question)
            history = [*question, first.choices[0].message.model_dump(exclude_none=True)]
            for words in ("more", "other"):
                await client.chat.completions.create(
                    model="any", messages=[*history, {"role": "user", "content": words}]
                )
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "summary"}])
        return 0.5

    engine = RandomModelEngine(tokenizer, [])
    (sample,) = play(engine, ProgramEnvironment(edits), tokenizer)
    assert sample.reward == 0.5, sample.error
    rows = rows_of([sample])
    assert len(rows) == 3 and sample.num_turns == 4
    assert sum(row.response_length for row in rows) == sum(len(written) for _, written in engine.sampled)
    assert len(rows[0].turn_spans) == 2 and len(rows[1].turn_spans) == 1 == len(rows[2].turn_spans)


def test_the_same_program_gets_the_same_answers_again(tokenizer: Any) -> None:
    first, second = (
        play(RandomModelEngine(tokenizer, []), ProgramEnvironment(conversation), tokenizer, prompts=2, samples=2)
        for _ in range(2)
    )
    assert [t.response_text for t in first] == [t.response_text for t in second]
    assert len({t.response_text for t in first}) == 4


def test_single_calls_have_rewards_by_the_ids_of_their_responses(tokenizer: Any) -> None:
    environment = ProgramEnvironment(conversation)

    async def rewarded(task: Mapping[str, Any]) -> float:
        async with client_of(task) as client:
            messages = list(task["messages"])
            answers = [await client.chat.completions.create(model="any", messages=messages) for _ in range(2)]
        environment.call_rewards = {answers[0].id: 0.75}
        return 1.0

    environment.program = rewarded
    (sample,) = play(RandomModelEngine(tokenizer, []), environment, tokenizer)
    assert sample.error is None and sample.reward == 1.0
    assert sample.num_turns == 2 and len(rows_of([sample])) == 2
    assert sample.turn_rewards == [0.75, 0.25]  # the last call has the rest


def test_the_last_conversation_alone_is_trained_if_asked_for(tokenizer: Any) -> None:
    async def two(task: Mapping[str, Any]) -> float:
        async with client_of(task) as client:
            for text in ("first", "second"):
                await client.chat.completions.create(model="any", messages=[{"role": "user", "content": text}])
        return 1.0

    (sample,) = play(RandomModelEngine(tokenizer, []), ProgramEnvironment(two, credit="last"), tokenizer)
    last, first = rows_of([sample])
    assert "second" in last.prompt_text and "first" in first.prompt_text
    assert (last.loss_multiplier, first.loss_multiplier) == (1.0, 0.0)


def test_a_program_that_raises_has_no_reward_and_its_calls_are_kept(tokenizer: Any) -> None:
    async def raises(task: Mapping[str, Any]) -> float:
        async with client_of(task) as client:
            await client.chat.completions.create(model="any", messages=list(task["messages"]))
        raise RuntimeError("no more")

    (sample,) = play(RandomModelEngine(tokenizer, []), ProgramEnvironment(raises), tokenizer)
    assert (sample.reward, sample.outcome) == (None, Outcome.REWARD_ERROR)
    assert "no more" in (sample.error or "") and sample.num_turns == 1
    assert "agent" not in sample.extra_env_info
