"""Find out who sends a request.

A keys file has a line `KEY NAME` for each key, and several keys may have one name. Without a file, every key is a
user of its own, which `ServiceConfig` allows on the loopback address only. Invariant: keys are stored and logged as
hashes only.
"""

import hashlib
import re
import sys
from pathlib import Path

from nemo_rl.utils.errors import ConfigError

_KEY = re.compile(r"tml-[\x21-\x7e]{1,508}")
"""The client's library accepts keys with this beginning only."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9@._-]{0,63}")


class KeyBook:
    """Users by their keys.

    Args:
        file: keys file, or None to accept every key.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._names = None if file is None else _read_keys(file)

    @property
    def names(self) -> list[str]:
        """The names of the users in the file."""
        return sorted(set((self._names or {}).values()))

    def user_of(self, key: str) -> str | None:
        """Return the name of the user with a key, or None if the key is unknown."""
        if not _KEY.fullmatch(key):
            return None
        digest = hashlib.sha256(key.encode()).hexdigest()
        # The guard of connections compares users by identity.
        return sys.intern(f"key-{digest[:12]}") if self._names is None else self._names.get(digest)


def _read_keys(file: Path) -> dict[str, str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"service.keys_file: {file} cannot be read: {error}.") from error
    names = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, _, name = line.strip().partition(" ")
        if not _KEY.fullmatch(key) or not _NAME.fullmatch(name.strip()):
            raise ConfigError(
                f"service.keys_file: line {number} of {file} is wrong. Write a key that begins with tml-, a space, and "
                "a name of letters, digits and any of @._-."
            )
        digest = hashlib.sha256(key.encode()).hexdigest()
        if digest in names:
            raise ConfigError(f"service.keys_file: line {number} of {file} repeats the key of another line.")
        names[digest] = sys.intern(name.strip())
    if not names:
        raise ConfigError(f"service.keys_file: {file} has no key. Write a line `tml-... NAME` for each user.")
    return names
