"""Start runs from Python: `nemo_rl.grpo`, `sft`, `dpo` and `evaluate`.

    model, rows, reward, keys ─► a base file, and keys over it ─► load_config ─► checks ─► setup ─► train ─► FinishedRun

These functions only write the configuration; the run is that of the programs (`launch.programs`). Rows are written to
a file of the run's folder, so that `config.yaml` of its log names all of its data. Invariant: in a notebook and outside
the main thread no handler of signals is installed, and however a run ends, its processes end with it.
"""

import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nemo_rl.config import load_config
from nemo_rl.config.base.names import OVERRIDE_MARKER
from nemo_rl.config.base.paths import find_path
from nemo_rl.launch.command_line import prepare
from nemo_rl.launch.finished_run import FinishedRun, RunMetrics
from nemo_rl.launch.given_rewards import GivenRewards, Rewards
from nemo_rl.launch.given_rows import data_keys
from nemo_rl.launch.programs import PROGRAMS
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.logging_setup import show_messages

_RUNS_FOLDER = Path("results")
_MANY_EPOCHS = 1_000_000
_NAMES_OF_TRL = {
    "reward_funcs": "reward",
    "rewards": "reward",
    "eval_dataset": "validation",
    "max_steps": "steps",
    "output_dir": "folder",
    "num_generations": "grpo.num_generations_per_prompt",
    "learning_rate": "policy.optimizer.kwargs.lr",
    "per_device_train_batch_size": "policy.train_micro_batch_size",
    "max_completion_length": "policy.generation.max_new_tokens",
}
"""Arguments and keys of this library by their names in TRL, and `rewards`, a likely mistake for `reward`."""


def grpo(
    model: str | Path,
    rows: Any,
    *,
    validation: Any = None,
    reward: Rewards | None = None,
    steps: int | None = None,
    folder: str | Path | None = None,
    **keys: Any,
) -> FinishedRun:
    """Train a model with GRPO and return the finished run.

    Args:
        model: a folder, a Hugging Face id, or the name of a model of the library, such as `tiny-chat`.
        rows: prompts: dicts with `prompt` (a text or messages) or `messages`, a `datasets.Dataset`, the path of a file,
            the name of a data set of the library, or a hub id. A column `answer` is the known answer, if there is one.
        validation: rows of validation, of the same kinds, or None for no validation.
        reward: a function of `(answer, row)` that returns a number: `answer` is the model's text, `row` the dict of the
            row. A function whose first parameter is named `answers` gets lists instead, those of the samples that end
            at the same moment, and returns a list. Both may be `async`, may leave out the second parameter, and may be
            given as a dotted path. Several rewards are a dict by name or a list; `(function, 0.1)` has a weight of 0.1.
            The reward is the sum. If None, the answer is compared with the column `answer`, as mathematics.
        steps: number of training steps, or None for that of the base file.
        folder: folder of the run, which continues if it has a checkpoint, or None for a new one, `results/grpo_001` ...
        keys: keys of the configuration, dotted, `**{"policy.optimizer.kwargs.lr": 1e-5}`, or nested,
            `policy={"precision": "float32"}`. Without them those of `examples/configs/grpo_math_cpu.yaml` apply on a
            machine without GPU, and those of `grpo_math_1B.yaml` on others.

    Raises:
        ConfigError, DataError: an argument, a key or a row cannot be used; raised before anything starts.
    """
    with _new_run("grpo", folder) as place:
        rewards = GivenRewards(reward)
        data = {**_data(rows, validation, place, "prompt"), "default": {"env_name": rewards.environment}}
        own = _training_keys("grpo", model, place, steps, data) | {"env": rewards.section}
        return _trained("grpo", place, own, keys, rewards)


def sft(
    model: str | Path,
    rows: Any,
    *,
    validation: Any = None,
    steps: int | None = None,
    folder: str | Path | None = None,
    **keys: Any,
) -> FinishedRun:
    """Train a model on given answers (SFT) and return the finished run.

    Args:
        model: see `grpo`.
        rows: dicts with `messages`, the last of them an assistant's, or with `prompt` and `answer` (or `completion`),
            or any other kind of rows that `grpo` takes.
        validation: see `grpo`.
        steps: see `grpo`.
        folder: see `grpo`.
        keys: see `grpo`; the base files are `sft_cpu.yaml` and `sft.yaml`.

    Raises:
        ConfigError, DataError: see `grpo`.
    """
    with _new_run("sft", folder) as place:
        own = _training_keys("sft", model, place, steps, _data(rows, validation, place, "chat"))
        return _trained("sft", place, own, keys)


def dpo(
    model: str | Path,
    rows: Any,
    *,
    validation: Any = None,
    steps: int | None = None,
    folder: str | Path | None = None,
    **keys: Any,
) -> FinishedRun:
    """Train a model on pairs of answers (DPO) and return the finished run.

    Args:
        model: see `grpo`.
        rows: dicts with `prompt`, `chosen` and `rejected`, or any other kind of rows that `grpo` takes.
        validation: see `grpo`.
        steps: see `grpo`.
        folder: see `grpo`.
        keys: see `grpo`; the base files are `dpo_cpu.yaml` and `dpo.yaml`.

    Raises:
        ConfigError, DataError: see `grpo`.
    """
    with _new_run("dpo", folder) as place:
        own = _training_keys("dpo", model, place, steps, _data(rows, validation, place, "pair"))
        return _trained("dpo", place, own, keys)


