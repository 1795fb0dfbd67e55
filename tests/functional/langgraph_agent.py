"""An agent that multiplies with a calculator, written with the packages langgraph and langchain-openai."""

import json
from functools import cache
from typing import Any

from calculator_agent import MAX_TURNS, calculate
from httpx import AsyncClient
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import ToolNode, create_react_agent


@tool
def calculator(expression: str) -> str:
    """Calculates the value of an expression."""
    return calculate(json.dumps({"expression": expression}))


async def solve(task: Any) -> dict[str, Any]:
    """Let the graph alternate between the model and the calculator."""
    model = ChatOpenAI(model=task.model, base_url=task.base_url, api_key=task.api_key, http_async_client=connections())
    tools = ToolNode([calculator], handle_tool_errors="Error")  # the texts of errors would be longer than a sequence
    graph = create_react_agent(model, tools)
    state = await graph.ainvoke({"messages": list(task.messages)}, {"recursion_limit": 2 * MAX_TURNS})
    results = [message for message in state["messages"] if message.type == "tool"]
    return {"answer": state["messages"][-1].text, "metrics": {"calculator_calls": len(results)}}


@cache
def connections() -> AsyncClient:
    """Return the connections that all samples share."""
    return AsyncClient()
