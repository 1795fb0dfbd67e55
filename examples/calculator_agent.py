"""An agent that multiplies with a calculator, written with the package openai as for any model.

env.agent.program=calculator_agent.solve                             a function, called for each sample
env.agent.program=null env.agent.command=[python,$FILE] env.agent.readable=[$FILE]
                                                                     a process, started for each sample

FILE is the absolute path of this file, which a process in a sandbox may read.
"""

import ast
import asyncio
import json
import operator
import os
from functools import cache
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

MAX_TURNS = 3
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates the value of an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


async def solve(task: Any) -> dict[str, Any]:
    """Ask the model until it answers without a call of the calculator.

    Args:
        task: a `nemo_rl.agents.programs.interfaces.AgentTask`.

    Returns:
        The answer, which the run's grader rewards, and the number of calls as a metric.
    """
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=connections())
    return await converse(client, task.model, list(task.messages))


@cache
def connections() -> DefaultAsyncHttpxClient:
    """Return the connections that all samples share: a client with its own reads all certificates first."""
    return DefaultAsyncHttpxClient()


async def converse(client: AsyncOpenAI, model: str, messages: list[Any]) -> dict[str, Any]:
    """Alternate between the model and the calculator."""
    num_calls = 0
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(model=model, messages=messages, tools=[CALCULATOR])
        answer = completion.choices[0].message
        if not answer.tool_calls:
            break
        messages = [*messages, answer.model_dump(exclude_none=True)]
        for call in answer.tool_calls:
            num_calls += 1
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"answer": answer.content or "", "metrics": {"calculator_calls": num_calls}}


def calculate(arguments: str) -> str:
    """Return the value of the expression, or what is wrong with it."""
    try:
        return str(value_of(ast.parse(json.loads(arguments)["expression"], mode="eval").body))
    except (ArithmeticError, KeyError, SyntaxError, TypeError, ValueError) as error:
        return f"Error: {error}"


def value_of(node: Any) -> int:
    """Return the value of a sum, a difference or a product of integers."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        result: int = OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
        return result
    raise ValueError("only integers with +, - and * can be calculated")


async def main() -> None:
    """Solve the task of a process; the package openai reads its address and key from the environment."""
    task = json.loads(Path(os.environ["NEMO_RL_TASK_FILE"]).read_text(encoding="utf-8"))
    async with AsyncOpenAI() as client:
        result = await converse(client, task["model"], task["messages"])
    Path(os.environ["NEMO_RL_REWARD_FILE"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main())
