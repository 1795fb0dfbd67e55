"""Images of rows: files and their faults, the one expansion of tokens, and the way between processes."""

import base64
import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Pictures
from tiny_models import save_tiny_checkpoint
from tiny_vision_models import TinyVisionShape, make_tiny_vision_model, make_vision_processor
from transformers import AutoModelForImageTextToText, AutoProcessor

from nemo_rl.config import TokenizerConfig
from nemo_rl.config.schema.data import ImagesConfig
from nemo_rl.data.images.image import load_image
from nemo_rl.data.images.messages import expanded
from nemo_rl.data.images.rows import PIXELS, PixelCache, from_state, require_images
from nemo_rl.data.interfaces import TaskDataSpec, TokenizerType
from nemo_rl.data.messages.conversations import preference_preprocessor, sft_processor
from nemo_rl.data.model_rows import RowInputs, completed, forward_arguments, lacks_images, row_positions
from nemo_rl.data.processors import math_hf_data_processor, vlm_hf_data_processor
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.utils.errors import ConfigError, DataError

pytest.importorskip("torchvision")

FAMILIES = {"qwen2_5_vl": False, "qwen3_vl": False, "idefics3": False, "idefics3 in tiles": True, "smolvlm": True}
LIMITS = ImagesConfig.build()
SPEC = TaskDataSpec("images")


def picture(width: int, height: int) -> Pictures.Image:
    made = Pictures.new("RGB", (width, height))
    made.putdata([(x * 7 % 256, y * 11 % 256, (x * y) % 256) for y in range(height) for x in range(width)])
    return made


SMALL, WIDE = picture(28, 28), picture(70, 43)


def png(made: Pictures.Image) -> bytes:
    buffer = io.BytesIO()
    made.save(buffer, format="PNG")
    return buffer.getvalue()


def image_part(image: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image", "image": image, **more}


def question(text: str, *images: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*map(image_part, images), {"type": "text", "text": text}]}


def row_of(*messages: dict[str, Any], answer: str = "3") -> dict[str, Any]:
    return {"messages": [*messages, {"role": "assistant", "content": answer}], "task_name": "images"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    for name, split in FAMILIES.items():
        family, shape = name.split()[0], TinyVisionShape(split_images=split)
        model = make_tiny_vision_model(family, shape)
        save_tiny_checkpoint(root / name, model, make_vision_processor(family, shape))
    return {name: str(root / name) for name in FAMILIES}


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, str]) -> dict[str, TokenizerType]:
    return {name: get_tokenizer(TokenizerConfig.build(name=path, use_processor=True)) for name, path in folders.items()}


@pytest.fixture(scope="module")
def qwen(tokenizers: dict[str, TokenizerType]) -> TokenizerType:
    return tokenizers["qwen2_5_vl"]


def prompt(row: dict[str, Any], tokenizer: TokenizerType, longest: int = 400) -> tuple[torch.Tensor, RowInputs]:
    datum = vlm_hf_data_processor(row, SPEC, tokenizer, longest, 0)
    return datum["message_log"][0]["token_ids"], datum["row_inputs"]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_pixels_are_those_of_the_processor_of_transformers(
    folders: dict[str, str], tokenizers: dict[str, TokenizerType], family: str
) -> None:
    processor: Any = AutoProcessor.from_pretrained(folders[family])
    messages = [question("Which?", SMALL, WIDE), {"role": "assistant", "content": "1"}, question("And?", SMALL)]
    ids, inputs = prompt(row_of(*messages), tokenizers[family])
    shown = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]
    text = processor.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
    wanted = processor(text=[text], images=[SMALL, WIDE, SMALL], return_tensors="pt")
    assert ids.tolist() == wanted["input_ids"][0].tolist()
    for name, values in forward_arguments([inputs]).items():
        assert torch.equal(values.float(), wanted[name].float()), name
    if "mm_token_type_ids" in wanted:
        model: Any = AutoModelForImageTextToText.from_pretrained(folders[family]).model
        given = {name: wanted[name] for name in ("mm_token_type_ids", "image_grid_thw")}
        assert torch.equal(row_positions(ids, inputs), model.get_rope_index(wanted["input_ids"], **given)[0][:, 0])
        longer = torch.cat([ids, torch.tensor([70, 71])])
        assert torch.equal(row_positions(longer, inputs)[:, : len(ids)], row_positions(ids, inputs))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3 in tiles"])
