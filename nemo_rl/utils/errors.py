"""The library's error tree.

Every error a user can meet derives from `NemoRLError` and from the matching built-in, so both `except NemoRLError` and
`except ValueError` work. Invariant: each error carries only its message, so it survives pickling on its way out of a
Ray worker.
"""

import os
from typing import ClassVar


class NemoRLError(Exception):
    """Base of every error raised on purpose by nemo_rl.

    Attributes:
        exit_status: of a program that ends with it.
    """

    exit_status: ClassVar[int] = 1


class ConfigError(NemoRLError, ValueError):
    """A configuration value is missing, unknown, mistyped or contradicts another one."""

    exit_status = 2


class NotBuiltError(NemoRLError, ModuleNotFoundError):
    """A name of NeMo RL that this library does not have: its feature is not built yet, or it is under another name."""

    exit_status = 2


class DataError(NemoRLError, ValueError):
    """A data set, a row or a batch cannot be used as asked."""

    exit_status = 2


class ResourceInsufficientError(NemoRLError, RuntimeError):
    """The Ray cluster does not have what the configuration asks for."""


class VenvError(NemoRLError, RuntimeError):
    """The Python environment of a kind of worker cannot be made or used on a node."""


class DeadlineExceededError(NemoRLError, TimeoutError):
    """A wait ran past its deadline; the message names phase, worker, rank and node."""


class WorkerDiedError(NemoRLError, RuntimeError):
    """A worker process ended unexpectedly; the message holds its rank and last log lines."""


class NodeLostError(WorkerDiedError):
    """A machine of the cluster is gone; the message holds its address, its id and what ran there."""


class RayDiedError(NemoRLError, RuntimeError):
    """The Ray of a run has lost a process without which nothing can go on."""


class WeightSyncError(NemoRLError, RuntimeError):
    """Weights did not arrive, or not as they were sent."""


class CheckpointError(NemoRLError, RuntimeError):
    """A checkpoint cannot be written or read."""


class GenerationError(NemoRLError, RuntimeError):
    """A generation engine refused or failed a request."""


class NothingToLearnError(NemoRLError, RuntimeError):
    """Nothing that was sampled or read counts in the loss, again and again."""


class NonFiniteError(NemoRLError, ArithmeticError):
    """Weights, gradients or scores hold NaN or infinity; the message names the tensors."""


class RunInterruptedError(NemoRLError, RuntimeError):
    """A signal ended the run in order, and its state is saved: the same command goes on."""

    exit_status = os.EX_TEMPFAIL