def evaluate(
    model: str | Path,
    rows: Any,
    *,
    reward: Rewards | None = None,
    folder: str | Path | None = None,
    **keys: Any,
) -> FinishedRun:
    """Sample answers to all rows, grade them and return the scores as the metrics of a finished run.

    Args:
        model: see `grpo`.
        rows: see `grpo`.
        reward: see `grpo`.
        folder: folder for the answers, or None for a new one, `results/eval_001` ...
        keys: see `grpo`; the base files are `evals/eval_cpu.yaml` and `evals/eval.yaml`.

    Raises:
        ConfigError, DataError: see `grpo`.
    """
    with _new_run("eval", folder) as place:
        rewards = GivenRewards(reward)
        own = {
            "generation": {"model_name": str(model)},
            "eval": {"save_path": str(place.folder)},
            "data": {OVERRIDE_MARKER: True, **data_keys(rows, place.folder, "prompt"), "env_name": rewards.environment},
            "env": rewards.section,
        }
        config = _checked("eval", own, keys, rewards)
        place.keep()
        from nemo_rl.evals.evaluator import run_env_eval, setup

        given = rewards.made().get(rewards.environment)
        report = run_env_eval(*setup(config, env=given)[:2], env=given)
        scores = {report.metric: report.score, **report.companions}
        found = {name: score.value for name, score in scores.items()} | dict(report.answers)
        return FinishedRun(RunMetrics.of_values(found), place.folder, find_path(str(model)))


class _Place:
    """Folder of a run, which is removed again if the run does not start."""

    def __init__(self, folder: Path, *, is_new: bool) -> None:
        self.folder = folder
        self._is_new = is_new

    def keep(self) -> None:
        """Keep the folder permanently."""
        self._is_new = False

    def remove_if_unused(self) -> None:
        """Remove the folder unless it is kept or existed before."""
        if self._is_new:
            shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _new_run(name: str, folder: str | Path | None) -> Iterator[_Place]:
    """Show messages and make the folder of a run, and end the Ray that the run has started."""
    show_messages()
    is_users = _ray_runs()
    place = _Place(_numbered(name), is_new=True) if folder is None else _given_folder(Path(folder))
    try:
        yield place
    finally:
        place.remove_if_unused()
        if not is_users and _ray_runs():
            sys.modules["ray"].shutdown()


def _ray_runs() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _given_folder(folder: Path) -> _Place:
    absolute = folder.expanduser().absolute()
    is_new = not absolute.exists()
    absolute.mkdir(parents=True, exist_ok=True)
    return _Place(absolute, is_new=is_new)


def _numbered(name: str) -> Path:
    """Create and return `results/<name>_NNN` with the next free number."""
    base = _RUNS_FOLDER.absolute()
    base.mkdir(parents=True, exist_ok=True)
    taken = [int(found[1]) for entry in base.iterdir() if (found := re.fullmatch(rf"{name}_(\d+)", entry.name))]
    number = max(taken, default=0)
    while True:
        number += 1
        folder = base / f"{name}_{number:03d}"
        with suppress(FileExistsError):  # another process took it
            folder.mkdir()
            return folder


def _data(rows: Any, validation: Any, place: _Place, form: str) -> dict[str, Any]:
    """Return the section `data` for rows."""
    found: dict[str, Any] = {OVERRIDE_MARKER: True, "num_workers": 0}
    found["train"] = data_keys(rows, place.folder, form)
    found["validation"] = None if validation is None else data_keys(validation, place.folder, form, "validation")
    return found


def _training_keys(
    name: str, model: str | Path, place: _Place, steps: int | None, data: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the configuration keys for the arguments of a training function, with the section `data`."""
    has_validation = data["validation"] is not None
    algorithm: dict[str, Any] = {"val_at_end": has_validation}
    if steps is not None:
        algorithm |= {"max_num_steps": steps, "max_num_epochs": _MANY_EPOCHS}
    if not has_validation:
        algorithm |= {"val_period": 0, "val_at_start": False}
    return {
        name: algorithm,
        "data": data,
        "policy": {"model_name": str(model)},
        "checkpointing": {"checkpoint_dir": str(place.folder / "checkpoints")},
        "logger": {"log_dir": str(place.folder / "logs")},
    }


def _trained(
    name: str,
    place: _Place,
    own: Mapping[str, Any],
    keys: Mapping[str, Any],
    rewards: GivenRewards | None = None,
) -> FinishedRun:
    started_at = time.perf_counter()
    config = _checked(name, own, keys, rewards)
    place.keep()
    parts = {} if rewards is None else {"environments": rewards.made()}
    PROGRAMS[name].train(config, started_at=started_at, **parts)
    return FinishedRun.of_folders(place.folder, config.logger.log_dir, config.checkpointing)


def _checked(name: str, own: Mapping[str, Any], keys: Mapping[str, Any], rewards: GivenRewards | None) -> Any:
    """Return the checked configuration of a run that is ready to start."""
    program = PROGRAMS[name]
    tree = _joined(dict(own), _nested(keys))
    config = load_config(program.config_for_this_machine(), schema=program.schema, program_keys=tree)
    prepare(config, without={"environments"} if rewards is not None and rewards.are_functions else ())
    return config


def _nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Convert keys with dots to nested dicts."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        if key in _NAMES_OF_TRL:
            raise ConfigError(f"{key} is no argument of this function and no key. Did you mean {_NAMES_OF_TRL[key]!r}?")
        if callable(value):
            raise ConfigError(f"{key} is a function, which no key can be. Reward functions are given as reward=...")
        *above, last = key.split(".")
        below = {last: _nested(value) if isinstance(value, Mapping) else value}
        for name in reversed(above):
            below = {name: below}
        tree = _joined(tree, below)
    return tree


def _joined(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested dicts. Values of the second dict override those of the first."""
    joined = dict(below)
    for key, value in above.items():
        known = joined.get(key)
        joined[key] = _joined(known, value) if isinstance(known, dict) and isinstance(value, Mapping) else value
    return joined
