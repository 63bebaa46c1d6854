"""Making stores: of GGUF files, of folders of ``.bin`` files, and copies of safetensors folders."""

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zeroinfer.checkpoint.folders import OrderOfUse, folder_content
from zeroinfer.checkpoint.gguf_config import gguf_shape
from zeroinfer.checkpoint.gguf_reader import GgufFile, open_gguf
from zeroinfer.checkpoint.gguf_tensors import MappedTensor, map_tensors, unpermute_rows
from zeroinfer.checkpoint.gguf_tokenizer import special_token_ids, tokenizer_documents
from zeroinfer.checkpoint.manifest import SourceFile
from zeroinfer.checkpoint.shards import TensorSource
from zeroinfer.checkpoint.sources import identify_file, identify_folder
from zeroinfer.checkpoint.store import Progress, StoreContent, find_store, write_store
from zeroinfer.checkpoint.values import TORCH_NAMES, round_values, weight_dtype
from zeroinfer.dtypes import DType, TensorSpec
from zeroinfer.errors import CheckpointError, StorageError

__all__ = ["convert_folder", "convert_gguf", "convert_model"]


def convert_model(
    source: Path,
    nvme_dir: Path,
    *,
    dtype: str = "auto",
    stripes: Sequence[Path] = (),
    order: OrderOfUse | None = None,
    progress: Progress | None = None,
) -> Path:
    """Make a store of a GGUF file or a model folder, or return the one an earlier call made.

    Args:
        source: a GGUF file, or a folder of ``.bin`` or safetensors files; only read.
        nvme_dir: the folder stores are kept under.
        dtype: element type of the weights; ``auto`` is what the source has, fp32 for packed values.
        stripes: further folders over which the files of the store are spread.
        order: order of use of a folder's tensors; a GGUF file's is known.
        progress: called with the bytes done and the bytes in all.

    Raises:
        CheckpointError: the source is missing, damaged, or cannot be read without running code.
        UnsupportedModelError: architecture, tokenizer or encoding is not supported.
        CapacityError: not enough room in a folder.
        StorageError: a read or write failed.
        ConfigError: dtype is no float type that weights are written in.
    """
    with _source_errors(source):
        is_folder = source.is_dir()
    if is_folder:
        return convert_folder(
            source, nvme_dir, dtype=dtype, stripes=stripes, order=order, progress=progress
        )
    return convert_gguf(source, nvme_dir, dtype=dtype, stripes=stripes, progress=progress)


def convert_folder(
    folder: Path,
    nvme_dir: Path,
    *,
    dtype: str = "auto",
    stripes: Sequence[Path] = (),
    order: OrderOfUse | None = None,
    progress: Progress | None = None,
    shard_bytes: int | None = None,
) -> Path:
    """Make a store of a model folder; see `convert_model`.

    What was written is read back from the disk and compared before it counts. A folder known by
    path, names, sizes and times is not read again.

    Moves: the weights from the folder to DRAM, to NVMe, and back once more; blocking.
    """
    wanted = _wanted(dtype)
    with _source_errors(folder):
        found = find_store(nvme_dir, folder, dtype=wanted, stripes=stripes)
        if found is not None:
            return found
        source = identify_folder(folder)
        content = folder_content(folder, source, dtype=wanted, order=order)
    return write_store(nvme_dir, content, stripes=stripes, shard_bytes=shard_bytes,
                       progress=progress, is_verified=True)  # fmt: skip


def convert_gguf(
    source: Path,
    nvme_dir: Path,
    *,
    dtype: str = "auto",
    stripes: Sequence[Path] = (),
    progress: Progress | None = None,
    expected_sha256: str | None = None,
    shard_bytes: int | None = None,
) -> Path:
    """Make a store of a GGUF file; see `convert_model`.

    A source known by path, size and time is not read again. Tensors pass through in pieces of
    rows, about 8 MiB each; a matrix that must be transposed is held whole.

    Args:
        source: the GGUF file; only read.
        nvme_dir: the folder stores are kept under, as given by ``--nvme``.
        dtype: element type of the weights; ``auto`` is fp32 for a file with packed values, else
            the type most of its bytes have.
        stripes: further folders over which the files of the store are spread.
        progress: called with the bytes done and the bytes in all.
        expected_sha256: refuse a source with another checksum.
        shard_bytes: size of a file; None chooses by the total.

    Moves: the source from NVMe to DRAM and the decoded weights back, blocking.
    """
    wanted = _wanted(dtype)
    with _source_errors(source):
        known = find_store(nvme_dir, source, dtype=wanted, stripes=stripes)
        if known is not None:
            return known
        source_file = identify_file(source)
    if expected_sha256 not in (None, source_file.sha256):
        raise CheckpointError(
            f"{source} has sha256 {source_file.sha256}, need {expected_sha256}; install it again"
        )
    content = _content(open_gguf(source), source_file, wanted=wanted)
    return write_store(nvme_dir, content, stripes=stripes, shard_bytes=shard_bytes,
                       progress=progress)  # fmt: skip


@contextlib.contextmanager
def _source_errors(source: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"model {source} does not exist; give another path") from error
    except IsADirectoryError as error:
        raise CheckpointError(f"{source} is a folder, need a GGUF file") from error
    except OSError as error:
        raise StorageError(f"read of {source} failed: {error.strerror}") from error


def _wanted(dtype: str) -> str:
    return dtype if dtype == "auto" else weight_dtype(dtype).short_name


def _content(file: GgufFile, source: SourceFile, *, wanted: str) -> StoreContent:
    shape = gguf_shape(file)
    tensors = map_tensors(file, shape.config, sizes=shape.sizes)
    auto = _auto_dtype(tensors)
    dtype = auto if wanted == "auto" else weight_dtype(wanted)
    return StoreContent(
        name=file.path.stem,
        dtype=dtype.short_name,
        auto_dtype=auto.short_name,
        source=source,
        tensors=[_tensor_source(file, mapped, dtype) for mapped in tensors],
        documents=_documents(file, shape.config, dtype),
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
    config = {**config, **ids, "torch_dtype": TORCH_NAMES[dtype]}
    return {"config.json": _json(config), "generation_config.json": _json(ids), **tokenizer}


def _auto_dtype(tensors: Sequence[MappedTensor]) -> DType:
    if any(mapped.tensor.is_quantized for mapped in tensors):
        return DType.F32
    largest = max(tensors, key=lambda mapped: math.prod(mapped.tensor.shape))
    return DType.from_name(largest.tensor.encoding.name)


def _tensor_source(file: GgufFile, mapped: MappedTensor, dtype: DType) -> TensorSource:
    spec = TensorSpec(name=mapped.name, shape=mapped.shape, dtype=dtype)
    return TensorSource(spec=spec, read=partial(_read_pieces, file, mapped, dtype))


def _read_pieces(file: GgufFile, mapped: MappedTensor, dtype: DType) -> Iterator[npt.NDArray[Any]]:
    where = f"{file.path}: tensor {mapped.tensor.name}"
    pieces = file.read_rows(mapped.tensor, rows_multiple=mapped.head_dim or 1)
    if mapped.is_transposed:
        pieces = iter([np.concatenate(list(pieces)).T])
    for rows in pieces:
        if mapped.head_dim is not None:
            rows = unpermute_rows(rows, head_dim=mapped.head_dim)
        yield round_values(rows, dtype, where=where)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
