"""Compare the prompts of the recorded rollouts with the rows of the data, read and rendered again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl.commands.replay.findings import Difference, Stage
from nemo_rl.data.datasets.setup import RunData
from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.environments.registry import env_class_path
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.imports import import_dotted

_CAUSE = "The data, the prompt file, the chat template, the tokenizer or the processor has changed since the run."
_NAME = "prompts in the data"


def compare_prompts(trajectories: Sequence[Trajectory], data: RunData) -> tuple[Stage, list[str]]:
    """Compare the tokens of each prompt with those of its row; return the comparison, and what it leaves out.

    Args:
        trajectories: the recorded rollouts.
        data: the training data, as the configuration describes it now.
    """
    found, compared, opened = [], 0, set()
    firsts = {trajectory.group_index: trajectory for trajectory in reversed(trajectories)}
    for group, trajectory in sorted(firsts.items()):
        if _writes_prompts(trajectory.task_name):
            opened.add(trajectory.task_name)
            continue
        compared += 1
        text = _difference(trajectory, data)
        if text is not None:
            name = f"prompt {group}"
            found.append(
                Difference(name, f"{name} (row {trajectory.idx} of the training data) differs from the record: {text}")
            )
    if not compared and opened:
        return Stage(_NAME, skipped=f"the environments {sorted(opened)} write the prompts themselves"), []
    notes = [f"prompts that the environments {sorted(opened)} write themselves are not compared"] if opened else []
    return Stage(_NAME, compared, differences=found, cause=_CAUSE), notes


def _writes_prompts(task_name: str) -> bool:
    """Return whether an environment may write or change the prompt, so that it cannot be compared with the data."""
    try:
        environment: type[EnvironmentInterface[Any]] = import_dotted(
            env_class_path(task_name), ConfigError, task_name, ""
        )
    except ConfigError:
        return True
    is_written = environment.open_episode is not EnvironmentInterface.open_episode
    return is_written or environment.runs_agents


def _difference(trajectory: Trajectory, data: RunData) -> str | None:
    """Describe how a prompt differs from its row; None if it does not."""
    if trajectory.idx >= len(data.train):
        return f"the data has {len(data.train)} rows"
    recorded = _tokens(trajectory)
    prompt = torch.cat([message["token_ids"] for message in data.train[trajectory.idx]["message_log"]])
    width = min(len(prompt), len(recorded))
    wrong = (prompt[:width] != recorded[:width]).nonzero()
    if len(wrong):
        place = int(wrong[0])
        return f"token {place} is {int(prompt[place])} in the data, and {int(recorded[place])} was recorded"
    if len(prompt) != trajectory.prompt_length:
        return f"it has {len(prompt)} tokens in the data, and {trajectory.prompt_length} were recorded"
    return None


def _tokens(trajectory: Trajectory) -> Tensor:
    return torch.cat([message["token_ids"] for message in trajectory.message_log])[: trajectory.prompt_length]
