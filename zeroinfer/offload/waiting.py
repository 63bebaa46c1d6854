"""Waiting for several reads as one."""

from collections.abc import Sequence

from zeroinfer.errors import StorageError
from zeroinfer.native import Reader, ReadTicket

__all__ = ["wait_all"]


def wait_all(reader: Reader, tickets: Sequence[ReadTicket]) -> None:
    """Wait until none of the reads is in flight, so that their memory may be used again.

    Raises:
        StorageError: a read failed; the first failure in order.
    """
    failures = []
    for ticket in tickets:
        try:
            reader.wait(ticket)
        except StorageError as error:
            failures.append(error)
    try:
        if failures:
            raise failures[0]
    finally:
        # A frame that refers to what it raised stays until the garbage collector comes.
        failures.clear()
