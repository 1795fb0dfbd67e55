"""Images in the requests of each dialect: what is read, and what is refused."""

import base64
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pictures

from nemo_rl.agents.dialects.chat_completions import ChatCompletions
from nemo_rl.agents.dialects.images import MOST_IMAGES, ImageReader, as_requested
from nemo_rl.agents.dialects.interface import Dialect
from nemo_rl.agents.dialects.messages import Messages
from nemo_rl.agents.dialects.responses import Responses
from nemo_rl.agents.endpoint.calls import CallError
from nemo_rl.config.schema.data import ImagesConfig
from nemo_rl.data.images.image import Image, load_image
from nemo_rl.utils.errors import DataError

CHAT, RESPONSES, MESSAGES = ChatCompletions(), Responses(), Messages()
LIMITS = ImagesConfig.build(max_megapixels=0.01, max_megabytes=0.05)

type Part = dict[str, Any]
type Write = Callable[[list[Part]], dict[str, Any]]


def png(side: int = 28, color: int = 90) -> bytes:
    file = io.BytesIO()
    Pictures.new("RGB", (side, side), (color, side, 7)).save(file, "PNG")
    return file.getvalue()


def address(encoded: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(encoded).decode()}"


def chat_part(url: str) -> Part:
    return {"type": "image_url", "image_url": {"url": url}}


def responses_part(url: str) -> Part:
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def messages_part(url: str) -> Part:
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


PARTS: dict[str, tuple[Dialect, Callable[[str], Part]]] = {
    "chat": (CHAT, chat_part),
    "responses": (RESPONSES, responses_part),
    "messages": (MESSAGES, messages_part),
}
TEXT = {"chat": "text", "responses": "input_text", "messages": "text"}


def asked(name: str, content: list[Part], role: str = "user") -> dict[str, Any]:
    """Return a request with one message."""
    message = {"role": role, "content": content}
    return {"input": [message]} if name == "responses" else {"messages": [message], "max_tokens": 5}


def read(name: str, body: dict[str, Any], images: ImageReader | None = None) -> list[dict[str, Any]]:
    reader = ImageReader(LIMITS) if images is None else images
    return [dict(message) for message in PARTS[name][0].read(body, {}, reader.of_request()).messages]


@pytest.mark.parametrize("name", PARTS)
def test_images_of_a_user_are_parts_in_order(name: str) -> None:
    made = PARTS[name][1]
    first, second = png(28), png(56)
    words: Part = {"type": TEXT[name], "text": "Which?"}
    (message,) = read(name, asked(name, [made(address(first)), words, made(address(second)), words, words]))
    kinds = [part["type"] for part in message["content"]]
    assert kinds == ["image", "text", "image", "text", "text"]
    images = [part["image"] for part in message["content"] if part["type"] == "image"]
    assert [image.encoded for image in images] == [first, second]
    assert images[0] is load_image({"image": first}, LIMITS)
    assert message["content"][1] == {"type": "text", "text": "Which?"}


@pytest.mark.parametrize("name", PARTS)
def test_texts_alone_stay_a_text(name: str) -> None:
    words: Part = {"type": TEXT[name], "text": "a"}
    assert read(name, asked(name, [words, words])) == [{"role": "user", "content": "a\na"}]


def test_results_of_tools_have_images() -> None:
    url, kept = address(png()), png()
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    bodies = {
        "chat": {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": [chat_part(url)]},
            ]
        },
        "responses": {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [responses_part(url)]},
            ]
        },
        "messages": {
            "max_tokens": 5,
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": [messages_part(url)]},
                        messages_part(url),
                        {"type": "text", "text": "And this?"},
                    ],
                },
            ],
        },
    }
    for name, body in bodies.items():
        messages = read(name, body)
        assert (messages[1]["role"], messages[1]["tool_call_id"]) == ("tool", "c")
        assert [part["image"].encoded for part in messages[1]["content"]] == [kept]
    user = messages[2]
    assert [part["type"] for part in user["content"]] == ["image", "text"]


def test_only_the_responses_api_has_images_in_system_messages() -> None:
    part = PARTS["responses"][1](address(png()))
    for role in ("system", "developer"):
        (message, _) = read(
            "responses", {"input": [{"role": role, "content": [part]}, {"role": "user", "content": "a"}]}
        )
        assert message["content"][0]["image"].encoded == png()
    for name in ("chat", "messages"):
        refused(name, asked(name, [PARTS[name][1](address(png()))], "system"), "type", "Only texts are read here")
    body = {"system": [messages_part(address(png()))], **asked("messages", [{"type": "text", "text": "a"}])}
    refused("messages", body, "system[0].type", "Only texts are read here")


def refused(name: str, body: dict[str, Any], place: str, reason: str, images: ImageReader | None = None) -> CallError:
    with pytest.raises(CallError) as caught:
        read(name, body, images)
    error = caught.value
    assert error.status == 400
    assert (error.parameter or "").endswith(place), error.parameter
    assert reason in error.message, error.message
    shown = str(PARTS[name][0].error(error))
    assert error.message in shown.replace("\\'", "'") or repr(error.message) in shown
    return error


@pytest.mark.parametrize("name", PARTS)
def test_the_assistant_has_no_images(name: str) -> None:
    body = asked(name, [PARTS[name][1](address(png()))], "assistant")
    refused(name, body, "content[0].type", "is not supported by this endpoint")


@pytest.mark.parametrize("name", PARTS)
def test_a_text_policy_refuses_images(name: str) -> None:
    body = asked(name, [PARTS[name][1](address(png()))])
    error = refused(name, body, "content[0].type", "Only texts are read here", ImageReader())
    assert error.code == "unsupported_parameter"


