"""An environment of the package verifiers, version 0.4: products, with a calculator or without one.

The harness runs in the process of the environment; the package's own ones start a process for each task.
"""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import verifiers.v1 as vf
from calculator_agent import CALCULATOR, calculate
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

__all__ = ["CalculatorHarness", "ProductsTaskset"]


class ProductsConfig(vf.TasksetConfig):
    """Which products there are."""

    split: Literal["train", "validation"] = "train"
    num_tasks: int = 1000


class ProductData(vf.TaskData):
    """A product and its value."""

    answer: str


class ProductTask(vf.Task[ProductData]):
    """Rewards the last reply if the value is boxed in it."""

    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        """Return 1 if the value is boxed in the reply."""
        return float(vf.extract_boxed_answer(trace.last_reply) == self.data.answer)

    @vf.metric
    async def calculator_calls(self, trace: vf.Trace) -> float:
        """Return the number of results of the calculator."""
        return float(len(trace.tool_messages))


class ProductsTaskset(vf.Taskset[ProductTask, ProductsConfig]):
    """Products of two numbers of three digits; those of validation are others than those of training."""

    def load(self) -> Iterator[ProductTask]:
        """Draw the products."""
        draw = random.Random(self.config.split)
        for _ in range(self.config.num_tasks):
            left, right = draw.randint(100, 999), draw.randint(100, 999)
            while ((left + right) % 10 == 0) != (self.config.split == "validation"):
                right = draw.randint(100, 999)
            yield ProductTask(ProductData(prompt=f"{left}*{right}=", answer=str(left * right)), self.config.task)


class CalculatorConfig(vf.HarnessConfig):
    """Whether there is a calculator."""

    calculator: bool = True


class CalculatorHarness(vf.Harness[CalculatorConfig]):
    """Asks the model until it answers without a call of the calculator."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        """Play one task; the package's server at `endpoint` ends it by a refusal after `max_turns` calls."""
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=connections(), max_retries=0)
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        tools: dict[str, Any] = {"tools": [CALCULATOR]} if self.config.calculator else {}
        while True:
            completion = await client.chat.completions.create(model=ctx.model, messages=messages, **tools)
            answer = completion.choices[0].message
            if not answer.tool_calls:
                return vf.ProgramResult(0, "", "")
            messages.append(answer.model_dump(exclude_none=True))
            for call in answer.tool_calls:
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


@cache
def connections() -> DefaultAsyncHttpxClient:
    """Return the connections that all tasks share."""
    return DefaultAsyncHttpxClient()