def test_a_conversation_has_the_tokens_of_its_prompt(tokenizers: dict[str, TokenizerType], family: str) -> None:
    row = row_of(question("How many?", WIDE))
    ids, _ = prompt(row, tokenizers[family])
    whole = sft_processor(row, SPEC, tokenizers[family], 400, 0, add_generation_prompt=True)
    assert torch.equal(whole["message_log"][0]["token_ids"], ids)
    assert "<image>" not in whole["message_log"][1]["content"]
    whole["row_inputs"].require(torch.cat([message["token_ids"] for message in whole["message_log"]]))


def test_both_answers_of_a_pair_have_the_image(qwen: TokenizerType) -> None:
    answers = [{"rank": rank, "completion": [{"role": "assistant", "content": str(rank)}]} for rank in (0, 1)]
    datum = preference_preprocessor({"context": [question("How?", SMALL)], "completions": answers}, SPEC, qwen, 400, 0)
    for side in ("chosen", "rejected"):
        ids = torch.cat([message["token_ids"] for message in datum[f"message_log_{side}"]])
        datum[f"row_inputs_{side}"].require(ids)
        assert len(datum[f"row_inputs_{side}"].images.images) == 1


def test_a_row_of_text_is_a_row_without_images(qwen: TokenizerType) -> None:
    ids, inputs = prompt(row_of({"role": "user", "content": "Hello"}), qwen)
    assert lacks_images([inputs])
    assert forward_arguments([inputs]) == {}
    assert torch.equal(row_positions(ids, inputs), torch.arange(len(ids)).expand(3, -1))
    column = completed([prompt(row_of(question("Hi", SMALL)), qwen)[1], None])
    assert not lacks_images(column)
    assert lacks_images(column[1:])


def test_a_prompt_file_keeps_the_image(qwen: TokenizerType, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Look. {} Answer with a number.")
    (tmp_path / "twice.txt").write_text("{0} Again: {0}")
    once, twice = (TaskDataSpec("images", tmp_path / f"{name}.txt") for name in ("prompt", "twice"))
    datum = vlm_hf_data_processor(row_of(question("How many?", SMALL)), once, qwen, 400, 0)
    text = datum["message_log"][0]["content"]
    assert "Look. <|vision_start|><|image_pad|><|vision_end|>How many? Answer" in text
    with pytest.raises(DataError, match="repeats an image"):
        vlm_hf_data_processor(row_of(question("How many?", SMALL)), twice, qwen, 400, 0)


# Planted faults


def test_tokens_are_expanded_once(qwen: TokenizerType) -> None:
    """Expanded tokens in place of the rendered ones have a placeholder too many for each further feature."""
    ids, inputs = prompt(row_of(question("How many?", SMALL)), qwen)
    with pytest.raises(DataError, match="with 1 images has 4 placeholders"):
        expanded([ids], inputs.images.images, qwen)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("a feature too many", lambda ids, at: torch.cat([ids[: at + 1], ids[at:]]), "tokens of images after"),
        ("a feature too few", lambda ids, at: torch.cat([ids[:at], ids[at + 1 :]]), "lacks the 4 tokens"),
        ("a sampled placeholder", lambda ids, at: torch.cat([ids, ids[at : at + 1]]), "tokens of images after"),
        ("an image cut away", lambda ids, at: ids[: at + 2], "lacks the 4 tokens of its image 1"),
    ],
)
def test_other_tokens_than_those_of_the_images_are_refused(qwen: TokenizerType, name, change, message) -> None:
    ids, inputs = prompt(row_of(question("How many?", SMALL)), qwen)
    at = ids.tolist().index(inputs.images.family.placeholder)
    inputs.require(ids)
    with pytest.raises(DataError, match=message):
        inputs.require(change(ids, at))


