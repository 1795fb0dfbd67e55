"""Run the blocks of code of an episode, so that later blocks can use the variables of earlier ones."""

import json
import marshal
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

from nemo_rl.config.schema.kits import SandboxKeys
from nemo_rl.data.datasets.rows import program_tests
from nemo_rl.kits.code.inside.values import COMPLETED, RAISED, NotPlainError, encode
from nemo_rl.sandbox import End, Limits, Program, ProgramOutcome
from nemo_rl.utils.errors import DataError

_INSIDE = Path(__file__).parent / "inside"
_ELSEWHERE = {"program_tests": Path(program_tests.__file__)}
_HEADER_REST = bytes(12)  # flags, time and size of the source, which are not compared


@cache
def source_of(name: str) -> str:
    """Return the source code of a file of `nemo_rl/kits/code/inside`."""
    return _ELSEWHERE.get(name, _INSIDE / f"{name}.py").read_text(encoding="utf-8")


@cache
def compiled(name: str) -> bytes:
    """Return a module as the content of a file `.pyc`, which Python imports faster than its source.

    Programs in the sandbox run with the Python of this process, so they can use its byte code.
    """
    code = compile(source_of(name), f"{name}.py", "exec")
    return MAGIC_NUMBER + _HEADER_REST + marshal.dumps(code)


_LEFT_OUT = "\n... {} characters left out ...\n"


def program_of(
    blocks: Sequence[str], context: Mapping[str, Any], working_dir: str | None = None, max_bytes: int = 0
) -> Program:
    """Return one fresh program that runs all blocks and prints the output of the last block.

    No process keeps the variables of earlier blocks. The earlier blocks run again each time, which also works after a
    restart of the environment. They must compute the same variables again, so random numbers need a seed.

    Args:
        blocks: Code of the episode, oldest first.
        context: Variables that exist before the first block runs. Their values are plain data.
        working_dir: A folder whose files are copied into the scratch folder.
        max_bytes: Largest total size of these files in bytes.

    Raises:
        DataError: A variable is not plain data, or the folder is too large.
    """
    try:
        start = encode(dict(context))
    except NotPlainError as error:
        raise DataError(f"The context of a sample must be plain data of Python: {error}.") from error
    session = json.dumps({"blocks": list(blocks), "context": start}).encode()
    files = {"session.json": session, "values.py": source_of("values").encode()}
    given = files_of(working_dir, max_bytes) if working_dir else {}
    return Program(source_of("session"), files={**given, **files})


def came_to_end(outcome: ProgramOutcome) -> bool:
    """Return whether all blocks ended, if only with an exception. Any other last block would end every later run."""
    return outcome.end is End.EXITED and outcome.exit_code in (COMPLETED, RAISED)


def limits_of(keys: SandboxKeys, *, wall_time_s: float, cpu_time_s: float) -> Limits:
    """Return the limits of one program."""
    return Limits(
        wall_time_s=wall_time_s,
        cpu_time_s=cpu_time_s,
        memory_mb=keys.memory_mb,
        processes=keys.max_processes,
        file_mb=keys.file_mb,
        scratch_mb=keys.scratch_mb,
        output_bytes=keys.output_bytes,
    )


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


def text_of_outcome(outcome: ProgramOutcome) -> str:
    """Return the text that a model reads about a run: its output, an error, and the limit that ended the run."""
    text = (outcome.stdout + outcome.stderr).strip("\n")
    if outcome.end is not End.EXITED:
        text += f"\nThe program was ended: it went beyond the limit of {outcome.end}."
    elif outcome.exit_code > 128:
        text += f"\nThe program was ended by signal {outcome.exit_code - 128}."
    return text


def observation_of(outcome: ProgramOutcome, max_chars: int) -> str:
    """Return the observation after a run. A long output loses its middle."""
    text = text_of_outcome(outcome)
    if len(text) > max_chars:
        half = max_chars // 2
        text = text[:half] + _LEFT_OUT.format(len(text) - 2 * half) + text[-half:]
    return f"<result>\n{text.strip()}\n</result>"
