"""Every exception a user can meet.

    ZeroInferError
    |-- ConfigError (ValueError)         a flag, a config key or a combination of them is wrong
    |-- CapacityError                    the job does not fit the memory or disk it is given
    |-- CheckpointError (ValueError)     a model's files are missing, cut or contradictory
    |   `-- UnsupportedModelError        a valid model that zeroinfer cannot run
    |-- StorageError (OSError)           a read or write failed, or a folder cannot be used
    |-- BackendUnavailableError          something asked for by name is not available here
    `-- RequestError (ValueError)        one row of a job is bad; the others go on

Messages have one form: what was wrong with which thing: got X, need Y; do Z. The command line
prints the message alone and ends with the class's exit code.
"""

__all__ = [
    "BackendUnavailableError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "RequestError",
    "StorageError",
    "UnsupportedModelError",
    "ZeroInferError",
]


class ZeroInferError(Exception):
    """Base of all errors that carry a message for the user."""

    exit_code = 1


class ConfigError(ZeroInferError, ValueError):
    """A flag, a config key or a combination of them is wrong."""

    exit_code = 2


class CapacityError(ZeroInferError):
    """The job does not fit the memory or disk it is given."""

    exit_code = 3


class CheckpointError(ZeroInferError, ValueError):
    """Files of a model are missing, cut short or contradict each other."""

    exit_code = 4


class UnsupportedModelError(CheckpointError):
    """A valid model that zeroinfer cannot run."""


class StorageError(ZeroInferError, OSError):
    """A read or write failed, or a folder cannot be used."""

    exit_code = 4


class BackendUnavailableError(ZeroInferError):
    """Something asked for by name is not installed or not allowed here."""

    exit_code = 2


class RequestError(ZeroInferError, ValueError):
    """One row of a job is bad; the others go on."""

    exit_code = 5
