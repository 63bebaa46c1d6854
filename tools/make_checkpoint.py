"""Write a checkpoint of random weights in the Hugging Face layout, at the disk's speed.

    python tools/make_checkpoint.py --family llama --geometry llama-7b --dtype bf16 --out DIR

For measurements: the folder loads like a real one and its texts are nonsense. One block of normal
numbers is drawn once and every tensor starts at its own place in it, so that a model of any size
costs one copy per byte and a few hundred MiB of memory. Pages go past the page cache. The folder
appears under its name only when it is complete. With --share-layers all decoder layers take the
bytes of one, on file systems whose files can share them.
"""

import argparse
import hashlib
import json
import mmap
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from geometries import FAMILIES, GEOMETRIES, resolve_config, tensor_specs
from reflink import Clone, clone_to_end, require_reflink
from shards import Shard, split_layers, split_shards

from zeroinfer.dtypes import DType, TensorSpec
from zeroinfer.errors import CapacityError, ConfigError, StorageError, ZeroInferError
from zeroinfer.units import MIB, align_up, format_bytes, parse_bytes

# No multiple of any row length, so that the rows of a matrix larger than the block still differ.
BLOCK_ELEMENTS = (1 << 25) - 39
STD = 0.02
WRITE_BYTES = 16 * MIB
DIRECT_ALIGNMENT = 4096
PROGRESS_S = 1.0
# Metadata (configs, index, file system blocks) beside the weights.
SPARE_BYTES = 16 * MIB
TORCH_NAMES = {DType.BF16: "bfloat16", DType.F16: "float16", DType.F32: "float32"}


class RandomBytes:
    """Yields a tensor's bytes as views of one block of random numbers."""

    def __init__(self, dtype: DType, *, seed: int, num_elements: int) -> None:
        self._dtype = dtype
        self._seed = seed
        size = min(BLOCK_ELEMENTS, num_elements | 1)
        normals = np.random.default_rng(seed).standard_normal(size, dtype=np.float32)
        normals *= STD
        self._block = _encode(normals, dtype).view(np.uint8)

    def pieces(self, spec: TensorSpec) -> Iterator[np.ndarray]:
        """Yield the bytes of a tensor: ones for norms, else normals from the tensor's own place."""
        if _is_norm(spec):
            yield _encode(np.ones(spec.num_elements, np.float32), self._dtype).view(np.uint8)
            return
        digest = hashlib.sha256(f"{self._seed} {spec.name}".encode()).digest()
        num_places = len(self._block) // self._dtype.itemsize
        start = int.from_bytes(digest[:8], "little") % num_places * self._dtype.itemsize
        left_bytes = spec.nbytes
        while left_bytes > 0:
            piece = self._block[start : start + left_bytes]
            yield piece
            left_bytes -= len(piece)
            start = 0


def _is_norm(spec: TensorSpec) -> bool:
    return len(spec.shape) == 1 and spec.name.endswith(".weight")


