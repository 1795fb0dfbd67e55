"""Store graded answers on disk, one JSON line per answer, so that an interrupted evaluation can continue.

    save_path/config.json             configuration and input files of the samples
    save_path/evaluation_data.jsonl   one line per answer
    save_path/images/                 a picture for each image of the prompts (`experience.logged_images`)
    save_path/results.json            the report (written by `evaluator`)

Invariant: the file holds complete prompts in order, with n answers each. If a killed run left an incomplete prompt at
the end, it is removed. Samples of different configurations never mix.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.config import public_values
from nemo_rl.config.runs.eval import EvalMasterConfig
from nemo_rl.experience.logged_images import ImageLog, LoggedImage, logged_images
from nemo_rl.experience.trajectory import Trajectory
from nemo_rl.files.folders import FolderLock
from nemo_rl.files.regular_file import read_bytes, read_text
from nemo_rl.files.writing import write_atomically
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
    *(
        f"generation.endpoint.{key}"
        for key in ("api_key_env", "backoff_s", "max_attempts", "max_backoff_s", "max_concurrent_requests", "timeout_s")
    ),
    "generation.engine.env_vars",
    "generation.engine.gpu_memory_utilization",
    "generation.engine.kv_cache_memory_mb",
    "generation.weight_sync",
)
"""Keys that may change when an evaluation continues, because samples do not depend on them."""

_EXTRA_BODY = "generation.endpoint.extra_body"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".json", ".jinja", ".model")


@dataclass(frozen=True)
class AnswerRecord:
    """One graded answer."""

    idx: int
    """Index of the prompt, from 0."""
    sample: int
    """Index among the prompt's answers, from 0."""
    prompt: str
    """Rendered prompt."""
    response: str
    """Text of the model."""
    ground_truth: str | None
    """Known answer."""
    answer: str | None
    """Answer that the grader extracted, or None if it found none."""
    reward: float | None
    """Reward of the grader, or None if the answer could not be graded."""
    outcome: str
    """Reason why the rollout ended (`experience.trajectory.Outcome`)."""
    response_length: int | None
    """Number of generated tokens, or None if it is not known."""
    logprob: float | None = None
    """Sum of the log-probabilities of the generated tokens, or None if the model's server gave none."""
    topic: str | None = None
    """Topic of the prompt, or None if the data set has no topics."""
    error: str | None = None
    """Description of a failure, or None if there was none."""
    reasoning: str | None = None
    """Reasoning that the model's server has separated from the response, or None if there is none."""
    agent_counts: dict[str, float] = field(default_factory=dict)
    """Number of events of each kind between program and endpoint (`Trajectory.agent_counts`)."""
    images: list[LoggedImage] = field(default_factory=list)
    """Images of the prompt and of observations. Lines of answers without images have no such entry."""

    @property
    def is_correct(self) -> bool:
        """True if the answer is right. False if it is wrong or could not be graded."""
        return self.reward is not None and self.reward >= 1.0


