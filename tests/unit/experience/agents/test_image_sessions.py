"""Conversations of programs with images: their tokens, the images of engine and trainer, and planted faults."""

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent_parts import ProgramEnvironment, collecting
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, BadRequestError
from PIL import Image as Pictures
from tiny_models import save_tiny_checkpoint
from tiny_vision_models import make_tiny_vision_model, make_vision_processor
from transformers import AutoProcessor

from nemo_rl.agents.dialects.images import as_requested
from nemo_rl.agents.endpoint.prompts import Prompt
from nemo_rl.algorithms.rollout.batches import build_training_batch
from nemo_rl.config import TokenizerConfig
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.images.image import Image
from nemo_rl.data.interfaces import TaskDataSpec, TokenizerType
from nemo_rl.data.processors import vlm_hf_data_processor
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.experience.rollouts import RolloutKey, RolloutLimits
from nemo_rl.experience.rows import rows_of
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    VersionSpan,
)

pytest.importorskip("torchvision")

QUESTION = "How many?"


def picture(side: int, color: int = 90) -> Pictures.Image:
    return Pictures.new("RGB", (side, side), (side, color, 2 * side))


def png(made: Pictures.Image) -> bytes:
    file = io.BytesIO()
    made.save(file, "PNG")
    return file.getvalue()


FIRST, SECOND, THIRD = picture(28), picture(56), picture(84)


def address(made: Pictures.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(made)).decode()}"


def sent(*made: Pictures.Image, text: str = "And here?") -> list[Any]:
    urls = [{"type": "image_url", "image_url": {"url": address(each)}} for each in made]
    return [*urls, {"type": "text", "text": text}]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "smolvlm"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_tiny_checkpoint(path, make_tiny_vision_model(request.param), make_vision_processor(request.param))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TokenizerType:
    return get_tokenizer(TokenizerConfig.build(name=str(folder), use_processor=True))


class Engine(GenerationInterface):
    """Says "yes" in a few tokens. Checks, as engines do, that tokens and images fit."""

    weight_version = 1

    def __init__(self, tokenizer: Any, word: str = "yes") -> None:
        self.word = [*tokenizer(word, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        if request.row_inputs is not None:
            request.row_inputs.require(torch.tensor(request.prompt_token_ids))
        logprobs = np.full(len(self.word), -0.5, np.float32)
        return GenerationResult(np.array(self.word, np.int32), logprobs, "stop", [VersionSpan(0, 1)])

    def shutdown(self) -> None:
        pass


def played(engine: Engine, tokenizer: Any, program: Any, longest: int = 4000) -> Trajectory:
    """Play one sample, whose prompt has the first picture."""
    content = [{"type": "image", "image": png(FIRST)}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "3"}]
    row = {"messages": messages, "task_name": "agent"}
    datum = vlm_hf_data_processor(row, TaskDataSpec("agent"), tokenizer, longest, 0)

    async def with_addresses(task: Mapping[str, Any]) -> float:
        return float(await program({**task, "messages": as_requested(task["messages"])}))

    environment = ProgramEnvironment(with_addresses)
    sampling = SamplingParams(max_new_tokens=20, stop_token_ids=(tokenizer.eos_token_id,))
    limits = RolloutLimits(max_sequence_length=longest, max_turns=1, timeout_s=60.0)
    with collecting(engine, environment, tokenizer, limits) as runner:
        (sample,) = runner.collect(rl_collate_fn([datum]), 1, sampling, RolloutKey(1, "train", 0)).trajectories
    assert sample.error is None, sample.error
    return sample


async def converse(task: Mapping[str, Any]) -> float:
    """Ask about three pictures, of which a tool returns the last one."""
    async with AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=0) as client:
        messages = list(task["messages"])
        for content in (sent(SECOND), sent(THIRD, FIRST), None):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said: Any = {"role": "assistant", "content": answer.choices[0].message.content}
            role: Any = {"role": "user"} if len(messages) == 1 else {"role": "tool", "tool_call_id": "c"}
            messages += [said, {**role, "content": content}]
    return 1.0


