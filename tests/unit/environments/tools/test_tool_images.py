"""Images that tools return: what the model reads, and what it reads instead where an image cannot be used."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drawing_tools_for_tests import encoded, picture, png
from tiny_models import save_tiny_checkpoint
from tiny_vision_models import QWEN_TOOLS_TEMPLATE, make_tiny_vision_model, make_vision_processor
from transformers import AutoProcessor

from nemo_rl.config import TokenizerConfig
from nemo_rl.config.schema.kits import ToolEnvironmentConfig
from nemo_rl.data.images.messages import images_in, inputs_of
from nemo_rl.data.messages.observations import ObservationRenderer
from nemo_rl.data.processors import prompt_entry
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.kits.tools.environment import ToolEnvironment
from nemo_rl.kits.tools.interfaces import ToolOutput
from nemo_rl.kits.tools.outputs import NOT_SEEN
from nemo_rl.kits.tools.toolbox import make_toolbox

pytest.importorskip("torchvision")

SERVER = [sys.executable, str(Path(__file__).parent / "mcp_server_for_tests.py")]
LIMITS = {"max_megapixels": 0.01, "max_megabytes": 0.05}
FORMS = {
    "as_picture": ["<image>"],
    "as_block": ["<image>"],
    "as_part": ["<image>"],
    "as_address": ["<image>"],
    "as_list": ["one\ntwo", "<image>", "<image>", "3"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2_5_vl")
    save_tiny_checkpoint(path, make_tiny_vision_model("qwen2_5_vl"), make_vision_processor("qwen2_5_vl"))
    return path


def keys(folder: Path, *, reads_images: bool) -> dict[str, Any]:
    tokenizer = {
        "name": str(folder),
        "chat_template": QWEN_TOOLS_TEMPLATE,
        "chat_template_kwargs": None,
        "use_processor": reads_images,
    }
    grader = {"name": "math", "kwargs": {"num_workers": 1}}
    drawings = {"name": "drawing_tools_for_tests.Drawings"}
    return {"tools": [drawings], "tokenizer": tokenizer, "grader": grader, "images": LIMITS, "max_output_bytes": 100}


@pytest.fixture(scope="module", params=[True, False], ids=["images", "text"])
def environment(request: pytest.FixtureRequest, folder: Path) -> Iterator[ToolEnvironment]:
    made = ToolEnvironment(keys(folder, reads_images=request.param))
    yield made
    asyncio.run(made.shutdown())


def observed(environment: ToolEnvironment, call: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the observation after a response, and the counts that are not 0."""
    tokenizer = environment._tokenizer
    ids = torch.tensor(tokenizer(f"[{call}]<|im_end|>", add_special_tokens=False)["input_ids"])

    async def play() -> Any:
        start = await environment.open_episode({"ground_truth": "1"})
        result = await environment.step([[{"role": "assistant", "content": call, "token_ids": ids}]], [start.metadata])
        await environment.close_episode(result.metadata[0])
        return result

    result = asyncio.run(play())
    counts = {name: count for name, count in result.metadata[0]["counts"].items() if count}
    return result.observations[0], counts


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def shown(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] if part["type"] == "text" else "<image>" for part in content]


@pytest.mark.parametrize("form", FORMS)
def test_results_with_images_become_parts_or_a_text_that_says_so(environment: ToolEnvironment, form: str) -> None:
    observation, counts = observed(environment, f"{form}()")
    (message,) = observation["messages"]
    assert (message["role"], message["name"], counts) == ("tool", form, {"tool_calls": 1})
    if environment.cfg.tokenizer.use_processor:
        assert shown(message["content"]) == FORMS[form]
        files = [part["image"] for part in message["content"] if part["type"] == "image"]
        assert files == [png(), png(56)][: len(files)]
        assert observation["content"] == "".join(FORMS[form])
    else:
        assert message["content"] == "\n".join(FORMS[form]).replace("<image>", NOT_SEEN)[:100]
        assert observation["content"] == message["content"]


