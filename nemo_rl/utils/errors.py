"""The library's error tree.

Every error a user can meet derives from `NemoRLError` and from the matching built-in, so both
`except NemoRLError` and `except ValueError` work. Law: each error carries only its message, so it
survives pickling on its way out of a Ray worker.
"""


class NemoRLError(Exception):
    """Base of every error raised on purpose by nemo_rl."""


class ConfigError(NemoRLError, ValueError):
    """A configuration value is missing, unknown, mistyped or contradicts another one."""


class DataError(NemoRLError, ValueError):
    """A data set, a row or a batch cannot be used as asked."""


class ResourceInsufficientError(NemoRLError, RuntimeError):
    """The Ray cluster does not have what the configuration asks for."""


class DeadlineExceededError(NemoRLError, TimeoutError):
    """A wait ran past its deadline; the message names phase, worker, rank and node."""


class WorkerDiedError(NemoRLError, RuntimeError):
    """A worker process ended unexpectedly; the message holds its rank and last log lines."""


class RayDiedError(NemoRLError, RuntimeError):
    """The Ray that a run started for itself has lost one of its own processes; nothing can go on."""


class WeightSyncError(NemoRLError, RuntimeError):
    """Weights did not arrive, or not as they were sent."""


class CheckpointError(NemoRLError, RuntimeError):
    """A checkpoint cannot be written or read."""


class GenerationError(NemoRLError, RuntimeError):
    """A generation engine refused or failed a request."""