def images_of(row: Trajectory) -> list[Image]:
    assert row.row_inputs is not None
    assert row.row_inputs.images is not None
    return list(row.row_inputs.images.images)


def ids_of(row: Trajectory) -> torch.Tensor:
    return torch.cat([message["token_ids"] for message in row.message_log])


def turn(role: str, *made: Pictures.Image, text: str) -> dict[str, Any]:
    return {"role": role, "content": [*({"type": "image"} for _ in made), {"type": "text", "text": text}]}


def test_the_tokens_of_a_conversation_are_those_of_the_processor_of_transformers(
    folder: Path, tokenizer: TokenizerType
) -> None:
    engine = Engine(tokenizer, " yes" if "smolvlm" in str(folder) else "yes")
    sample = played(engine, tokenizer, converse)
    assert (sample.branches, sample.num_turns) == ([], 3)
    assert [image.encoded for image in images_of(sample)] == list(map(png, (FIRST, SECOND, THIRD, FIRST)))
    if "qwen" in str(folder):  # the other template doubles the space with which the answer begins
        assert sample.agent_counts["unlike_template"] == 0
    processor: Any = AutoProcessor.from_pretrained(folder)
    chat = [
        turn("user", FIRST, text=QUESTION),
        turn("assistant", text="yes"),
        turn("user", SECOND, text="And here?"),
        turn("assistant", text="yes"),
        turn("tool", THIRD, FIRST, text="And here?"),
    ]
    text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    wanted = processor(text=[text], images=[FIRST, SECOND, THIRD, FIRST], return_tensors="pt")["input_ids"][0].tolist()
    assert ids_of(sample).tolist() == wanted + engine.word
    assert [len(request.row_inputs.images.images) for request in engine.requests] == [1, 2, 4]  # type: ignore[union-attr]
    assert engine.requests[-1].prompt_token_ids == wanted


def test_sampled_tokens_stay_and_the_row_is_stored_with_its_images(tokenizer: TokenizerType) -> None:
    engine = Engine(tokenizer, "y e s ")  # the client gets the text without its last space
    sample = played(engine, tokenizer, converse)
    written = [message["token_ids"].tolist() for message in sample.message_log if "generation_logprobs" in message]
    assert written == [engine.word] * 3
    restored = Trajectory.from_state(sample.state_dict())
    assert [image.digest for image in images_of(restored)] == [image.digest for image in images_of(sample)]
    (row,) = rows_of([restored])
    assert row.row_inputs is not None
    row.row_inputs.require(ids_of(row))


def test_the_prompt_of_a_row_has_the_same_tokens_as_its_request(tokenizer: TokenizerType) -> None:
    first: list[Any] = []

    async def ask(task: Mapping[str, Any]) -> float:
        first.extend(task["messages"])
        async with AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"]) as client:
            await client.chat.completions.create(model="policy", messages=list(task["messages"]))
        return 1.0

    engine = Engine(tokenizer)
    sample = played(engine, tokenizer, ask)
    row = {"messages": [{"role": "user", "content": first[0]["content"]}, {"role": "assistant", "content": ""}]}
    row["messages"][0]["content"] = [{"type": "image", "image": png(FIRST)}, {"type": "text", "text": QUESTION}]
    datum = vlm_hf_data_processor(row, TaskDataSpec("agent"), tokenizer, 4000, 0)
    assert engine.requests[0].prompt_token_ids == datum["message_log"][0]["token_ids"].tolist()
    assert sample.prompt_length == datum["length"]


