"""An agent that multiplies with a calculator, written with the package anthropic."""

import json
from functools import cache
from typing import Any

from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient
from calculator_agent import CALCULATOR, MAX_TURNS, calculate

TOOL: Any = {
    "name": CALCULATOR["function"]["name"],
    "description": CALCULATOR["function"]["description"],
    "input_schema": CALCULATOR["function"]["parameters"],
}


async def solve(task: Any) -> dict[str, Any]:
    """Ask the model until it answers without a call of the calculator."""
    address = task.base_url.removesuffix("/v1")
    client = AsyncAnthropic(base_url=address, api_key=task.api_key, http_client=connections())
    messages: list[Any] = list(task.messages)
    num_calls = 0
    for _ in range(MAX_TURNS):
        async with client.messages.stream(model=task.model, max_tokens=100, messages=messages, tools=[TOOL]) as stream:
            answer = await stream.get_final_message()
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            break
        num_calls += len(calls)
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": calculate(json.dumps(call.input))}
            for call in calls
        ]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    text = "".join(block.text for block in answer.content if block.type == "text")
    return {"answer": text, "metrics": {"calculator_calls": num_calls}}


@cache
def connections() -> DefaultAsyncHttpxClient:
    """Return the connections that all samples share."""
    return DefaultAsyncHttpxClient()
