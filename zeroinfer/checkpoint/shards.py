"""Safetensors shards of a store: which tensor goes where, and writing one file.

safetensors forbids holes between tensors, so alignment comes from order alone. The header is
padded with spaces until the data begins at a multiple of 4096; then come the tensors whose size
is a multiple of 4096, in the order given, and after them the rest. Every matrix of a usual model
is such a multiple, and with a hidden size of 2048 or more so is every norm in 16 bits: the order
of use is then kept exactly. The small vectors of smaller models end up behind their shard's
matrices, each one short read away.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from zeroinfer.dtypes import TensorSpec
from zeroinfer.units import MIB, align_up, ceil_div

__all__ = [
    "ALIGNMENT",
    "INDEX_NAME",
    "METADATA_KEY",
    "Shard",
    "TensorSource",
    "default_shard_bytes",
    "index_document",
    "plan_shards",
    "write_shard",
]

ALIGNMENT = 4096
METADATA_KEY = "__metadata__"
"""Stands among the tensors in a header, so that none can be called so."""
INDEX_NAME = "model.safetensors.index.json"
_MIN_SHARD_BYTES = 128 * MIB
_MAX_NUM_SHARDS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource:
    """A tensor to be written and where its values come from."""

    spec: TensorSpec
    read: Callable[[], Iterable[npt.NDArray[Any]]]
    """Yields the rows in order in pieces of any number of rows; BF16 as uint16. Views and
    transposed arrays may be given: each is written as if it were contiguous."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file to be written: its name, tensors in file order, and finished header."""

    name: str
    sources: tuple[TensorSource, ...]
    header: bytes
    stripe: int = 0
    """Which of the folders it lies in."""

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(source.spec.nbytes for source in self.sources)


def default_shard_bytes(total_bytes: int) -> int:
    """Return a shard size giving at most about 64 files, none but the last under 128 MiB.

    Small shards lose little work to a kill; many would exhaust the reader's open files.
    """
    return max(_MIN_SHARD_BYTES, ceil_div(total_bytes, _MAX_NUM_SHARDS))


def plan_shards(
    sources: Sequence[TensorSource], *, shard_bytes: int, num_stripes: int = 1
) -> tuple[Shard, ...]:
    """Cut the tensors, in the order given, into files of about shard_bytes.

    A tensor is never split; one larger than shard_bytes has a file of its own. With several
    stripes each tensor goes to the one with the fewest bytes so far, so that any stretch of a pass
    finds its bytes on all of them, level to one tensor.
    """
    position = {source.spec.name: idx for idx, source in enumerate(sources)}
    groups = [
        (stripe, group)
        for stripe, part in enumerate(_spread(sources, num_stripes))
        for group in _group(part, shard_bytes)
    ]
    groups.sort(key=lambda item: position[item[1][0].spec.name])
    return tuple(
        _shard(f"model-{idx + 1:05}-of-{len(groups):05}.safetensors", group, stripe)
        for idx, (stripe, group) in enumerate(groups)
    )


def index_document(shards: Sequence[Shard]) -> bytes:
    """Return the index that maps every tensor name to its file."""
    weight_map = {s.spec.name: shard.name for shard in shards for s in shard.sources}
    total = sum(source.spec.nbytes for shard in shards for source in shard.sources)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2).encode() + b"\n"


def write_shard(shard: Shard, path: Path, *, progress: Callable[[int], None]) -> str:
    """Write one file and return its SHA-256; the data is not yet flushed to the disk.

    Args:
        shard: what to write.
        path: where; an existing file is overwritten.
        progress: called with the number of bytes just written.
    """
    digest = hashlib.sha256(shard.header)
    with path.open("wb", buffering=0) as file:
        _write_all(file, memoryview(shard.header))
        progress(len(shard.header))
        for source in shard.sources:
            for piece in _pieces(source):
                _write_all(file, piece)
                digest.update(piece)
                progress(len(piece))
    return digest.hexdigest()


def _spread(sources: Sequence[TensorSource], num_stripes: int) -> list[list[TensorSource]]:
    parts: list[list[TensorSource]] = [[] for _ in range(num_stripes)]
    sizes = [0] * num_stripes
    for source in sources:
        stripe = sizes.index(min(sizes))
        parts[stripe].append(source)
        sizes[stripe] += source.spec.nbytes
    return parts


def _group(sources: Sequence[TensorSource], shard_bytes: int) -> Iterator[list[TensorSource]]:
    group: list[TensorSource] = []
    size = 0
    for source in sources:
        if group and size + source.spec.nbytes > shard_bytes:
            yield group
            group, size = [], 0
        group.append(source)
        size += source.spec.nbytes
    if group:
        yield group


def _shard(name: str, group: Sequence[TensorSource], stripe: int) -> Shard:
    # Wider elements first among the rest, so that each tensor begins at a multiple of its element.
    ordered = sorted(group, key=lambda s: (s.spec.nbytes % ALIGNMENT != 0,
                                           -s.spec.dtype.itemsize if s.spec.nbytes % ALIGNMENT
                                           else 0))  # fmt: skip
    return Shard(name=name, sources=tuple(ordered), header=_header(ordered), stripe=stripe)


def _header(sources: Sequence[TensorSource]) -> bytes:
    entries: dict[str, Any] = {METADATA_KEY: {"format": "pt"}}
    offset = 0
    for source in sources:
        spec = source.spec
        entries[spec.name] = {"dtype": spec.dtype.value, "shape": list(spec.shape),
                              "data_offsets": [offset, offset + spec.nbytes]}  # fmt: skip
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = align_up(8 + len(text), ALIGNMENT) - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def _pieces(source: TensorSource) -> Iterator[memoryview]:
    written = 0
    for rows in source.read():
        assert rows.dtype.itemsize == source.spec.dtype.itemsize, (source.spec, rows.dtype)
        piece = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        written += len(piece)
        yield piece
    assert written == source.spec.nbytes, (source.spec, written)


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while len(data):
        # A disk that fills up in the middle first writes less than asked.
        data = data[file.write(data) :]