def _encode(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Round float32 to an element type; bf16 comes as its bits."""
    if dtype is DType.F32:
        return values
    if dtype is DType.F16:
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    # In slices: the temporaries of the whole block would be larger than the block.
    rounded = np.empty(bits.shape, np.uint16)
    for start in range(0, len(bits), MIB):
        part = bits[start : start + MIB]
        rounded[start : start + MIB] = (part + 0x7FFF + ((part >> 16) & 1)) >> 16
    return rounded


class UncachedFile:
    """Writes a file front to back past the page cache.

    Bytes collect in an aligned buffer that goes out with O_DIRECT; where the file system refuses
    that, buffered, synced and dropped from the page cache at once.
    """

    def __init__(self, fd: int, *, is_direct: bool) -> None:
        self._fd = fd
        self._is_direct = is_direct
        self._staging = np.frombuffer(mmap.mmap(-1, WRITE_BYTES), np.uint8)
        self._fill = 0
        self.num_bytes = 0

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create the file, which must not exist."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return cls(os.open(path, flags | os.O_DIRECT, 0o644), is_direct=True)
        except FileExistsError:
            raise
        except OSError:
            # A file system may create the file before it refuses the flag.
            path.unlink(missing_ok=True)
            return cls(os.open(path, flags, 0o644), is_direct=False)

    def write(self, data: np.ndarray) -> None:
        """Append bytes."""
        while len(data):
            room = data[: WRITE_BYTES - self._fill]
            self._staging[self._fill : self._fill + len(room)] = room
            self._fill += len(room)
            self.num_bytes += len(room)
            data = data[len(room) :]
            if self._fill == WRITE_BYTES:
                self._flush(WRITE_BYTES)

    def finish(self) -> None:
        """Write the rest, cut the padding off and make the file durable."""
        self._flush(align_up(self._fill, DIRECT_ALIGNMENT))
        os.ftruncate(self._fd, self.num_bytes)
        os.fsync(self._fd)

    def _flush(self, length: int) -> None:
        staged = self._staging[:length].data
        while staged:
            # A direct write may stop early, but only at a block.
            staged = staged[os.write(self._fd, staged) :]
        self._fill = 0
        if not self._is_direct:
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._fd)


class Progress:
    """Says on standard error how far the writing is, about once a second."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._start_s = self._said_s = time.monotonic()
        self._done_bytes = 0

    def add(self, num_bytes: int, name: str) -> None:
        self._done_bytes += num_bytes
        if time.monotonic() - self._said_s > PROGRESS_S:
            self.say(name)

    def say(self, name: str) -> None:
        self._said_s = time.monotonic()
        rate_gb_s = self._done_bytes / max(self._said_s - self._start_s, 1e-9) / 1e9
        print(
            f"{name}: {self._done_bytes / 1e9:.2f} of {self._total_bytes / 1e9:.2f} GB, "
            f"{rate_gb_s:.2f} GB/s",
            file=sys.stderr,
        )


def write_shard(folder: Path, shard: Shard, source: RandomBytes, progress: Progress) -> None:
    with UncachedFile.create(folder / shard.name) as file:
        file.write(np.frombuffer(shard.header(), np.uint8))
        for spec in shard.specs if shard.shares is None else ():
            for piece in source.pieces(spec):
                file.write(piece)
                progress.add(len(piece), shard.name)
        file.finish()


def share_data(folder: Path, shards: list[Shard], clone: Clone) -> None:
    """Give each file that has a header only the data of the file it shares."""
    data_starts = {shard.name: len(shard.header()) for shard in shards}
    for shard in shards:
        if shard.shares is not None:
            clone(
                folder / shard.shares, data_starts[shard.shares],
                folder / shard.name, data_starts[shard.name],
            )  # fmt: skip


def write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def write_metadata(folder: Path, config: dict[str, Any], shards: list[Shard]) -> None:
    """Write config, generation config and, with several shards, their index."""
    write_json(folder / "config.json", config)
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    tokens = {key: config[key] for key in keys if config.get(key) is not None}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **tokens})
    if len(shards) > 1:
        files = {spec.name: shard.name for shard in shards for spec in shard.specs}
        total_bytes = sum(spec.nbytes for shard in shards for spec in shard.specs)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
        write_json(folder / "model.safetensors.index.json", index)


def check_space(folder: Path, need_bytes: int) -> None:
    """Refuse a checkpoint that the file system cannot hold.

    Raises:
        CapacityError: less is free than needed.
    """
    total_bytes, _, free_bytes = shutil.disk_usage(folder)
    # Some file systems in memory report no size at all.
    if total_bytes and need_bytes > free_bytes:
        raise CapacityError(
            f"{folder} has {format_bytes(free_bytes)} free, the checkpoint needs "
            f"{format_bytes(need_bytes)}; lower --num-layers or choose another --out"
        )


