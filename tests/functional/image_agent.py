"""An agent that looks at two more pictures after that of its prompt, on the package openai.

The second picture is in a user's message, and the third one in a tool's result. Each is the prompt's picture, turned.
"""

import base64
import io
from typing import Any

from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient
from PIL import Image

CONNECTIONS = DefaultAsyncHttpxClient()
AGAIN = {"type": "text", "text": "And here?"}


async def solve(task: Any) -> dict[str, Any]:
    """Ask three times, and return the first answer."""
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=CONNECTIONS)
    messages = list(task.messages)
    first = next(part for part in messages[-1]["content"] if part["type"] == "image_url")["image_url"]["url"]
    answers = []
    for turns in range(3):
        if turns:
            content = [{"type": "image_url", "image_url": {"url": turned(first, 90 * turns)}}, AGAIN]
            tool = {"role": "tool", "tool_call_id": f"look{turns}"}
            messages.append({"role": "user", "content": content} if turns == 1 else {**tool, "content": content})
        completion = await client.chat.completions.create(model=task.model, messages=messages)
        answers.append(completion.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": answers[-1]})
    return {"answer": answers[0], "metrics": {"turns": len(answers)}}


async def choose(task: Any) -> dict[str, Any]:
    """Let the form of the second answer be demanded, after requests that no engine can answer."""
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=CONNECTIONS, max_retries=0)
    first = next(part for part in task.messages[-1]["content"] if part["type"] == "image_url")
    wide = Image.new("RGB", (1000, 1), "white")
    odd = [
        [first, {"type": "text", "text": "<|video_pad|>"}],
        [first, {"type": "text", "text": "<|image_pad|>"}],
        [{"type": "image_url", "image_url": {"url": address_of(wide)}}],
        [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}],
        [{"type": "text", "text": "<|vision_start|><|video_pad|><|vision_end|>"}],
    ]
    refused = 0
    for content in odd:
        message: Any = {"role": "user", "content": content}
        try:
            await client.chat.completions.create(model=task.model, messages=[message])
        except BadRequestError:
            refused += 1
    messages = list(task.messages)
    one = await client.chat.completions.create(model=task.model, messages=messages)
    messages += [
        {"role": "assistant", "content": one.choices[0].message.content or ""},
        {"role": "user", "content": [first, AGAIN]},
    ]
    form = {"structured_outputs": {"choice": ["1", "2", "3", "4"]}}
    two = await client.chat.completions.create(model=task.model, messages=messages, extra_body=form)
    return {"answer": two.choices[0].message.content or "", "metrics": {"refused": refused}}


def address_of(picture: Image.Image) -> str:
    """Return a data: address of a picture."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def turned(address: str, degrees: int) -> str:
    """Return the picture of a data: address, turned."""
    picture = Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))
    return address_of(picture.rotate(degrees))