def test_an_edited_history_begins_a_conversation_with_its_own_images(tokenizer: TokenizerType) -> None:
    """A history with other bytes, the same picture twice, or another order is not continued."""

    async def edit(task: Mapping[str, Any]) -> float:
        async with AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"]) as client:
            for made in ([FIRST, SECOND], [picture(28, 91), SECOND], [SECOND, FIRST], [FIRST, FIRST, SECOND], [FIRST]):
                messages: list[Any] = [{"role": "user", "content": sent(*made)}]
                for _ in range(2):
                    answer = await client.chat.completions.create(model="policy", messages=messages)
                    said = {"role": "assistant", "content": answer.choices[0].message.content}
                    messages = [*messages, said, {"role": "user", "content": sent(THIRD)}]
        return 1.0

    sample = played(Engine(tokenizer), tokenizer, edit)
    assert len(sample.branches) == 4
    expected = [[28, 56, 84], [28, 56, 84], [56, 28, 84], [28, 28, 56, 84], [28, 84]]
    restored = Trajectory.from_state(sample.state_dict())
    for given in (sample, restored):
        rows = rows_of([given])
        assert [[image.size[0] for image in images_of(row)] for row in rows] == expected
        for row in rows:
            assert row.row_inputs is not None
            row.row_inputs.require(ids_of(row))
        assert images_of(rows[0])[0].digest != images_of(rows[1])[0].digest
        batch = build_training_batch([given], 0, mask_truncated=False)
        assert [len(inputs.images.images) for inputs in batch["row_inputs"]] == [3, 3, 3, 4, 2]


def test_calls_with_other_images_of_the_same_size_get_other_seeds(tokenizer: TokenizerType) -> None:
    async def ask(task: Mapping[str, Any]) -> float:
        async with AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"]) as client:
            for made in (FIRST, picture(28, 91), FIRST):
                await client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": sent(made)}], user=str(made)
                )
        return 1.0

    engine = Engine(tokenizer)
    played(engine, tokenizer, ask)
    same = [request.prompt_token_ids for request in engine.requests]
    assert same[0] == same[1] == same[2]
    assert len({request.seed for request in engine.requests}) == 3


