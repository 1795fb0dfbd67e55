"""Run programs that are Python functions, in the process of the environment.

Invariant: whatever a function raises or returns affects only its own sample. A function that blocks beyond its deadline
keeps its thread, and no other program waits for this thread.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, override

from nemo_rl.agents.programs.interfaces import AgentError, AgentProgram, AgentResult, AgentTask, read_result, too_slow
from nemo_rl.environments.user_errors import describe
from nemo_rl.host.boundary import Boundary, in_background
from nemo_rl.utils.errors import ConfigError
from nemo_rl.utils.imports import import_dotted
from nemo_rl.utils.named_parts import fitting_arguments

logger = logging.getLogger(__name__)

_ADVICE = "Give the dotted path of a function of an AgentTask, or of a class whose objects are called with one."


class CallableProgram(AgentProgram):
    """A function that is called for each task, on the event loop if it is a coroutine function, or else on a thread.

    Args:
        path: dotted path of the function, or of a class whose objects are callable.
        kwargs: further arguments of the function, or arguments of the class.

    Raises:
        ConfigError: the function or class cannot be imported or called, or the arguments do not fit.
    """

    def __init__(self, path: str, kwargs: Mapping[str, Any]) -> None:
        self._name = path
        found, fitting = find_program(path, kwargs)
        self._call: Callable[..., Any] = found
        self._kwargs = fitting
        if inspect.isclass(found):
            made: Any = found(**fitting)
            self._call, self._kwargs = made.__call__, {}
        self._is_async = inspect.iscoroutinefunction(self._call)

    @override
    async def run(self, task: AgentTask) -> AgentResult:
        running = asyncio.ensure_future(self._outcome(task))
        try:
            done, _ = await asyncio.wait({running}, timeout=task.timeout_s)
        finally:
            running.cancel()  # cancelled without waiting, because a function may catch the cancellation
        if not done:
            if not self._is_async:
                logger.warning("%s still runs after its deadline; its result is ignored", self._name)
            raise too_slow(task)
        value, error = running.result()
        if error is not None:
            raise AgentError(error)
        with Boundary(BaseException) as caught:  # the returned value may be of the user's own class
            return read_result(value)
        problem = caught.take()
        if isinstance(problem, ValueError):
            raise AgentError(f"the program {self._name} failed: {problem}")
        raise AgentError(f"the value of the program {self._name} cannot be read: {describe(problem)}")

    async def shutdown(self) -> None:
        """Call the method `shutdown` of the program if the program is an object with such a method."""
        owner = self._call.__self__ if inspect.ismethod(self._call) else None
        released = owner.shutdown() if hasattr(owner, "shutdown") and not inspect.isclass(owner) else None
        if inspect.isawaitable(released):
            await released

    async def _outcome(self, task: AgentTask) -> tuple[Any, str | None]:
        """Return the function's result and None, or None and the text of its error.

        Exceptions are not raised, because some of them would end the event loop.
        """
        with Boundary(BaseException) as caught:  # the program is the user's own code
            if self._is_async:
                return await self._call(task, **self._kwargs), None
            thread = in_background(lambda: self._returned(task), f"agent {self._name}")
            value, error = await asyncio.shield(asyncio.wrap_future(thread))  # a thread cannot be cancelled
            return (await value if inspect.isawaitable(value) else value), error
        return None, _described(caught.take())

    def _returned(self, task: AgentTask) -> tuple[Any, str | None]:
        with Boundary(BaseException) as caught:  # the program is the user's own code
            return self._call(task, **self._kwargs), None
        return None, _described(caught.take())


def find_program(path: str, kwargs: Mapping[str, Any]) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Import a program, and check that it can be called with a task. Nothing is constructed.

    Returns:
        A function and its arguments besides the task, or a class and the arguments of its constructor.

    Raises:
        ConfigError: as in `CallableProgram`.
    """
    what = f"env.agent.program={path!r}"
    found = import_dotted(path, ConfigError, what, _ADVICE)
    if inspect.isclass(found):
        if not any("__call__" in vars(base) for base in found.__mro__):
            raise ConfigError(f"{what} is a class whose objects cannot be called. {_ADVICE}")
        fitting = fitting_arguments(found, "env.agent.kwargs", kwargs)
        _check_arguments(found.__call__, (None, None), {}, what)
        return found, fitting
    if not callable(found):
        raise ConfigError(f"{what} cannot be called. {_ADVICE}")
    call = found if inspect.isroutine(found) else found.__call__
    _check_arguments(call, (None,), kwargs, what)
    return call, kwargs


def _check_arguments(call: Callable[..., Any], given: tuple[None, ...], kwargs: Mapping[str, Any], what: str) -> None:
    """Check that a function can be called with the arguments `given`, of which the task is the last, and `kwargs`."""
    try:
        signature = inspect.signature(call)
    except ValueError:  # a C function without a signature
        return
    try:
        signature.bind(*given, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{what} cannot be called with a task and kwargs={dict(kwargs)}: {error}. {_ADVICE}"
        ) from None


def _described(error: BaseException) -> str:
    return f"the program raised {describe(error)}"
