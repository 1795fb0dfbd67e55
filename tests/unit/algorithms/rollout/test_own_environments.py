"""The trial of users' environments before engines start: which are tried, and which errors end the run."""

from typing import Any

import pytest

from nemo_rl.algorithms.rollout.environments import try_own_environments
from nemo_rl.data.datasets.processed_dataset import MixedDataset
from nemo_rl.data.datasets.setup import RunData
from nemo_rl.environments.workers.client import EnvironmentClient
from nemo_rl.utils.errors import ConfigError

pytestmark = pytest.mark.fast

ROW = {"task_name": "mine", "message_log": [{"role": "user", "content": "2+2?"}], "extra_env_info": {"answer": 4}}


class Client(EnvironmentClient):
    """A client without an actor, which remembers what it shall grade."""

    def __init__(self, reason: str | None = None, *, is_own: bool = True) -> None:
        self.is_own = is_own
        self.reason = reason
        self.tried: list[Any] = []

    def try_out(self, conversation: list[dict[str, str]], metadata: Any, timeout_s: float) -> str | None:
        self.tried.append((conversation[0], conversation[-1]["role"], metadata))
        return self.reason


class Rows:
    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return dict(self.rows[idx])

    def place(self, idx: int) -> tuple[str, int]:
        return "rows", idx


def data_of(*rows: dict[str, Any]) -> RunData:
    return RunData(MixedDataset([Rows(*rows)], ["rows"]), None, [])


@pytest.mark.parametrize(
    ("is_own", "rows", "tried"),
    [
        (True, (ROW,), [(ROW["message_log"][0], "assistant", {"answer": 4})]),
        (False, (ROW,), []),
        (True, (), []),
        (False, (), []),
        (True, (ROW | {"task_name": "another"},), []),
    ],
)
def test_environments_of_users_grade_an_answer_to_their_first_prompt(
    is_own: bool, rows: tuple[dict[str, Any], ...], tried: list[Any]
) -> None:
    client = Client(is_own=is_own)
    try_own_environments({"mine": client}, data_of(*rows), 1.0)
    assert client.tried == tried


def test_a_mistake_in_code_ends_the_run_and_another_error_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="environment 'mine' fails for a made-up answer.*\n  NameError: x"):
        try_own_environments({"mine": Client("NameError: x")}, data_of(ROW), 1.0)
    try_own_environments({"mine": Client("ValueError: no number in the answer")}, data_of(ROW), 1.0)
    assert "'mine' has no reward for a made-up answer to its first prompt: ValueError" in caplog.text
