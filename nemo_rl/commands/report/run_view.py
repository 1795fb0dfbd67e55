"""Collect all data that the page shows of one run, as JSON."""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nemo_rl.commands.report.curves import Curves, phases_of
from nemo_rl.commands.report.findings import find
from nemo_rl.commands.report.images import PageImages
from nemo_rl.commands.report.run_files import RunFiles
from nemo_rl.commands.report.run_state import state_of
from nemo_rl.commands.report.samples import COLUMNS, READ_ERRORS, SampleIndex
from nemo_rl.files.hub_download import cached_file
from nemo_rl.host.boundary import Boundary

logger = logging.getLogger(__name__)

_FILE = "tokenizer.json"
_LARGEST = 2**32
"""Upper limit of token ids, because tokenizers accept only smaller numbers."""


class TokenTexts:
    """Decode tokens one by one, or shows their numbers if the tokenizer's file is missing.

    Args:
        run: the run, whose configuration names the tokenizer: a folder, or a model in the hub's cache.
    """

    def __init__(self, run: RunFiles) -> None:
        self._tokenizer = _load(run)
        self._texts: dict[int, str] = {}

    def of(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each token."""
        return {token: self._text(token) for token in set(ids)}

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decode(token)
        return self._texts[token]

    def _decode(self, token: int) -> str:
        if self._tokenizer is None or token >= _LARGEST:
            return f"[{token}]"
        alone: str = self._tokenizer.decode([token], skip_special_tokens=False)
        twice: str = self._tokenizer.decode([token, token], skip_special_tokens=False)
        # SentencePiece removes the space before the first word, and WordPiece adds one between words.
        text = twice.removeprefix(alone) if twice.startswith(alone) else alone
        return text or str(self._tokenizer.id_to_token(token) or f"[{token}]")


def _load(run: RunFiles) -> Tokenizer | None:
    policy = run.config.get("policy") or {}
    name = (policy.get("tokenizer") or {}).get("name") or policy.get("model_name")
    if not isinstance(name, str):
        return None
    path = Path(name) / _FILE if Path(name).is_dir() else cached_file(name, _FILE)
    with Boundary(Exception) as caught:  # tokenizers raises plain exceptions for missing and damaged files
        return Tokenizer.from_file(str(path))
    logger.info("Tokens are shown as numbers: %s of %s cannot be read (%s).", _FILE, name, caught.take())
    return None


_SHOWN_KEYS = {
    "model": "policy.model_name",
    "training backend": "policy.megatron_cfg.enabled",
    "engine": "policy.generation.backend",
    "device": "cluster.device",
    "nodes": "cluster.num_nodes",
    "prompts a step": "{}.num_prompts_per_step",
    "answers a prompt": "{}.num_generations_per_prompt",
    "samples an update": "policy.train_global_batch_size",
    "learning rate": "policy.optimizer.kwargs.lr",
    "seed": "{}.seed",
}
"""Facts at the top of the page, by dotted keys; `{}` is the algorithm's section."""


@dataclass
class RunView:
    """Data of one run, which may still be running."""

    run: RunFiles
    curves: Curves = field(init=False)
    samples: SampleIndex = field(init=False)
    _texts: TokenTexts | None = None

    def __post_init__(self) -> None:
        self.curves, self.samples = Curves(self.run), SampleIndex(self.run)

    def read(self, most_files: int | None = None) -> bool:
        """Read new metrics and samples, and return whether there were any.

        Args:
            most_files: largest number of files of samples to read, or None for all.
        """
        has_metrics, has_samples = self.curves.read(), self.samples.read(most_files)
        self.samples.last_step = self._last_sampled()
        return has_metrics or has_samples

    def _last_sampled(self) -> int | None:
        """Return the last step whose training samples are valid, or None if the run has logged no step.

        Samples are written before the metrics of their step, and remain if the step fails.
        """
        last, time = self.curves.last_step, self.curves.trained_at
        if not last:
            return None
        return last + 1 if time is not None and self.samples.is_newer(last + 1, time) else last

    def as_json(self) -> dict[str, Any]:
        """Return everything except the samples."""
        return {
            "name": self.run.name,
            "folder": str(self.run.folder),
            "status": self._status(),
            "facts": self._facts(),
            "config": self.run.flat_config,
            "curves": {name: curve.as_json() for name, curve in sorted(self.curves.by_name.items())},
            "num_samples": self.samples.num_known,
            "phases": phases_of(self.curves),
            "findings": [finding.as_json() for finding in find(self.curves, self.run.algorithm)],
        }

    def detail(self, number: int, page: PageImages | None = None) -> dict[str, Any]:
        """Return a sample with the texts of its tokens, and raise the errors of `SampleIndex.detail`.

        Args:
            page: images of the page to which those of the sample are added, or None to return their addresses.
        """
        detail = self.samples.detail(number)
        if "images" in detail:
            pictures = PageImages() if page is None else page
            pictures.add([part.folder for part in self.run.parts], detail["images"])
            detail |= {"addresses": pictures.addresses} if page is None else {}
        tokens = detail["tokens"]
        if tokens:
            if self._texts is None:
                self._texts = TokenTexts(self.run)
            tokens["texts"] = self._texts.of(tokens["ids"])
        return detail

    def samples_as_json(self, num_listed: int, num_details: int, page: PageImages | None = None) -> dict[str, Any]:
        """Return the summaries of samples, and the conversation and tokens of some of them.

        Args:
            num_listed: largest number of summaries; of more samples, whole groups are chosen evenly over the steps.
            num_details: largest number of samples with conversation and tokens.
            page: as for `detail`.
        """
        listed = self.samples.chosen(num_listed)
        return {
            "columns": ["number", *COLUMNS],
            "rows": self.samples.rows_of(listed),
            "known": len(self.samples),
            "num_damaged": self.samples.num_damaged,
            "details": dict(self._details(self.samples.chosen(num_details, listed), page)),
        }

    def _details(self, numbers: Sequence[int], page: PageImages | None) -> Iterator[tuple[str, Any]]:
        for number in numbers:
            with contextlib.suppress(IndexError, *READ_ERRORS):  # the run has written the file again
                yield str(number), self.detail(number, page)

    def _status(self) -> dict[str, Any]:
        reached = {"step": self.curves.last_step, "last_time": self.curves.last_time}
        return state_of(self.run) | reached | {"max_steps": self.run.max_steps}

    def _facts(self) -> dict[str, Any]:
        config = self.run.flat_config
        facts = {name: config.get(key.format(self.run.algorithm)) for name, key in _SHOWN_KEYS.items()}
        if config:
            facts["training backend"] = "Megatron Core" if facts["training backend"] else "DTensor"
        if isinstance(facts["model"], str):
            facts["model"] = os.path.basename(facts["model"].rstrip("/")) or facts["model"]
        return {"algorithm": self.run.algorithm or None} | facts