def test_results_without_an_image_are_the_same_text_for_all_models(environment: ToolEnvironment) -> None:
    observation, _ = observed(environment, "as_text()")
    written = json.dumps(["one", {"type": "text", "text": "two"}, {"type": "image", "place": 3}])
    assert observation["messages"][0]["content"] == observation["content"] == written


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ("broken", "Error: broken: an image cannot be used: the image data is not in a format that Pillow reads"),
        ("missing", "the image /does/not/exist.png is not a file"),
        ("elsewhere", "data.images.allow_urls=true"),
        ("large", "more than data.images.max_megapixels=0.01"),
        ("heavy", "Error: ValueError: the images of one call have more than 0.05 megabytes"),
    ],
)
def test_an_image_that_cannot_be_used_is_an_error_that_the_model_reads(
    environment: ToolEnvironment, tool: str, reason: str
) -> None:
    observation, counts = observed(environment, f"{tool}()")
    text = observation["messages"][0]["content"]
    if environment.cfg.tokenizer.use_processor:
        assert reason in text
        assert counts == {"tool_calls": 1, "tool_errors": 1}
    else:
        assert NOT_SEEN in text
        assert counts == {"tool_calls": 1}


def test_the_tokens_of_an_observation_are_those_of_the_processor_of_transformers(
    folder: Path, environment: ToolEnvironment
) -> None:
    """Two calls of one turn, with one and two images, continue a prompt with an image."""
    if not environment.cfg.tokenizer.use_processor:
        pytest.skip("the model reads text only")
    tokenizer = get_tokenizer(
        TokenizerConfig.build(name=str(folder), use_processor=True, chat_template=QWEN_TOOLS_TEMPLATE)
    )
    renderer = ObservationRenderer(tokenizer)
    question = renderer.read({"role": "user", "content": [{"type": "image", "image": picture(84)}]})
    entry = prompt_entry({"messages": [question], "tools": None}, tokenizer)
    observation = renderer.read(observed(environment, "as_list(), as_picture()")[0])
    answer = torch.tensor(tokenizer("[as_list(), as_picture()]<|im_end|>", add_special_tokens=False)["input_ids"])
    log = [entry, {"role": "assistant", "content": "", "token_ids": answer}]
    added = renderer.token_ids(observation, log, len(entry["token_ids"]))
    images = images_in([question, *observation["messages"]])
    assert [image.size[0] for image in images] == [84, 28, 56, 28]
    ids = torch.cat([entry["token_ids"], answer, added])
    inputs = inputs_of(images, tokenizer)
    assert inputs is not None
    inputs.require(ids)
    processor: Any = AutoProcessor.from_pretrained(folder)
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("as_list", "as_picture")]
    image: dict[str, Any] = {"type": "image"}
    chat = [
        {"role": "user", "content": [image]},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "one\ntwo"}, image, image, {"type": "text", "text": "3"}],
        },
        {"role": "tool", "content": [image]},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    made = [picture(84), picture(28), picture(56), picture(28)]
    wanted = processor(text=[text], images=made, return_tensors="pt")["input_ids"][0]
    assert ids.tolist() == wanted.tolist()


@pytest.mark.parametrize("reads_images", [True, False])
def test_isolated_tools_and_servers_return_the_same_images(folder: Path, reads_images: bool) -> None:
    given = keys(folder, reads_images=reads_images)
    isolated = {**given["tools"][0], "isolate": True}
    server = {"name": "mcp", "command": SERVER}

    async def outputs(toolbox: Any) -> list[ToolOutput]:
        episode = await toolbox.open({})
        calls = {"as_list": {}, "heavy": {}, "draw": {"data": encoded()}}
        try:
            return [await episode.tools_of(name).call(name, arguments) for name, arguments in calls.items()]
        finally:
            await episode.close()

    config = ToolEnvironmentConfig.build(**{**given, "tools": [isolated, server]})
    listed, heavy, drawn = asyncio.run(outputs(make_toolbox(config)))
    local = make_toolbox(ToolEnvironmentConfig.build(**given))

    async def same() -> ToolOutput:
        return await (await local.open({})).tools_of("as_list").call("as_list", {})

    assert (listed.text, list(listed.parts)) == ((expected := asyncio.run(same())).text, list(expected.parts))
    if reads_images:
        assert (heavy.fault, heavy.text) == (
            "error",
            "Error: ValueError: the images of one call have more than 0.05 megabytes (data.images.max_megabytes)",
        )
        assert shown(drawn.parts) == ["before", "<image>", "after"]
        assert drawn.parts[1]["image"] == f"data:image;base64,{encoded()}"
    else:
        assert (drawn.parts, drawn.text, heavy.fault) == ((), f"before\n{NOT_SEEN}\nafter", None)
