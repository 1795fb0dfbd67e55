"""The key of a sample is in no text that is logged or kept."""

import asyncio
from typing import Any

import pytest
from agent_steps import KEY, agent, played

from nemo_rl.agents.programs.environment import AgentEnvironment
from nemo_rl.sandbox import Program

HALF = KEY[len(KEY) // 2 :]


def test_the_text_of_a_program_has_no_key() -> None:
    program = Program("1", environment={"KEY": KEY}, files={"task.json": KEY.encode()}, stdin=KEY.encode())
    assert KEY not in repr(program)


def test_a_result_has_no_key() -> None:
    (result,) = played("", {"program": "programs_for_tests.tells_the_key"})
    assert result.reward == 1.0 and result.answer == "***" and result.metadata["call_rewards"] == {"***": 1.0}
    assert result.metadata["played"]["metrics"] == {"***": 1.0}


def test_an_error_has_no_part_of_a_key() -> None:
    said = f"printf %s {KEY}; head -c {1000 - len(HALF)} /dev/zero | tr '\\0' y; exit 3"
    (result,) = played("", {"command": ["sh", "-c", said], "sandbox": "none"})
    assert "yyyyyy" in result.error and HALF not in result.error and KEY[-3:] not in result.error
    (result,) = played("", {"program": "programs_for_tests.returns_the_key"})
    assert "***" in result.error and KEY[:4] not in result.error


def test_any_exception_is_the_error_of_its_sample_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async def step() -> Any:
        environment = AgentEnvironment({"program": "programs_for_tests.nothing"})

        async def fails(task: Any) -> None:
            raise LookupError(f"about {task.api_key}")

        monkeypatch.setattr(environment._program, "run", fails)
        return await environment.step([[]], [{"agent": agent("")}])

    returned = asyncio.run(step())
    assert returned.errors[0].startswith("LookupError: about *** (")