WRONG = {
    "broken": (address(png()[:60]), "is broken"),
    "no image": (address(b"Hello"), "not in a format that Pillow reads"),
    "empty": ("data:image/png;base64,", "not in a format that Pillow reads"),
    "base64": ("data:image/png;base64,@@", "not valid base64"),
    "pixels": (address(png(101)), "more than data.images.max_megapixels=0.01"),
    "bytes": (address(random.Random(0).randbytes(60_000)), "more than data.images.max_megabytes=0.05"),
    "http": ("https://example.org/a.png", "data.images.allow_urls=true"),
    "path": ("/etc/hostname", "opens no files"),
    "file": ("file:///etc/hostname", "opens no files"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("name", PARTS)
def test_images_that_cannot_be_used_are_refused_with_the_reason(name: str, case: str) -> None:
    url, reason = WRONG[case]
    if name == "messages" and case == "empty":
        reason = "a text of at least one character"
    error = refused(name, asked(name, [PARTS[name][1](url)]), "", reason)
    assert error.code == ("invalid_value" if "at least" in reason else "invalid_image")
    assert error.parameter in error.message


@pytest.mark.parametrize(
    ("name", "part", "place"),
    [
        ("chat", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "content[0].type"),
        ("chat", {"type": "video_url", "video_url": {"url": "data:,"}}, "content[0].type"),
        ("chat", {"type": "file", "file": {}}, "content[0].type"),
        ("chat", {"type": "image_url", "image_url": 3}, "image_url"),
        ("chat", {"type": "image_url"}, "image_url"),
        ("chat", {"type": "image_url", "image_url": {"url": 3}}, "image_url.url"),
        ("chat", {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}, "image_url.detail"),
        ("responses", {"type": "input_image", "file_id": "file-1"}, "file_id"),
        ("responses", {"type": "input_image"}, "image_url"),
        ("responses", {"type": "input_file", "file_data": ""}, "content[0].type"),
        ("messages", {"type": "image"}, "source"),
        ("messages", {"type": "image", "source": {"type": "file", "file_id": "a"}}, "source.type"),
        ("messages", {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}, "source.data"),
        (
            "messages",
            {"type": "image", "source": {"type": "base64", "media_type": "audio/wav", "data": "a"}},
            "source.media_type",
        ),
        ("messages", {"type": "document", "source": {}}, "content[0].type"),
    ],
)
def test_other_parts_are_refused_by_field(name: str, part: Part, place: str) -> None:
    error = refused(name, asked(name, [part]), place, "")
    assert error.code in ("invalid_value", "unsupported_parameter")


def test_fuzzed_files_are_refused_and_never_raise_another_error() -> None:
    rng = random.Random(3)
    formats = {}
    for kind in ("PNG", "GIF", "BMP", "JPEG", "TIFF", "WEBP", "ICO", "PPM"):
        file = io.BytesIO()
        Pictures.new("RGB", (20, 20), (3, 4, 5)).save(file, kind)
        formats[kind] = file.getvalue()
    outcomes = set()
    for _ in range(600):
        data = bytearray(formats[rng.choice(sorted(formats))])
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            load_image({"image": bytes(data)}, LIMITS).picture()
            outcomes.add("read")
        except DataError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_a_request_has_a_largest_number_of_images() -> None:
    reader = ImageReader(LIMITS)
    part = chat_part(address(png()))
    refused("chat", asked("chat", [part] * (MOST_IMAGES + 1)), f"content[{MOST_IMAGES}].image_url.url", "", reader)
    assert len(read("chat", asked("chat", [part] * MOST_IMAGES), reader)[0]["content"]) == MOST_IMAGES


def test_a_request_may_name_the_images_of_its_row_and_a_download_happens_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "a cat.png"
    path.write_bytes(png())
    image = load_image({"image": str(path)}, LIMITS)
    reader = ImageReader(LIMITS, {image.source: image})
    path.unlink()
    for url in (str(path), f"file://{path}", f"file://{path}".replace(" ", "%20")):
        (message,) = read("chat", asked("chat", [chat_part(url)]), reader)
        assert message["content"][0]["image"] is image
    asked_for: list[str] = []

    def download(given: str, limits: ImagesConfig) -> bytes:
        asked_for.append(given)
        return png(28 + len(asked_for))

    monkeypatch.setattr("nemo_rl.data.images.image._download", download)
    body = asked("chat", [chat_part("http://example.org/b.png")])
    once, again = (read("chat", body, reader)[0]["content"][0]["image"] for _ in range(2))
    assert (once is again, asked_for) == (True, ["http://example.org/b.png"])


def test_a_program_gets_the_images_of_its_row_as_data_addresses(tmp_path: Path) -> None:
    path = tmp_path / "turned.jpg"
    picture = Pictures.effect_noise((40, 20), 90).convert("RGB")
    exif = Pictures.Exif()
    exif[0x0112] = 6
    picture.save(path, exif=exif)
    for sizes in ({}, {"resized_height": 30, "resized_width": 60}):
        image = load_image({"image": str(path), **sizes}, LIMITS)
        message = {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "a"}]}
        (given,) = as_requested([message])
        assert given["content"][1] == {"type": "text", "text": "a"}
        url = given["content"][0]["image_url"]["url"]
        assert url.startswith("data:image/png;" if sizes else "data:image/jpeg;")
        (back,) = read("chat", {"messages": [given]})
        found: Image = back["content"][0]["image"]
        assert found.size == image.size == ((60, 30) if sizes else (20, 40))
        assert found.picture().tobytes() == image.picture().tobytes()
        assert (found is image) is not bool(sizes)