FAULTS = {
    "dropped": lambda images: images[:-1],
    "doubled": lambda images: [*images, *images[-1:]],
    "swapped": lambda images: images[::-1],
    "replaced": lambda images: [*images[:-1], *images[:1]],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_in_the_images_of_a_later_turn_is_refused(
    fault: str, tokenizer: TokenizerType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "smolvlm" in str(folder) and fault in ("swapped", "replaced"):
        pytest.skip("all images of this tiny model have the same tokens")
    whole = Prompt.images.fget  # type: ignore[attr-defined]

    def faulty(prompt: Prompt) -> list[Image]:
        images = whole(prompt)
        return images if len(images) < 2 else FAULTS[fault](images)

    monkeypatch.setattr(Prompt, "images", property(faulty))
    errors: list[BadRequestError] = []

    async def ask(task: Mapping[str, Any]) -> float:
        try:
            await converse(task)
        except BadRequestError as error:
            errors.append(error)
        return 1.0

    engine = Engine(tokenizer)
    played(engine, tokenizer, ask)
    (error,) = errors
    assert error.code == "invalid_messages"
    assert "image" in error.message
    assert len(engine.requests) == 1


def test_texts_with_placeholders_and_too_long_prompts_are_refused(tokenizer: TokenizerType, folder: Path) -> None:
    placeholder = "<image>" if "smolvlm" in str(folder) else "<|image_pad|>"
    errors: list[BadRequestError] = []

    async def ask(task: Mapping[str, Any]) -> float:
        async with AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=0) as client:
            user: Any = {"role": "user", "content": f"{placeholder}?"}
            long: Any = {"role": "user", "content": [{"type": "text", "text": "word " * 40000}, *sent(FIRST)]}
            many: Any = {"role": "user", "content": sent(*[picture(84)] * 100)}
            beginning: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": placeholder}]
            for messages in ([user], [long], [many], [{"role": "user", "content": [*sent(FIRST), *user_parts(user)]}]):
                with pytest.raises(BadRequestError) as caught:
                    await client.chat.completions.create(model="policy", messages=messages)
                errors.append(caught.value)
            more = {"continue_final_message": True, "add_generation_prompt": False}
            with pytest.raises(BadRequestError) as caught:
                await client.chat.completions.create(model="policy", messages=beginning, extra_body=more)
            errors.append(caught.value)
            with pytest.raises(BadRequestError) as caught:
                await client.completions.create(model="policy", prompt=placeholder)
            errors.append(caught.value)
        return 1.0

    played(Engine(tokenizer), tokenizer, ask, longest=400)
    long = "context_length_exceeded"
    assert [error.code for error in errors] == ["invalid_messages", long, long, *["invalid_messages"] * 3]


def user_parts(message: Any) -> list[Any]:
    return [{"type": "text", "text": message["content"]}]


def test_the_other_dialects_continue_conversations_with_images(tokenizer: TokenizerType) -> None:
    """The Responses API by its stored response, and Anthropic's by the whole history."""
    data = base64.b64encode(png(SECOND)).decode()

    async def ask(task: Mapping[str, Any]) -> float:
        async with AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"]) as client:
            part = {"type": "input_image", "image_url": address(FIRST), "detail": "auto"}
            items: Any = [{"role": "user", "content": [part, {"type": "input_text", "text": "Here?"}]}]
            first = await client.responses.create(model="policy", input=items)
            items[0]["content"][0]["image_url"] = address(SECOND)
            await client.responses.create(model="policy", input=items, previous_response_id=first.id)
        address_of = task["base_url"].removesuffix("/v1")
        async with AsyncAnthropic(base_url=address_of, api_key=task["api_key"]) as anthropic:
            source = {"type": "base64", "media_type": "image/png", "data": data}
            user: Any = {"role": "user", "content": [{"type": "image", "source": source}]}
            made = await anthropic.messages.create(model="policy", max_tokens=20, messages=[user])
            text = next(block.text for block in made.content if block.type == "text")
            said: Any = {"role": "assistant", "content": text}
            result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", **user}]}
            del result["content"][0]["role"]
            await anthropic.messages.create(model="policy", max_tokens=20, messages=[user, said, result])
        return 1.0

    sample = played(Engine(tokenizer), tokenizer, ask)
    assert [[image.size[0] for image in images_of(row)] for row in rows_of([sample])] == [[28, 56], [56, 56]]
    assert sample.num_turns == 4


def test_the_tokens_of_a_request_can_be_asked(tokenizer: TokenizerType) -> None:
    import httpx

    found: list[Any] = []

    async def ask(task: Mapping[str, Any]) -> float:
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {task['api_key']}"}) as client:
            body = {"messages": list(task["messages"])}
            found.append((await client.post(f"{task['base_url']}/tokenize", json=body)).json())
            found.append((await client.post(f"{task['base_url']}/chat/completions", json=body)).json())
        return 1.0

    engine = Engine(tokenizer)
    played(engine, tokenizer, ask)
    assert found[0]["tokens"] == engine.requests[0].prompt_token_ids
    assert found[1]["usage"]["prompt_tokens"] == found[0]["count"]


def test_a_text_policy_refuses_images_and_texts_are_unchanged(folder: Path) -> None:
    if "smolvlm" in str(folder):  # its template reads lists of parts only
        return
    tokenizer = get_tokenizer(TokenizerConfig.build(name=str(folder)))
    found: list[Any] = []

    async def ask(task: Mapping[str, Any]) -> float:
        async with AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
            with pytest.raises(BadRequestError) as caught:
                await client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": sent(FIRST)}]
                )
            found.append(json.loads(caught.value.response.text)["error"])
            await client.chat.completions.create(model="policy", messages=messages)
        return 1.0

    environment = ProgramEnvironment(ask)
    engine = Engine(tokenizer)
    from agent_parts import rows

    with collecting(engine, environment, tokenizer) as runner:
        sampling = SamplingParams(max_new_tokens=20, stop_token_ids=(tokenizer.eos_token_id,))
        (sample,) = runner.collect(rows(tokenizer, 1), 1, sampling, RolloutKey(1, "train", 0)).trajectories
    assert sample.error is None
    assert found[0]["param"] == "messages[0].content[0].type"
    assert found[0]["code"] == "unsupported_parameter"
    assert sample.row_inputs is None
    assert [request.row_inputs for request in engine.requests] == [None]
