"""Converting a GGUF file to a store of safetensors under Hugging Face names."""

import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zeroinfer.checkpoint.gguf_llama import (
    MappedTensor,
    llama_config,
    map_llama_tensors,
    unpermute_rows,
)
from zeroinfer.checkpoint.gguf_reader import GgufFile, open_gguf
from zeroinfer.checkpoint.gguf_tokenizer import special_token_ids, tokenizer_documents
from zeroinfer.checkpoint.manifest import SourceFile, hash_file
from zeroinfer.checkpoint.shards import TensorSource
from zeroinfer.checkpoint.store import Progress, StoreContent, find_store, write_store
from zeroinfer.dtypes import DType, TensorSpec
from zeroinfer.errors import CheckpointError, ConfigError, StorageError

__all__ = ["convert_gguf"]

_TORCH_NAMES = {DType.BF16: "bfloat16", DType.F16: "float16", DType.F32: "float32"}


def convert_gguf(
    source: Path,
    nvme_dir: Path,
    *,
    dtype: str = "auto",
    progress: Progress | None = None,
    expected_sha256: str | None = None,
    shard_bytes: int | None = None,
) -> Path:
    """Convert a llama-architecture GGUF file, or return the store an earlier call made of it.

    A source known by path, size and time is not read again. Tensors pass through in pieces of
    rows, about 8 MiB each.

    Args:
        source: the GGUF file; only read.
        nvme_dir: the folder stores are kept under, as given by ``--nvme``.
        dtype: element type of the weights; ``auto`` is fp32 for a file with packed values, else
            the type most of its bytes have.
        progress: called with the bytes done and the bytes in all.
        expected_sha256: refuse a source with another checksum.
        shard_bytes: size of a file; None chooses by the total.

    Moves: the source from NVMe to DRAM and the decoded weights back, blocking.

    Raises:
        CheckpointError: the file is missing, damaged, another than expected, or does not fit dtype.
        UnsupportedModelError: architecture, tokenizer or encoding is not supported.
        CapacityError: not enough room under nvme_dir.
        StorageError: a read or write failed.
        ConfigError: dtype is no float type that weights are written in.
    """
    wanted = dtype if dtype == "auto" else _weight_dtype(dtype).short_name
    try:
        found = find_store(nvme_dir, source, dtype=wanted)
        if found is not None:
            return found
        source_file = _source_file(source)
    except FileNotFoundError as error:
        raise CheckpointError(f"GGUF file {source} does not exist; give another path") from error
    except IsADirectoryError as error:
        raise CheckpointError(
            f"{source} is a folder, need a GGUF file; a folder of safetensors needs no conversion"
        ) from error
    except OSError as error:
        raise StorageError(f"read of {source} failed: {error.strerror}") from error
    if expected_sha256 not in (None, source_file.sha256):
        raise CheckpointError(
            f"{source} has sha256 {source_file.sha256}, need {expected_sha256}; install it again"
        )
    content = _content(open_gguf(source), source_file, wanted=wanted)
    return write_store(nvme_dir, content, shard_bytes=shard_bytes, progress=progress)


def _source_file(source: Path) -> SourceFile:
    path = source.resolve()
    status = path.stat()
    return SourceFile(path=str(path), size_bytes=status.st_size, mtime_ns=status.st_mtime_ns,
                      sha256=hash_file(path))  # fmt: skip


def _content(file: GgufFile, source: SourceFile, *, wanted: str) -> StoreContent:
    config = llama_config(file)
    tensors = map_llama_tensors(file, config)
    auto = _auto_dtype(tensors)
    dtype = auto if wanted == "auto" else _weight_dtype(wanted)
    return StoreContent(
        name=file.path.stem,
        dtype=dtype.short_name,
        auto_dtype=auto.short_name,
        source=source,
        tensors=[_tensor_source(file, mapped, dtype) for mapped in tensors],
        documents=_documents(file, config, dtype),
    )


def _documents(file: GgufFile, config: dict[str, Any], dtype: DType) -> dict[str, bytes]:
    tokenizer = tokenizer_documents(file)
    num_tokens = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    if num_tokens > config["vocab_size"]:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.tokens has {num_tokens} entries but the embedding only "
            f"{config['vocab_size']} rows; fetch it again"
        )
    ids = special_token_ids(file)
    config = {**config, **ids, "torch_dtype": _TORCH_NAMES[dtype]}
    return {"config.json": _json(config), "generation_config.json": _json(ids), **tokenizer}


def _auto_dtype(tensors: Sequence[MappedTensor]) -> DType:
    if any(mapped.tensor.is_quantized for mapped in tensors):
        return DType.F32
    largest = max(tensors, key=lambda mapped: math.prod(mapped.tensor.shape))
    return DType.from_name(largest.tensor.encoding.name)


def _weight_dtype(name: str) -> DType:
    dtype = DType.from_name(name)
    if dtype not in _TORCH_NAMES:
        raise ConfigError(f"dtype {name!r} is not written; use one of auto, bf16, fp16, fp32")
    return dtype


def _tensor_source(file: GgufFile, mapped: MappedTensor, dtype: DType) -> TensorSource:
    spec = TensorSpec(name=mapped.name, shape=mapped.tensor.shape, dtype=dtype)
    return TensorSource(spec=spec, read=partial(_read_pieces, file, mapped, dtype))


def _read_pieces(file: GgufFile, mapped: MappedTensor, dtype: DType) -> Iterator[npt.NDArray[Any]]:
    for rows in file.read_rows(mapped.tensor, rows_multiple=mapped.head_dim or 1):
        if mapped.head_dim is not None:
            rows = unpermute_rows(rows, head_dim=mapped.head_dim)
        yield _cast(rows, dtype, where=f"{file.path}: tensor {mapped.tensor.name}")


def _cast(rows: npt.NDArray[Any], dtype: DType, *, where: str) -> npt.NDArray[Any]:
    if not np.isfinite(rows).all():
        raise CheckpointError(f"{where} holds values that are not finite; fetch it again")
    if dtype is DType.F32:
        return rows
    with np.errstate(over="ignore"):
        cast = rows.astype(np.float16) if dtype is DType.F16 else _to_bf16(rows)
    infinity = 0x7C00 if dtype is DType.F16 else 0x7F80
    if ((cast.view(np.uint16) & infinity) == infinity).any():
        largest = float(np.abs(rows).max())
        raise CheckpointError(
            f"{where} holds {largest:g}, beyond the range of {dtype.short_name}; use --dtype fp32"
        )
    return cast


def _to_bf16(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Round float32 to the nearest bfloat16, ties to even; the result holds the bits."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    # Finite values only, so the addition cannot wrap.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