def test_a_forgotten_image_is_refused(qwen: TokenizerType) -> None:
    ids, inputs = prompt(row_of(question("How many?", SMALL)), qwen)
    never = inputs.images.family.never_sampled
    require_images(ids.tolist(), inputs, never)
    for forgotten in (None, RowInputs(), inputs.without_items()):
        with pytest.raises(DataError, match="placeholders of images|tokens of images"):
            require_images(ids.tolist(), forgotten, never)
    require_images([70, 71], None, never)


def test_a_placeholder_in_a_text_is_refused(qwen: TokenizerType) -> None:
    with pytest.raises(DataError, match="with 1 images has 2 placeholders"):
        prompt(row_of(question("What is <|image_pad|>?", SMALL)), qwen)
    with pytest.raises(DataError, match="with 0 images has 1 placeholders"):
        prompt(row_of({"role": "user", "content": "<|image_pad|>"}), qwen)


def test_another_picture_in_the_same_file_has_another_name(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    SMALL.save(path)
    first = load_image(image_part(str(path)), LIMITS)
    assert load_image(image_part(str(path)), LIMITS) is first
    WIDE.save(path)
    second = load_image(image_part(str(path)), LIMITS)
    assert second.digest != first.digest
    assert second.size == (70, 43)
    resized = load_image(image_part(str(path), resized_height=20, resized_width=30), LIMITS)
    assert resized.size == resized.picture().size == (30, 20)
    assert resized.digest != second.digest


def test_a_prompt_that_is_too_long_keeps_no_token_of_an_image(tokenizers: dict[str, TokenizerType]) -> None:
    for family, tokenizer in tokenizers.items():
        datum = math_hf_data_processor(row_of(question("?" * 50, WIDE)), SPEC, tokenizer, 20, 0)
        ids = datum["message_log"][0]["token_ids"]
        assert datum["loss_multiplier"] == 0.0 and 0 < len(ids) <= 4, family
        datum["row_inputs"].require(ids)


def test_an_image_in_the_model_s_own_turn_is_refused(qwen: TokenizerType) -> None:
    row = {"messages": [question("a"), {"role": "assistant", "content": [image_part(SMALL)]}]}
    with pytest.raises(DataError, match="role 'assistant' has an image"):
        sft_processor(row, SPEC, qwen, 400, 0)


def test_a_text_tokenizer_refuses_images(folders: dict[str, str]) -> None:
    tokenizer = get_tokenizer(TokenizerConfig.build(name=folders["qwen2_5_vl"]))
    row = row_of(question("How many?", SMALL))
    for processor in (math_hf_data_processor, vlm_hf_data_processor):
        with pytest.raises(DataError, match=r"policy\.is_vlm=true"):
            processor(row, SPEC, tokenizer, 400, 0)


def test_a_model_of_another_family_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import Gemma3Config

    Gemma3Config(vision_config={"num_hidden_layers": 1}).save_pretrained(tmp_path)
    tokenizer = make_vision_processor("qwen2_5_vl").tokenizer
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot read images here: tokens of an image see each other"):
        get_tokenizer(TokenizerConfig.build(name=str(tmp_path), use_processor=True))


# Files


def broken() -> bytes:
    return png(WIDE)[:-60]


def bomb() -> bytes:
    return png(Pictures.new("1", (13_000, 13_000)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("/no/such/file.png", "is not a file"),
        (b"not an image", "not in a format that Pillow reads"),
        (broken(), "is broken"),
        (bomb(), "13000 x 13000 pixels, more than data.images.max_megapixels=64"),
        ("https://example.com/a.png", r"data\.images\.allow_urls=true"),
        ("data:image/png;base64,???", "not valid base64"),
        ({"bytes": None, "path": "/no/such.png"}, "is not a file"),
        (7, "an image is int"),
        (None, "an image is NoneType"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_image(image_part(value), LIMITS)


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large.png").write_bytes(png(WIDE))
    limits = ImagesConfig.build(max_megabytes=0.0001)
    for value in (str(tmp_path / "large.png"), png(WIDE)):
        with pytest.raises(DataError, match=r"more than data\.images\.max_megabytes=0\.0001"):
            load_image(image_part(value), limits)


def test_all_forms_of_an_image_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a b.png"
    path.write_bytes(png(WIDE))
    address = f"data:image/png;base64,{base64.b64encode(png(WIDE)).decode()}"
    forms = [str(path), f"file://{path}", address, png(WIDE), {"bytes": png(WIDE), "path": None}, {"path": str(path)}]
    images = [load_image(image_part(form), LIMITS) for form in forms]
    assert len({image.digest for image in images}) == 1
    assert images[0].picture().tobytes() == WIDE.tobytes()
    assert load_image(image_part(WIDE), LIMITS).picture().tobytes() == WIDE.tobytes()


def test_the_orientation_of_a_file_counts() -> None:
    exif = Pictures.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    WIDE.save(buffer, format="JPEG", exif=exif)
    image = load_image(image_part(buffer.getvalue()), LIMITS)
    assert image.size == image.picture().size == (43, 70)


# Between processes


def test_copies_of_a_row_share_the_file_and_the_pixels(qwen: TokenizerType) -> None:
    _, inputs = prompt(row_of(question("How many?", WIDE)), qwen)
    sent = pickle.loads(pickle.dumps([inputs] * 8))
    assert {id(each.images.images[0]) for each in sent} == {id(inputs.images.images[0])}
    before = PIXELS.num_made
    first = [each.inputs["pixel_values"].values for each in (inputs, copy.deepcopy(inputs), *sent)]
    assert PIXELS.num_made - before <= 1
    assert all(torch.equal(values, first[0]) for values in first)
    assert len(pickle.dumps([inputs] * 8)) < 2 * len(pickle.dumps(inputs))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3 in tiles"])
def test_a_checkpoint_restores_the_images(tokenizers: dict[str, TokenizerType], family: str, tmp_path: Path) -> None:
    ids, inputs = prompt(row_of(question("How many?", SMALL, WIDE)), tokenizers[family])
    torch.save([inputs.state_dict()] * 8, tmp_path / "rows.pt")
    assert (tmp_path / "rows.pt").stat().st_size < 4 * sum(len(i.encoded) for i in inputs.images.images) + 60_000
    restored = from_state(torch.load(tmp_path / "rows.pt")[0])
    restored.require(ids)
    for name, values in forward_arguments([inputs]).items():
        assert torch.equal(values, forward_arguments([restored])[name])
    assert torch.equal(row_positions(ids, inputs), row_positions(ids, restored))


def test_the_cache_keeps_the_last_images_within_its_size(qwen: TokenizerType) -> None:
    _, inputs = prompt(row_of(question("How many?", SMALL, WIDE)), qwen)
    family, (small, wide) = inputs.images.family, inputs.images.images
    size = sum(tensor.nbytes for tensor in family.tensors_of(wide).values())
    cache = PixelCache(size)
    for image in (small, wide, wide):
        cache.of(family, image)
    assert cache.num_made == 2
    cache.of(family, small)
    assert cache.num_made == 3


def test_an_image_that_does_not_fit_the_model_is_refused(qwen: TokenizerType) -> None:
    with pytest.raises(DataError, match="does not fit the model"):
        prompt(row_of(question("How many?", picture(1, 1000))), qwen)
