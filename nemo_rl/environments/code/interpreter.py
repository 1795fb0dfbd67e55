"""Run blocks of code of an episode, so that later blocks see the variables of earlier ones."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.environments.code.inside.values import NotPlainError, encode
from nemo_rl.environments.code.programs import source_of
from nemo_rl.sandbox import End, Outcome, Program, Sandbox
from nemo_rl.utils.errors import DataError

_LEFT_OUT = "\n... {} characters left out ...\n"


def run_blocks(
    blocks: Sequence[str], sandbox: Sandbox, context: Mapping[str, Any], working_dir: str | None = None
) -> Outcome:
    """Run blocks in one fresh program; its output is that of the last one.

    Nothing of a block lives on in a process: the earlier ones run again, which any process of the environment can do
    after a restart. They have to give the same variables again, so random numbers need a seed.

    Args:
        blocks: Code of the episode, oldest first.
        sandbox: Where they run; its limits hold for all blocks together.
        context: Variables that the first block starts with: plain data.
        working_dir: A folder whose files are copied into the scratch folder.

    Raises:
        DataError: A variable is no plain data, or the folder does not fit into the scratch folder.
        SandboxError: The program could not be locked up.
    """
    try:
        start = encode(dict(context))
    except NotPlainError as error:
        raise DataError(f"The context of a sample must be plain data of Python: {error}.") from error
    session = json.dumps({"blocks": list(blocks), "context": start}).encode()
    files = {"session.json": session, "values.py": source_of("values").encode()}
    given = files_of(working_dir, sandbox.limits.scratch_mb << 20) if working_dir else {}
    return sandbox.run(Program(source_of("session"), files={**given, **files}))


def files_of(folder: str, max_bytes: int) -> dict[str, bytes]:
    """Return the content of all files below a folder by relative path.

    Raises:
        DataError: The folder does not exist, or holds more than `max_bytes`.
    """
    place = Path(folder)
    if not place.is_dir():
        raise DataError(f"working_dir {folder!r} of a sample is no folder.")
    paths = [Path(parent) / name for parent, _, names in os.walk(place) for name in names]
    paths = [path for path in paths if path.is_file() and not path.is_symlink()]
    if (total := sum(path.stat().st_size for path in paths)) > max_bytes:
        raise DataError(f"working_dir {folder!r} holds {total} bytes, more than the scratch folder ({max_bytes}).")
    return {str(path.relative_to(place)): path.read_bytes() for path in paths}


def observation_of(outcome: Outcome, max_chars: int) -> str:
    """Return what a model is told about a run: its output, an error, or the limit that ended it."""
    text = (outcome.stdout + outcome.stderr).strip("\n")
    if outcome.end is not End.EXITED:
        text += f"\nThe program was ended: it went beyond the limit of {outcome.end}."
    elif outcome.exit_code > 128:
        text += f"\nThe program was ended by signal {outcome.exit_code - 128}."
    if len(text) > max_chars:
        half = max_chars // 2
        text = text[:half] + _LEFT_OUT.format(len(text) - 2 * half) + text[-half:]
    return f"<result>\n{text.strip()}\n</result>"