class RecordStore:
    """Keep answers in memory and, if a folder is configured, on disk.

    Args:
        num_prompts: number of prompts in the data set.

    Raises:
        ConfigError: the folder holds answers of another configuration, model or data.
        CheckpointError: another process writes to the folder, or the file is damaged.
    """

    def __init__(self, config: EvalMasterConfig, num_prompts: int) -> None:
        self.records: list[AnswerRecord] = []
        """All answers so far, ordered by prompt and sample."""
        self._per_prompt = config.eval.num_tests_per_prompt
        self._folder = None if config.eval.save_path is None else Path(config.eval.save_path).expanduser()
        self._images = None if self._folder is None else ImageLog(self._folder)
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self._folder)
        if not self._lock.acquire():
            raise CheckpointError(f"Another process writes into eval.save_path={str(self._folder)!r}.")
        self._claim(config, num_prompts)
        self.records = _whole_prompts(self._folder / RECORDS_FILE, self._per_prompt)
        if self.records:
            logger.info("Continuing in %s after %d of %d prompts.", self._folder, self.num_prompts_done, num_prompts)

    @property
    def num_prompts_done(self) -> int:
        """Number of prompts with all of their answers."""
        return len(self.records) // self._per_prompt

    def append(self, records: Sequence[AnswerRecord]) -> None:
        """Add the answers of complete prompts. The answers are on disk when the method returns."""
        self.records += records
        if self._folder is None:
            return
        lines = "".join(json.dumps(_entries(record), ensure_ascii=False) + "\n" for record in records)
        with (self._folder / RECORDS_FILE).open("ab") as file:
            file.write(lines.encode("utf-8", errors="backslashreplace"))
            file.flush()
            os.fsync(file.fileno())

    def write_images(self, trajectory: Trajectory) -> list[LoggedImage]:
        """Write the images of a sample to the configured folder, and return their entries."""
        return logged_images(trajectory) if self._images is None else self._images.write(trajectory)

    def write_results(self, results: Mapping[str, Any]) -> Path | None:
        """Write the report as JSON and return its path, or return None if no folder is configured."""
        if self._folder is None:
            return None
        path = self._folder / RESULTS_FILE
        _write_json(path, results)
        return path

    def close(self) -> None:
        """Release the folder's lock."""
        if self._folder is not None:
            self._lock.release()

    def _claim(self, config: EvalMasterConfig, num_prompts: int) -> None:
        """Store the settings on which samples depend, or check that they equal the stored ones."""
        assert self._folder is not None
        path = self._folder / CONFIG_FILE
        current = {"config": public_values(config), "inputs": input_files(config, num_prompts)}
        if (self._folder / RECORDS_FILE).exists():
            stored = json.loads(read_text(path)) if path.exists() else {}
            changes = _changes(_influential(stored), _influential(current))
            if changes:
                raise ConfigError(
                    f"eval.save_path={str(self._folder)!r} holds answers of another evaluation:\n  "
                    + "\n  ".join(changes)
                    + "\nContinue with the same values, or choose another (or an empty) folder."
                )
        _write_json(path, current)


def _entries(record: AnswerRecord) -> dict[str, Any]:
    """Return the entries of an answer's line."""
    return {name: value for name, value in asdict(record).items() if name != "images" or value}


def input_files(config: EvalMasterConfig, num_prompts: int) -> dict[str, Any]:
    """Return the sizes and modification times of the model and data files, on which samples depend."""
    found: dict[str, Any] = {"num_prompts": num_prompts}
    for _, section, key in config.path_keys():
        path = Path(getattr(section, key) or "")
        if path.is_absolute() and path.exists():
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            for file in files:
                if file.is_file() and (path.is_file() or file.suffix in _WEIGHT_SUFFIXES):
                    status = file.stat()
                    found[str(file)] = f"{status.st_size} bytes, changed at {status.st_mtime_ns / 1e9:.3f}"
    return found


def _influential(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings on which samples depend, as flat `{dotted key: value}`."""
    config = flatten_dict(state.get("config", {}), expand_lists=False)
    kept = {
        key: value
        for key, value in config.items()
        if not any(key == skipped or key.startswith(f"{skipped}.") for skipped in WITHOUT_INFLUENCE)
    }
    device = config.get("cluster.device")
    # The endpoint stays one value, because its fields may be null, which means that requests omit the field.
    endpoint = state.get("config", {}).get("generation", {}).get("endpoint") or {}
    kept = {key: value for key, value in kept.items() if not key.startswith(_EXTRA_BODY)}
    return {**kept, _EXTRA_BODY: endpoint.get("extra_body"), "cluster.device": device, **state.get("inputs", {})}


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    keys = dict.fromkeys((*old, *new))
    return [f"{key} was {old.get(key)!r} and is {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]


def _whole_prompts(path: Path, per_prompt: int) -> list[AnswerRecord]:
    """Read the answers on disk, and remove an incomplete prompt from the end of the file."""
    if not path.exists():
        return []
    *lines, tail = read_bytes(path).split(b"\n")
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
        again = "line was" if number == 1 else f"{number} lines were"
        logger.warning("%s ended within a prompt; its last %s removed and will be sampled again.", path, again)
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
