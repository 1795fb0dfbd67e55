"""A program whose answers have demanded forms: a forced call of a calculator, and a verdict."""

import json
from typing import Any

from openai import AsyncOpenAI

EXPRESSION = {"type": "string", "pattern": "^[0-9]{1,3}\\*[0-9]{1,3}$"}
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": EXPRESSION}, "required": ["expression"]},
    },
}


async def solve(task: Any) -> dict[str, Any]:
    """Return a reward for a call with the numbers of the question, and whether both answers had their form."""
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        chat, messages = client.chat.completions, list(task.messages)
        choice: Any = {"type": "function", "function": {"name": "calculator"}}
        called = await chat.create(model=task.model, messages=messages, tools=[CALCULATOR], tool_choice=choice)
        calls = called.choices[0].message.tool_calls or []
        expression = json.loads(calls[0].function.arguments)["expression"] if calls else ""
        verdict = await chat.create(
            model=task.model, messages=messages, extra_body={"structured_outputs": {"choice": ["right", "wrong"]}}
        )
    first, _, second = expression.partition("*")
    has_form = bool(calls) and verdict.choices[0].message.content in ("right", "wrong")
    shares = [number in str(messages[-1]["content"]) for number in (first, second) if number]
    return {"reward": sum(shares) / 2, "metrics": {"has_form": float(has_form)}}