def make_checkpoint(
    out: Path,
    config: dict[str, Any],
    *,
    dtype: DType,
    seed: int,
    shard_bytes: int | None,
    clone: Clone = clone_to_end,
) -> None:
    """Write the folder under a temporary name beside `out`, then rename it.

    Args:
        shard_bytes: Largest weight file; None makes a file of each layer, all sharing the data of
            the first.
        clone: Shares data between files.

    Raises:
        BackendUnavailableError: the file system cannot share data.
        CapacityError: the file system lacks the space; nothing was written.
        ConfigError: `out` exists, or the config lacks a size.
        StorageError: a write failed; what was written is removed.
    """
    try:
        is_there = out.exists()
    except OSError as error:
        raise StorageError(f"--out {out} cannot be looked at: {error.strerror}") from error
    if is_there:
        raise ConfigError(f"--out {out} exists; choose another folder or remove it")
    specs = tensor_specs(config, dtype)
    shards = split_layers(specs) if shard_bytes is None else split_shards(specs, shard_bytes)
    own_bytes = sum(shard.num_bytes for shard in shards if shard.shares is None)
    header_bytes = sum(len(shard.header()) for shard in shards)
    parent = out.absolute().parent
    partial = parent / f".{out.name}.partial-{os.getpid()}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if shard_bytes is None:
            require_reflink(parent, clone)
        check_space(parent, own_bytes + 2 * header_bytes + SPARE_BYTES)
        partial.mkdir()
        source = RandomBytes(dtype, seed=seed, num_elements=own_bytes // dtype.itemsize)
        progress = Progress(own_bytes)
        for shard in shards:
            write_shard(partial, shard, source, progress)
        share_data(partial, shards, clone)
        write_metadata(partial, config, shards)
        partial.rename(out)
        progress.say(f"{out}, {len(shards)} file(s)")
    except OSError as error:
        raise StorageError(f"writing {out} failed: {error}; nothing is left there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Write a checkpoint of random weights in the Hugging Face layout."
    )
    parser.add_argument("--family", choices=FAMILIES, help="default: that of the geometry")
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--geometry", choices=GEOMETRIES)
    sizes.add_argument("--config", type=Path, help="a config.json to take all sizes from")
    parser.add_argument("--dtype", default="bf16", help="bf16 (default), fp16 or fp32")
    parser.add_argument("--num-layers", type=int, help="another number of decoder layers")
    parser.add_argument("--out", type=Path, required=True, help="folder to make; must not exist")
    parser.add_argument("--seed", type=int, default=0)
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--shard-size", default="5GB", help="largest weight file (5GB)")
    files.add_argument(
        "--share-layers",
        action="store_true",
        help="one file a layer, all sharing the data of the first; needs XFS or btrfs",
    )
    return parser.parse_args()


def choose_config(arguments: argparse.Namespace, dtype: DType) -> dict[str, Any]:
    """Return the config that the arguments ask for."""
    if arguments.config:
        try:
            sizes = json.loads(arguments.config.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"--config {arguments.config} cannot be read: {error}") from error
        if not isinstance(sizes, dict):
            raise ConfigError(
                f"--config {arguments.config} holds a {type(sizes).__name__}, need an object"
            )
        family = arguments.family or sizes.get("model_type")
    else:
        geometry = GEOMETRIES[arguments.geometry]
        sizes, family = geometry.sizes, arguments.family or geometry.family
        if family != geometry.family:
            raise ConfigError(f"geometry {arguments.geometry} is {geometry.family}, not {family}")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(f"model_type {family!r} is none of {', '.join(FAMILIES)}")
    config = resolve_config(family, sizes, arguments.num_layers)
    config.pop("dtype", None)
    return config | {"torch_dtype": TORCH_NAMES[dtype]}


def main() -> int:
    arguments = parse_arguments()
    try:
        dtype = DType.from_name(arguments.dtype)
        shard_bytes = parse_bytes(arguments.shard_size)
        if dtype not in TORCH_NAMES or shard_bytes < 1:
            raise ConfigError("need --dtype bf16, fp16 or fp32 and a --shard-size above 0")
        if arguments.seed < 0:
            raise ConfigError(f"--seed: got {arguments.seed}, need 0 or more")
        config = choose_config(arguments, dtype)
        make_checkpoint(
            arguments.out,
            config,
            dtype=dtype,
            seed=arguments.seed,
            shard_bytes=None if arguments.share_layers else shard_bytes,
        )
    except ZeroInferError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; nothing is left behind", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
