"""Checks of a job's paths before anything is opened for writing, and the lock of an output."""

import enum
import fcntl
import os
import stat
import sys
from pathlib import Path

from zeroinfer.errors import ConfigError, StorageError
from zeroinfer.log import get_logger

__all__ = [
    "OutputMode",
    "check_output",
    "is_stream",
    "journal_path",
    "open_locked",
    "refuse_same_file",
    "sync_folder",
]

_logger = get_logger(__name__)


class OutputMode(enum.Enum):
    """What may become of an output that is already there."""

    NEW = "new"
    RESUME = "resume"
    OVERWRITE = "overwrite"


def journal_path(output: Path) -> Path:
    """Return where the journal of an output lies."""
    return output.parent / f"{output.name}.journal"


def is_stream(path: Path) -> bool:
    """Whether the path is a device or pipe, which cannot be resumed or cut back."""
    return path.exists() and not path.is_file()


def check_output(output: str, *, input_path: str | None, mode: OutputMode) -> Path:
    """Resolve the output's path and refuse it where writing would destroy data.

    Symbolic links are followed, so that one file has one journal whatever name it goes by.

    Raises:
        ConfigError: the output is the input, or exists and `mode` is NEW.
        StorageError: the output is a folder, or its folder is missing.
    """
    path = Path(os.path.realpath(output))
    try:
        is_folder, has_folder = path.is_dir(), path.parent.is_dir()
    except OSError as error:
        raise StorageError(f"output {output} cannot be looked at: {error.strerror}") from error
    if input_path is not None:
        refuse_same_file("output", path, "input", input_path)
        refuse_same_file("journal of the output", journal_path(path), "input", input_path)
    if is_folder:
        raise StorageError(f"output {output} is a folder; name a file")
    if not has_folder:
        raise StorageError(f"output {output}: folder {path.parent} does not exist; create it")
    if mode is OutputMode.NEW and path.is_file():
        raise ConfigError(
            f"output {output} exists; use --resume to go on with it or --overwrite to replace it"
        )
    return path


def refuse_same_file(role: str, path: Path, other_role: str, other: str) -> None:
    """Refuse two names of one file: the same path, a symbolic link or a hard link.

    Args:
        role: what `path` is to be, for the message.
        path: a file that will be written.
        other_role: what `other` is.
        other: a file that will be read; ``-`` is standard input, as redirected by the shell.

    Raises:
        ConfigError: both are one file.
    """
    other_path = None if other == "-" else Path(os.path.realpath(other))
    own = _identity(path)
    if path == other_path or (own is not None and own == _identity(other_path)):
        raise ConfigError(
            f"{role} {path} is the {other_role} {other} itself; choose another output"
        )


def _identity(path: Path | None) -> tuple[int, int] | None:
    """Return device and inode; None stands for standard input."""
    try:
        status = os.fstat(sys.stdin.fileno()) if path is None else path.stat()
    except (OSError, ValueError):
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def open_locked(path: Path) -> int:
    """Open a journal for appending and take its lock, which lasts until the descriptor closes.

    Raises:
        ConfigError: another process holds the lock.
        StorageError: the file cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StorageError(f"journal {path} cannot be written: {error.strerror}") from error
    try:
        _lock(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(fd: int, path: Path) -> None:
    busy = ConfigError(
        f"another run is writing the output of journal {path}; wait for it or choose another output"
    )
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise busy from None
    except OSError as error:
        _logger.warning("no lock on %s: %s; start no second run on it", path, error.strerror)
    # A run that ended between our open and our lock has removed the file we opened.
    if _identity(path) != (os.fstat(fd).st_dev, os.fstat(fd).st_ino):
        raise busy


def sync_folder(folder: Path) -> None:
    """Make the names of new files in a folder durable; file systems that cannot are let be."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        _logger.debug("fsync of folder %s: %s", folder, error.strerror)
    finally:
        os.close(fd)
