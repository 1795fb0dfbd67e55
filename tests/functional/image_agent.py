"""An agent that looks at two more pictures after that of its prompt, on the package openai.

The second picture is in a user's message, and the third one in a tool's result. Each is the prompt's picture, turned.
"""

import base64
import io
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
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


def turned(address: str, degrees: int) -> str:
    """Return the picture of a data: address, turned."""
    picture = Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))
    file = io.BytesIO()
    picture.rotate(degrees).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
