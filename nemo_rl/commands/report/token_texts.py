"""Decode single tokens with the file of a run's tokenizer."""

import logging
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from nemo_rl.commands.report.run_files import RunFiles

logger = logging.getLogger(__name__)

_FILE = "tokenizer.json"
_LARGEST = 2**32
"""Tokenizers take smaller numbers only."""


class TokenTexts:
    """Decodes tokens one by one; without the file of the tokenizer, the texts are the numbers of the tokens.

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
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text or str(self._tokenizer.id_to_token(token) or f"[{token}]")


def _load(run: RunFiles) -> Tokenizer | None:
    policy = run.config.get("policy") or {}
    name = (policy.get("tokenizer") or {}).get("name") or policy.get("model_name")
    if not isinstance(name, str):
        return None
    path: object = Path(name) / _FILE
    if not Path(name).is_dir():
        try:
            path = try_to_load_from_cache(name, _FILE)
        except ValueError:  # no name of a model
            path = None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # boundary: tokenizers raises plain exceptions for missing and damaged files
        logger.info("Tokens are shown as numbers: %s of %s cannot be read (%s).", _FILE, name, error)
        return None
