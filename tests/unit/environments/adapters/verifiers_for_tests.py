"""Environments of the package verifiers for tests; `load_environment` makes the one of a kind."""

from typing import Any

import verifiers
from datasets import Dataset

ROWS = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(1, 5)]


def is_right(completion: Any, answer: str) -> float:
    """Return 1 if the last message of the model is the answer."""
    said = [message["content"] for message in completion if message["role"] == "assistant"]
    return float(said[-1].strip() == answer)


def length(completion: Any) -> float:
    """Return the number of messages."""
    return float(len(completion))


def breaks(completion: Any, **_: Any) -> float:
    """Raise an error for the answer "break"."""
    if completion[-1]["content"] == "break":
        raise RuntimeError("the rubric is broken")
    return float("nan") if completion[-1]["content"] == "nan" else 0.25


class Guess(verifiers.MultiTurnEnv):
    """Tells whether a guess is too low, until it is right."""

    left: list[str] = []

    async def setup_state(self, state: Any) -> Any:
        state["guesses"] = 0
        return state

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        state["guesses"] += 1
        guess = messages[-1]["content"]
        if guess == "raise":
            raise RuntimeError("the environment is broken")
        if guess == "report":
            raise verifiers.InfraError("no server")
        if guess == "rewrite":
            messages[0]["content"] = "another beginning"
        if guess == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"wrong: {guess}"}, {"role": "user", "content": "Guess again."}]

    @verifiers.cleanup
    async def note(self, state: Any) -> None:
        self.left.append(state["answer"])


def load_environment(kind: str = "single") -> verifiers.Environment:
    """Make an environment."""
    rows = Dataset.from_list(ROWS)
    rubric = verifiers.Rubric(funcs=[is_right, length], weights=[1.0, 0.0])
    if kind == "single":
        held_out = Dataset.from_list([{"question": "held out", "answer": "0"}])
        return verifiers.SingleTurnEnv(dataset=rows, eval_dataset=held_out, system_prompt="Add.", rubric=rubric)
    if kind == "broken rubric":
        return verifiers.SingleTurnEnv(dataset=rows, rubric=verifiers.Rubric(funcs=[breaks]))
    if kind == "guess":
        return Guess(dataset=rows, rubric=rubric, max_turns=4)
    if kind == "tools":
        return verifiers.ToolEnv(tools=[_tool], dataset=rows, rubric=rubric)
    raise ValueError(f"no kind {kind!r}")


def _tool(number: int) -> str:
    """Return a number."""
    return str(number)
