"""Catch what the user's code raises, and describe it.

The code may raise anything, also exceptions that are no `Exception`, such as a `CancelledError` of a task of its own or
`pytest.skip`. So callers catch `BaseException` and ask here whether it is theirs.
"""

import asyncio
import os
import traceback

from nemo_rl.environments.user_frames import CodeLine, user_lines


def raise_if_cancelled(error: BaseException) -> None:
    """Raise a `CancelledError` again if it cancels the task that runs; return if the user's code raised it."""
    if isinstance(error, asyncio.CancelledError) and _is_cancelled():
        raise error


def describe(error: BaseException) -> str:
    """Describe an error by its type, its text and the innermost line of the user's code, or else of any code."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = user_lines(error) or [CodeLine(frame.filename, frame.lineno or 0, frame.name) for frame in frames]
    place = f" ({os.path.basename(lines[-1].file)}:{lines[-1].number})" if lines else ""
    return f"{type(error).__name__}: {_text_of(error)}{place}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as problem:  # boundary: the class may be the user's own
        return f"(its text raises {type(problem).__name__})"


def _is_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return False
    return task is not None and task.cancelling() > 0
