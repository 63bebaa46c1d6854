"""Weight files to be: which tensors each holds, and its safetensors header."""

import itertools
import json
import re
from dataclasses import dataclass, replace
from typing import Any

from zeroinfer.dtypes import TensorSpec
from zeroinfer.errors import ConfigError
from zeroinfer.units import align_up

__all__ = ["Shard", "split_layers", "split_shards"]

# What file systems share: whole blocks.
BLOCK_BYTES = 4096
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A weight file to be."""

    name: str
    specs: list[TensorSpec]
    """In the order of the file: by name, as safetensors writes them."""
    alignment: int = 8
    """The data begins at a multiple of this."""
    shares: str | None = None
    """File whose data this one shares; None has its own."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs)

    def header(self) -> bytes:
        """Return length and JSON of the safetensors header, padded with spaces."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for spec in self.specs:
            entries[spec.name] = {
                "dtype": spec.dtype.value,
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.nbytes],
            }
            offset += spec.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text = text.ljust(align_up(8 + len(text), self.alignment) - 8)
        return len(text).to_bytes(8, "little") + text


def split_shards(specs: list[TensorSpec], shard_bytes: int) -> list[Shard]:
    """Fill files up to a size in module order, as `save_pretrained` does."""
    groups: list[list[TensorSpec]] = [[]]
    used_bytes = 0
    for spec in specs:
        if groups[-1] and used_bytes + spec.nbytes > shard_bytes:
            groups.append([])
            used_bytes = 0
        groups[-1].append(spec)
        used_bytes += spec.nbytes
    return _name(groups)


def split_layers(specs: list[TensorSpec]) -> list[Shard]:
    """Give each decoder layer a file of its own that shares the data of the first layer's.

    Names of equal length or not, the tensors of two layers lie in the same order, so that one
    layer's data serves all of them.

    Raises:
        ConfigError: a layer has other tensors than the first.
    """
    runs = [(layer, list(run)) for layer, run in itertools.groupby(specs, key=_layer_of)]
    shards = _name([run for _, run in runs])
    first = next((idx for idx, (layer, _) in enumerate(runs) if layer is not None), None)
    shared = []
    for (layer, _), shard in zip(runs, shards, strict=True):
        source = None
        if layer is not None and first is not None and shard is not shards[first]:
            _check_alike(shards[first], shard)
            source = shards[first].name
        shared.append(replace(shard, alignment=BLOCK_BYTES, shares=source))
    return shared


def _layer_of(spec: TensorSpec) -> int | None:
    match = _LAYER.search(spec.name)
    return None if match is None else int(match.group(1))


def _check_alike(first: Shard, other: Shard) -> None:
    def describe(spec: TensorSpec) -> tuple[str, tuple[int, ...]]:
        return _LAYER.sub("", spec.name), spec.shape

    if list(map(describe, first.specs)) != list(map(describe, other.specs)):
        raise ConfigError(
            f"--share-layers needs layers of one kind: {other.name} holds other tensors than "
            f"{first.name}; leave --share-layers out"
        )


def _name(groups: list[list[TensorSpec]]) -> list[Shard]:
    count = len(groups)
    names = [f"model-{idx:05d}-of-{count:05d}.safetensors" for idx in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    return [
        Shard(name=name, specs=sorted(group, key=lambda spec: spec.name))
        for name, group in zip(names, groups, strict=True)
    ]
