"""Writers of small model folders byte by byte: odd headers, shards, indexes, hub caches.

No library has a hand in the files, so that they can be wrong in any way a test needs.
"""

import json
import shutil
from pathlib import Path

from zeroinfer.dtypes import DType


def raw_header(tensors, *, metadata=None):
    """Lay tensors out one after the other: {name: (dtype, shape)} -> (header dict, data bytes)."""
    header, offset = {}, 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape) in tensors.items():
        size = DType(dtype).itemsize
        for dim in shape:
            size *= dim
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    return header, offset


def write_raw(path, header, data_bytes, *, header_length=None):
    """Write a header (dict or raw bytes) and a patterned data section of `data_bytes` bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if header_length is None else header_length
    data = bytes(i % 251 for i in range(data_bytes))
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return path


def write_safetensors(path, tensors, *, metadata=None):
    """Write {name: (dtype, shape)} with patterned data; no library involved."""
    header, data_bytes = raw_header(tensors, metadata=metadata)
    return write_raw(path, header, data_bytes)


def write_folder(folder, shards, *, index=True, config=None):
    """Write a model folder of raw shards: {file name: {tensor: (dtype, shape)}}.

    One file named model.safetensors gets no index; `index` may be a weight_map of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    for name, tensors in shards.items():
        write_safetensors(folder / name, tensors)
    if index and list(shards) != ["model.safetensors"]:
        weight_map = {t: name for name, tensors in shards.items() for t in tensors}
        write_index(folder, weight_map if index is True else index)
    return folder


def write_index(folder, weight_map):
    """Write model.safetensors.index.json."""
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return path


def edit_json(path, **changes):
    """Set keys of a JSON file; None removes a key."""
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}, indent=2))


def make_hub_cache(cache_dir, model_id, folder, *, revision="0123456789abcdef" * 2 + "01234567"):
    """Lay a folder out as the hub's cache does: blobs, and a snapshot of relative links."""
    repo = Path(cache_dir) / f"models--{model_id.replace('/', '--')}"
    snapshot = repo / "snapshots" / revision
    (repo / "blobs").mkdir(parents=True)
    (repo / "refs").mkdir()
    snapshot.mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    for number, path in enumerate(sorted(Path(folder).iterdir())):
        blob = f"{number:040x}"
        shutil.copyfile(path, repo / "blobs" / blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob)
    return snapshot
