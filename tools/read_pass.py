"""Read the weights of a model as fast as the reader can and do nothing with them.

The yardstick for a streamed step: the same number of bytes of the same files, through the same
reader with the same chunk size and depth, into a prefaulted ring, without computing. Several
passes run back to back and the queue never drains between them, as it does not between the steps
of an engine; a pass is timed from the completion of the one before it.

    python tools/read_pass.py MODEL_DIR --io-chunk-bytes 1MiB --queue-depth 4 [--pass-bytes N]
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroinfer.memory import Arena
from zeroinfer.native import DIRECT_ALIGNMENT, OpenFile, Reader, ReadTicket, ThreadReader
from zeroinfer.units import MIB, align_down, align_up, parse_bytes

__all__ = ["Segment", "plan_pass", "read_passes"]

_MIN_SLOT_BYTES = 16 * MIB
_NUM_SLOTS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One read: a range of one file, aligned for direct I/O."""

    path: Path
    offset: int
    num_bytes: int
    required_bytes: int


def weight_files(model: Path) -> list[Path]:
    """Files that hold weights, in the order of their names."""
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise SystemExit(f"no *.safetensors in {model}; give the folder of a checkpoint")
    return files


def plan_pass(files: list[Path], pass_bytes: int | None, slot_bytes: int) -> list[Segment]:
    """Spread `pass_bytes` over the files in proportion to their sizes, in slot-sized reads.

    The total is exact up to one block of padding; more bytes than the files hold wrap around.
    """
    sizes = {path: path.stat().st_size for path in files}
    total = sum(sizes.values())
    remaining = total if pass_bytes is None else pass_bytes
    if total == 0 or remaining <= 0:
        raise SystemExit(f"nothing to read: {remaining} bytes of {total} in {len(files)} files")
    segments: list[Segment] = []
    while remaining > 0:
        share = min(1.0, remaining / total)
        for path, size in sizes.items():
            wanted = min(size, remaining, align_up(int(size * share), DIRECT_ALIGNMENT))
            segments += _split(path, wanted, slot_bytes)
            remaining -= wanted
    return segments


def _split(path: Path, num_bytes: int, slot_bytes: int) -> Iterator[Segment]:
    for offset in range(0, num_bytes, slot_bytes):
        required = min(slot_bytes, num_bytes - offset)
        aligned = align_up(required, DIRECT_ALIGNMENT)
        yield Segment(path=path, offset=offset, num_bytes=aligned, required_bytes=required)


def read_passes(
    reader: Reader,
    segments: list[Segment],
    *,
    slot_bytes: int,
    num_passes: int | None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[float]:
    """Read the segments `num_passes` times (None: until stopped) and time each pass.

    Returns:
        Seconds of each complete pass.
    """
    lane = _Lane.create(reader, segments, slot_bytes=slot_bytes)
    for segment, is_last in _endless(segments, num_passes):
        if is_stopped():
            break
        lane.submit(segment, is_last)
    lane.drain()
    return lane.times_s


@dataclass(slots=True)
class _Lane:
    """A ring of slots that are read into in turn."""

    reader: Reader
    files: dict[Path, OpenFile]
    slots: deque[memoryview]
    start_s: float
    times_s: list[float] = field(default_factory=list)
    inflight: deque[tuple[ReadTicket, memoryview, bool]] = field(default_factory=deque)

    @classmethod
    def create(cls, reader: Reader, segments: list[Segment], *, slot_bytes: int) -> "_Lane":
        ring_bytes = _NUM_SLOTS * slot_bytes
        # The engine's own kind of memory: direct reads into small pages took twice as long.
        arena = Arena.create(ring_bytes, name="ring", is_prefaulted=True)
        ring = arena.view(0, ring_bytes)
        slots = (ring[start : start + slot_bytes] for start in range(0, ring_bytes, slot_bytes))
        files = {segment.path: reader.open_file(segment.path) for segment in segments}
        return cls(reader=reader, files=files, slots=deque(slots), start_s=time.perf_counter())

    def submit(self, segment: Segment, is_last: bool) -> None:
        if not self.slots:
            self.finish_oldest()
        slot = self.slots.popleft()
        ticket = self.reader.submit(
            self.files[segment.path],
            segment.offset,
            slot[: segment.num_bytes],
            required_bytes=segment.required_bytes,
        )
        self.inflight.append((ticket, slot, is_last))

    def finish_oldest(self) -> None:
        ticket, slot, is_last = self.inflight.popleft()
        self.reader.wait(ticket)
        self.slots.append(slot)
        if is_last:
            now_s = time.perf_counter()
            self.times_s.append(now_s - self.start_s)
            self.start_s = now_s

    def drain(self) -> None:
        while self.inflight:
            self.finish_oldest()


def _endless(segments: list[Segment], num_passes: int | None) -> Iterator[tuple[Segment, bool]]:
    done = 0
    while num_passes is None or done < num_passes:
        for segment in segments:
            yield segment, segment is segments[-1]
        done += 1


def slot_bytes_for(io_chunk_bytes: int, queue_depth: int, ring_bytes: int | None) -> int:
    """Bytes of one of the ring's slots: enough for the whole queue to be busy with one."""
    if ring_bytes is not None:
        return max(io_chunk_bytes, align_down(ring_bytes // _NUM_SLOTS, DIRECT_ALIGNMENT))
    return max(io_chunk_bytes * queue_depth, align_up(_MIN_SLOT_BYTES, io_chunk_bytes))


def add_reader_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of every program that reads in the way of the engine."""
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--pass-bytes", type=parse_bytes, help="bytes of one pass (all)")
    parser.add_argument("--io-chunk-bytes", type=parse_bytes, required=True)
    parser.add_argument("--queue-depth", type=int, required=True)
    parser.add_argument("--ring-bytes", type=parse_bytes, help="bytes to read into")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_reader_arguments(parser)
    parser.add_argument("--passes", type=int, default=3)
    args = parser.parse_args()
    slot_bytes = slot_bytes_for(args.io_chunk_bytes, args.queue_depth, args.ring_bytes)
    segments = plan_pass(weight_files(args.model), args.pass_bytes, slot_bytes)
    reader = ThreadReader.open(io_chunk_bytes=args.io_chunk_bytes, queue_depth=args.queue_depth)
    try:
        times_s = read_passes(reader, segments, slot_bytes=slot_bytes, num_passes=args.passes)
        is_direct = all(reader.open_file(segment.path).is_direct for segment in segments)
    finally:
        reader.close()
    result: dict[str, Any] = {
        "pass_s": times_s,
        "bytes_per_pass": sum(segment.required_bytes for segment in segments),
        "bytes_read": reader.counters.bytes_read,
        "is_direct": is_direct,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
