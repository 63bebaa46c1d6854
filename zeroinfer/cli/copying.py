"""Copies under ``--nvme``: the flags' help, and the line that offers a copy where it would pay."""

from collections.abc import Sequence
from pathlib import Path

from zeroinfer.cli.console import Output
from zeroinfer.cli.model import OpenedModel
from zeroinfer.profiling import find_profile
from zeroinfer.units import format_bytes

__all__ = ["COPY_HELP", "STRIPE_HELP", "lies_elsewhere", "offer_copy", "show_offer"]

COPY_HELP = (
    "Copy the model under --nvme first, verified and resumable, in --dtype if that is given, and "
    "use the copy. A later run finds it."
)
STRIPE_HELP = (
    "Spread the store over all --nvme folders, so that it is read from all their disks at once."
)
_WORTHWHILE = 1.5
"""Copying reads the model once and writes it once; a smaller gain is within a disk's moods."""


def show_offer(opened: OpenedModel, output: Output) -> None:
    """Print the offer of `offer_copy`, if there is one."""
    offer = offer_copy(opened)
    if offer is not None:
        output.text(offer)
        output.event("note", {"text": offer})


def offer_copy(opened: OpenedModel) -> str | None:
    """Offer ``--copy`` if the folder's disk was measured much faster than the model's.

    Returns:
        None if a disk was not measured, or there is nothing to gain. Nothing is measured here.
    """
    folder, reader = opened.config.io.nvme[0], opened.config.io.reader
    if not lies_elsewhere(folder, opened.checkpoint.files):
        return None
    here = find_profile(folder, opened.checkpoint.files, reader=reader)
    there = find_profile(folder, [folder], reader=reader)
    if here is None or there is None:
        return None
    rate, better = here.nvme_read_bytes_per_s, there.nvme_read_bytes_per_s
    if better < _WORTHWHILE * rate:
        return None
    return (
        f"note: the model lies on {here.filesystem} ({rate / 1e9:.2f} GB/s), --nvme {folder} on "
        f"{there.filesystem} ({better / 1e9:.2f} GB/s); --copy makes a verified copy of "
        f"{format_bytes(opened.checkpoint.total_bytes)} there and streams from it"
    )


def lies_elsewhere(folder: Path, files: Sequence[Path]) -> bool:
    """Whether all weight files lie on other file systems than the --nvme folder."""
    device = folder.stat().st_dev
    return all(path.stat().st_dev != device for path in files)
