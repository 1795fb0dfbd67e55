"""Graded answers on disk: one JSON line per answer, appended batch by batch; what makes a restart possible.

    save_path/config.json             configuration and input files of the samples
    save_path/evaluation_data.jsonl   one line per answer
    save_path/results.json            the report (written by `evaluator`)

Invariant: the file holds whole prompts in order, n answers each; a tail that a killed run left half-written is dropped,
and samples of two different configurations never mix.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_rl.config.runs.eval import EvalMasterConfig
from nemo_rl.files.atomic_write import write_atomically
from nemo_rl.files.folder_lock import FolderLock
from nemo_rl.utils.errors import CheckpointError, ConfigError
from nemo_rl.utils.log_backends.tracker import flatten_dict

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
RECORDS_FILE = "evaluation_data.jsonl"
RESULTS_FILE = "results.json"

WITHOUT_INFLUENCE = (
    "cluster",
    "data.max_bad_row_share",
    "eval.k_value",
    "eval.metric",
    "eval.save_path",
    "eval.signal_grace_s",
    "generation.colocated",
    "generation.num_prompts_per_step",
    "generation.engine.env_vars",
    "generation.engine.gpu_memory_utilization",
    "generation.engine.kv_cache_memory_mb",
    "generation.weight_sync",
)
"""Keys that may change between a run and the run that goes on: they choose no samples."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".json", ".jinja", ".model")


@dataclass(frozen=True)
class AnswerRecord:
    """One graded answer.

    Attributes:
        idx: which prompt, from 0.
        sample: which of its answers, from 0.
        prompt: the rendered prompt.
        response: what the model wrote.
        ground_truth: the known answer.
        answer: what the grader took as the model's answer; None if it found none.
        reward: what the grader gave; None where it could not grade.
        outcome: how the rollout ended (`experience.trajectory.Outcome`).
        response_length: tokens written.
        topic: field of knowledge, where the data set names one.
        error: what failed.
    """

    idx: int
    sample: int
    prompt: str
    response: str
    ground_truth: str | None
    answer: str | None
    reward: float | None
    outcome: str
    response_length: int
    topic: str | None = None
    error: str | None = None

    @property
    def is_correct(self) -> bool:
        """Whether the answer counts as right; an answer that could not be graded does not."""
        return self.reward is not None and self.reward >= 1.0


class RecordStore:
    """Answers in memory and, with a folder, on disk.

    Args:
        config: the configuration of the run.
        num_prompts: prompts of the data set.

    Attributes:
        records: all answers so far, ordered by prompt and sample.

    Raises:
        ConfigError: the folder holds answers of another configuration, model or data.
        CheckpointError: another process writes there, or the file is damaged.
    """

    def __init__(self, config: EvalMasterConfig, num_prompts: int) -> None:
        self.records: list[AnswerRecord] = []
        self._per_prompt = config.eval.num_tests_per_prompt
        self._folder = None if config.eval.save_path is None else Path(config.eval.save_path).expanduser()
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self._folder)
        if not self._lock.acquire():
            raise CheckpointError(f"Another process writes into eval.save_path={str(self._folder)!r}.")
        self._claim(config, num_prompts)
        self.records = _whole_prompts(self._folder / RECORDS_FILE, self._per_prompt)
        if self.records:
            logger.info("Going on in %s after %d of %d prompts.", self._folder, self.num_prompts_done, num_prompts)

    @property
    def num_prompts_done(self) -> int:
        """Prompts with all of their answers."""
        return len(self.records) // self._per_prompt

    def append(self, records: Sequence[AnswerRecord]) -> None:
        """Add the answers of whole prompts; they are on disk when this returns."""
        self.records += records
        if self._folder is None:
            return
        lines = "".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records)
        with (self._folder / RECORDS_FILE).open("ab") as file:
            file.write(lines.encode("utf-8", errors="backslashreplace"))
            file.flush()
            os.fsync(file.fileno())

    def write_results(self, results: Mapping[str, Any]) -> Path | None:
        """Write the report as JSON; returns its path, or None without a folder."""
        if self._folder is None:
            return None
        path = self._folder / RESULTS_FILE
        _write_json(path, results)
        return path

    def close(self) -> None:
        """Let another process have the folder."""
        if self._folder is not None:
            self._lock.release()

    def _claim(self, config: EvalMasterConfig, num_prompts: int) -> None:
        """Store what the samples depend on, or compare it with what is stored."""
        assert self._folder is not None
        path = self._folder / CONFIG_FILE
        current = {"config": config.model_dump(mode="json"), "inputs": input_files(config, num_prompts)}
        if (self._folder / RECORDS_FILE).exists():
            stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            changes = _changes(_influential(stored), _influential(current))
            if changes:
                raise ConfigError(
                    f"eval.save_path={str(self._folder)!r} holds answers of another evaluation:\n  "
                    + "\n  ".join(changes)
                    + "\nGo on with the same values, or choose another (or an empty) folder."
                )
        _write_json(path, current)


def input_files(config: EvalMasterConfig, num_prompts: int) -> dict[str, Any]:
    """What the samples depend on beside the configuration: size and time of model and data files."""
    found: dict[str, Any] = {"num_prompts": num_prompts}
    for section, key in config.path_keys():
        path = Path(getattr(section, key) or "")
        if path.is_absolute() and path.exists():
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            for file in files:
                if file.is_file() and (path.is_file() or file.suffix in _WEIGHT_SUFFIXES):
                    status = file.stat()
                    found[str(file)] = f"{status.st_size} bytes, changed at {status.st_mtime_ns / 1e9:.3f}"
    return found


def _influential(state: Mapping[str, Any]) -> dict[str, Any]:
    """Flat `{dotted key: value}` of what decides on the samples."""
    config = flatten_dict(state.get("config", {}), expand_lists=False)
    kept = {
        key: value
        for key, value in config.items()
        if not any(key == skipped or key.startswith(f"{skipped}.") for skipped in WITHOUT_INFLUENCE)
    }
    device = config.get("cluster.device")
    return {**kept, "cluster.device": device, **state.get("inputs", {})}


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    keys = dict.fromkeys((*old, *new))
    return [f"{key} was {old.get(key)!r} and is {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]


def _whole_prompts(path: Path, per_prompt: int) -> list[AnswerRecord]:
    """The answers on disk, without a half-written tail, which is cut off the file too."""
    if not path.exists():
        return []
    *lines, tail = path.read_bytes().split(b"\n")
    kept = len(lines) - len(lines) % per_prompt
    records = [_parse(line, path, number) for number, line in enumerate(lines[:kept], start=1)]
    for number, record in enumerate(records):
        if (record.idx, record.sample) != divmod(number, per_prompt):
            raise CheckpointError(
                f"{path}:{number + 1} holds answer {record.sample} of prompt {record.idx}, expected answer "
                f"{number % per_prompt} of prompt {number // per_prompt}. Choose another eval.save_path."
            )
    if tail or kept < len(lines):
        number = len(lines) - kept + bool(tail)
        again = "line is" if number == 1 else f"{number} lines are"
        logger.warning("%s ends within a prompt; its last %s done again.", path, again)
        write_atomically(path, (line.decode() + "\n" for line in lines[:kept]))
    return records


def _parse(line: bytes, path: Path, number: int) -> AnswerRecord:
    try:
        return AnswerRecord(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}:{number} is not an answer written by an evaluation ({error}). Choose another eval.save_path."
        ) from error


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
