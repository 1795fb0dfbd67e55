"""Images in observations of environments: their tokens, and the inputs of the sample that they extend."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Pictures
from tiny_models import save_tiny_checkpoint
from tiny_vision_models import make_tiny_vision_model, make_vision_processor
from transformers import AutoProcessor

from nemo_rl.config import TokenizerConfig
from nemo_rl.data.images.messages import images_in
from nemo_rl.data.interfaces import TaskDataSpec, TokenizerType
from nemo_rl.data.messages.observations import ObservationRenderer
from nemo_rl.data.processors import vlm_hf_data_processor
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.utils.errors import DataError

pytest.importorskip("torchvision")


def picture(side: int) -> Pictures.Image:
    return Pictures.new("RGB", (side, side), (side, 2 * side, 90))


def png(made: Pictures.Image) -> bytes:
    buffer = io.BytesIO()
    made.save(buffer, format="PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module", params=["qwen2_5_vl", "smolvlm"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_tiny_checkpoint(path, make_tiny_vision_model(request.param), make_vision_processor(request.param))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TokenizerType:
    return get_tokenizer(TokenizerConfig.build(name=str(folder), use_processor=True))


def parts(*images: Any, text: str) -> list[dict[str, Any]]:
    return [*({"type": "image", "image": each} for each in images), {"type": "text", "text": text}]


def test_an_observation_s_tokens_are_those_of_the_whole_chat(folder: Path, tokenizer: TokenizerType) -> None:
    first, second = picture(28), picture(56)
    question = {"role": "user", "content": parts(first, text="Look")}
    row = {"messages": [question, {"role": "assistant", "content": "3"}], "task_name": "images"}
    datum = vlm_hf_data_processor(row, TaskDataSpec("images"), tokenizer, 400, 0)
    log = [*datum["message_log"]]
    answer = tokenizer(" yes" if "smolvlm" in str(folder) else "yes", add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    log.append({"role": "assistant", "content": "yes", "token_ids": torch.tensor([*answer, end])})
    renderer = ObservationRenderer(tokenizer)
    observation = renderer.read({"role": "user", "content": parts(png(second), text="And this?")})
    added = renderer.token_ids(observation, log, datum["length"])
    inputs = datum["row_inputs"].images.followed_by(images_in([observation])).row_inputs()
    ids = torch.cat([*(message["token_ids"] for message in log), added])
    inputs.require(ids)
    processor: Any = AutoProcessor.from_pretrained(folder)
    chat = [
        question,
        {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
        {"role": "user", "content": parts(second, text="And this?")},
    ]
    text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    wanted = processor(text=[text], images=[first, second], return_tensors="pt")["input_ids"][0]
    assert ids.tolist() == wanted.tolist()


def test_broken_images_and_images_for_text_models_are_refused(folder: Path, tokenizer: TokenizerType) -> None:
    with pytest.raises(DataError, match="not in a format that Pillow reads"):
        ObservationRenderer(tokenizer).read({"role": "user", "content": parts(b"nothing", text="?")})
    if "smolvlm" in str(folder):  # its template reads lists of parts only
        return
    text_only = ObservationRenderer(get_tokenizer(TokenizerConfig.build(name=str(folder))))
    observation = text_only.read({"role": "user", "content": parts(png(picture(28)), text="?")})
    with pytest.raises(DataError, match=r"policy\.is_vlm=true"):
        text_only.message(observation)


def test_the_first_observation_joins_the_prompt(tokenizer: TokenizerType) -> None:
    renderer = ObservationRenderer(tokenizer)
    observation = renderer.read({"role": "user", "content": parts(png(picture(28)), text="Begin")})
    entry = renderer.first_of_prompt({"messages": [], "tools": None}, observation)
    row = {
        "messages": [
            {"role": "user", "content": parts(picture(28), text="Begin")},
            {"role": "assistant", "content": ""},
        ]
    }
    same = vlm_hf_data_processor(row, TaskDataSpec("images"), tokenizer, 400, 0)
    assert torch.equal(entry["token_ids"], same["message_log"][0]["token_ids"])
