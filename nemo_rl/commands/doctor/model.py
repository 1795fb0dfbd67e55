"""Answer `nemo_rl doctor --model`: which rows, meshes, backends and engines a model works with.

Only the model's configuration is read. Invariant: the exit status is 0 if every trial is right, refused with a reason
or skipped, and 1 if one failed.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PretrainedConfig
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from nemo_rl.commands.doctor.model_cells import Cell, TrialResult, train_cell, trials
from nemo_rl.commands.doctor.report import standard_output
from nemo_rl.commands.doctor.small_copy import saved_small_copy
from nemo_rl.config import PolicyConfig
from nemo_rl.config.loading.algorithms import ALGORITHMS
from nemo_rl.config.loading.load import config_of
from nemo_rl.config.rules.models import trust_models
from nemo_rl.models.huggingface.load import load_model_config, require_text_model
from nemo_rl.models.huggingface.sizes import longest_context
from nemo_rl.utils.errors import ConfigError

_LENGTH = 512
_STYLES = {
    TrialResult.RIGHT: "green",
    TrialResult.REFUSED: "yellow",
    TrialResult.FAILED: "bold red",
    TrialResult.SKIPPED: "dim",
}
_ENGINES = ("vllm", "hf")


@dataclass(frozen=True)
class Question:
    """A model, and the settings under which it is tried."""

    policy: PolicyConfig
    model: PretrainedConfig

    @classmethod
    def of(cls, name: str, overrides: Sequence[str]) -> "Question":
        """Read the configuration of a model.

        Args:
            name: folder with a `config.json`, or id on the hub.
            overrides: `policy.key=value` as for a run. Sizes of meshes are replaced in each trial.

        Raises:
            ConfigError: the model cannot be read, or an override is wrong.
        """
        others = [text for text in overrides if not text.lstrip("+~").startswith("policy.")]
        if others:
            raise ConfigError(f"{others[0]!r}: `doctor --model` takes keys of policy only, such as policy.precision.")
        section: dict[str, Any] = {"model_name": name, "generation": {"backend": "vllm"}}
        given = {"policy": section, "cluster": {"device": "cpu"}}
        schema = ALGORITHMS["grpo"]
        trust_models(config_of(given, schema, overrides=overrides, check=False).model_keys())
        longest = longest_context(load_model_config(name).get_text_config())
        section["max_total_sequence_length"] = min(_LENGTH, longest or _LENGTH)
        policy = config_of(given, schema, overrides=overrides, check=False).policy
        model = load_model_config(policy.model_name, policy.hf_config_overrides)
        require_text_model(model, policy.model_name)
        return cls(policy, model)

    def cells(self, engines: Sequence[str] = _ENGINES, *, megatron: bool = True) -> Iterator[Cell]:
        """Yield a cell for each trial, as soon as it ends.

        Args:
            engines: engines to try.
            megatron: also train with Megatron Core.
        """
        for trial in trials(self.policy):
            yield train_cell(self.policy, self.model, trial)
        try:
            with saved_small_copy(self.policy, self.model) as copy:
                yield from copy.megatron_cells() if megatron else ()
                for backend in engines:
                    yield from copy.engine_cells(backend, ("float32", "bfloat16"))
        except ConfigError as error:
            yield Cell("Megatron Core and engines", "small model", TrialResult.REFUSED, str(error))


def examine_model(arguments: argparse.Namespace) -> int:
    """Print the table of a model, or one JSON object, and return the exit status."""
    if arguments.config is not None:
        raise ConfigError("--model tries a model alone, and --config a run. Give one of them.")
    question = Question.of(arguments.model, arguments.overrides)
    console = Console(file=sys.stderr)
    cells = []
    torch.set_num_threads(1)  # children are forked, and the copy is tiny
    disable_progress_bar()
    set_verbosity_error()
    with console.status("") as status:
        for cell in question.cells():
            status.update(f"{cell.part}, {cell.what}: {cell.result}")
            cells.append(cell)
    (_write_json if arguments.json else _write_table)(question, cells)
    return int(any(cell.result is TrialResult.FAILED for cell in cells))


def counts(cells: Sequence[Cell]) -> dict[str, int]:
    """Return the number of cells of each result."""
    return {str(result): sum(cell.result is result for cell in cells) for result in TrialResult}


def _write_json(question: Question, cells: Sequence[Cell]) -> None:
    content = {
        "model": question.policy.model_name,
        "model_type": question.model.model_type,
        "counts": counts(cells),
        "cells": [asdict(cell) for cell in cells],
    }
    sys.stdout.write(json.dumps(content, indent=2) + "\n")


def _write_table(question: Question, cells: Sequence[Cell]) -> None:
    console = standard_output()
    console.print(f"{question.policy.model_name}: {question.model.model_type}, tried on a small model of this type")
    table = Table(box=SIMPLE_HEAD)
    for title in ("part", "setting", "result", "difference", "seconds", "reason or dtype"):
        table.add_column(title, no_wrap=title != "reason or dtype", overflow="fold")
    for cell in cells:
        difference = "" if cell.difference is None else f"{cell.difference:.1e}"
        result = Text(cell.result, style=_STYLES[cell.result])
        table.add_row(cell.part, cell.what, result, difference, f"{cell.seconds:.1f}", Text(cell.told))
    console.print(table)
    console.print(", ".join(f"{count} {name}" for name, count in counts(cells).items()))
