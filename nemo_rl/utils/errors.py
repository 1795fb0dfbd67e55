"""Define the library's error classes.

Every error a user can meet derives from `NemoRLError` and from the matching built-in, so both `except NemoRLError` and
`except ValueError` work. Invariant: each error carries only its message, so it can be pickled when it leaves a Ray
worker.
"""

import difflib
import os
from collections.abc import Iterable
from typing import ClassVar


class NemoRLError(Exception):
    """Base of every error that nemo_rl raises on purpose."""

    exit_status: ClassVar[int] = 1
    """Exit status of a program that ends with this error."""


class ConfigError(NemoRLError, ValueError):
    """A configuration value is missing, unknown, mistyped or contradicts another one."""

    exit_status = 2


class NotBuiltError(NemoRLError, ModuleNotFoundError):
    """A name of NeMo RL that this library lacks: its feature is not built yet, or it has another name here."""

    exit_status = 2


class DataError(NemoRLError, ValueError):
    """A data set, a row or a batch cannot be used as requested."""

    exit_status = 2


class ReplayError(NemoRLError, RuntimeError):
    """A recorded step cannot be repeated, for the reason in the message."""

    exit_status = 2


class ResourceInsufficientError(NemoRLError, RuntimeError):
    """The Ray cluster lacks the resources that the configuration requests."""


class VenvError(NemoRLError, RuntimeError):
    """The Python environment of a kind of worker cannot be made or used on a node."""


class SandboxError(NemoRLError, RuntimeError):
    """This machine cannot lock programs up, or a sandbox failed, so that the program of the message did not run."""


class DeadlineExceededError(NemoRLError, TimeoutError):
    """A wait ran past its deadline, with phase, worker, rank and node in the message."""


class WorkerDiedError(NemoRLError, RuntimeError):
    """A worker process ended unexpectedly, with its rank and last log lines in the message."""


class NodeLostError(WorkerDiedError):
    """A machine of the cluster is lost, with its address, its id and the workers that ran there in the message."""


class RunRestartError(NemoRLError, RuntimeError):
    """Ranks died or hung more often than the run restarts its models, with the causes in the message."""


class RayDiedError(NemoRLError, RuntimeError):
    """The Ray of a run has lost a process without which the run cannot continue."""


class WeightSyncError(NemoRLError, RuntimeError):
    """Weights did not arrive, or arrived with other content than was sent."""


class DownloadError(NemoRLError, ConnectionError):
    """Files of a model or a data set did not arrive from the hub, with the hub's answer in the message."""


class CheckpointError(NemoRLError, RuntimeError):
    """A checkpoint cannot be written or read."""


class GenerationError(NemoRLError, RuntimeError):
    """A generation engine refused or failed a request."""


class EndpointUnusableError(NemoRLError, RuntimeError):
    """The endpoint of a model refuses the run itself, not one of its requests: key, model name or address are wrong."""


class NoAnswerError(NemoRLError, RuntimeError):
    """The endpoint of a model gave no answer to one request, so the sample of the request has none.

    Args:
        message: what happened.
        is_too_long: the conversation has no room left in the model's context.
        is_refused: the endpoint has refused this request, and would refuse it again.
        is_withheld: the endpoint has refused to show the answer, so the request itself is not wrong.
    """

    def __init__(
        self, message: str, *, is_too_long: bool = False, is_refused: bool = False, is_withheld: bool = False
    ) -> None:
        super().__init__(message)
        self.is_too_long = is_too_long
        self.is_refused = is_refused
        self.is_withheld = is_withheld


class NothingToLearnError(NemoRLError, RuntimeError):
    """No sampled or read token counts in the loss, for several steps in a row."""


class NonFiniteError(NemoRLError, ArithmeticError):
    """Weights, gradients or scores hold NaN or infinity, with the names of the tensors in the message."""


class RunInterruptedError(NemoRLError, RuntimeError):
    """A signal ended the run in order and with its state saved, so that the same command continues it."""

    exit_status = os.EX_TEMPFAIL


_OTHER_WORDS = {"learning_rate": "lr", "beta1": "betas", "beta2": "betas", "epsilon": "eps", "decay": "weight_decay"}
"""Arguments of other libraries whose names differ from the names here."""


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ` Did you mean '<nearest>'?`, or an empty text if no known name is similar.

    Args:
        known: the allowed names.
        cutoff: minimum similarity of two names, from 0 to 1.
    """
    names = list(known)
    near = [other for other in (_OTHER_WORDS.get(name),) if other in names]
    near += difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""
