"""The tensors of the KV cache: one arena per plane of each layer, cut into kv_blocks.

A plane is what a model keeps per token in a layer: keys and values here, latent vectors or states
elsewhere. Blocks lie as (heads, block_size, head_dim), so that one head's tokens are contiguous.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroinfer.errors import CapacityError
from zeroinfer.units import format_bytes

__all__ = ["KVCache", "KVPlane"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVPlane:
    """One thing kept per token in every layer."""

    name: str
    num_heads: int
    head_dim: int

    @property
    def num_elements(self) -> int:
        """Elements per token in one layer."""
        return self.num_heads * self.head_dim


class _SequenceKV:
    """Planes of one sequence in one layer; see zeroinfer.layers.SequenceKV."""

    def __init__(self, planes: dict[str, torch.Tensor], table: tuple[int, ...], size: int) -> None:
        self._planes = planes
        self._table = table
        self._block_size = size

    def write(self, plane: str, start: int, values: torch.Tensor) -> None:
        """Store (tokens, heads, head_dim) at positions start, start + 1, ..."""
        blocks, done = self._planes[plane], 0
        while done < values.shape[0]:
            block_idx, offset = divmod(start + done, self._block_size)
            count = min(self._block_size - offset, values.shape[0] - done)
            target = blocks[self._table[block_idx], :, offset : offset + count]
            target.copy_(values[done : done + count].transpose(0, 1))
            done += count

    def read(self, plane: str, stop: int, dtype: torch.dtype, *, start: int = 0) -> torch.Tensor:
        """Return positions [start, stop) as (heads, stop - start, head_dim).

        A copy, unless they lie in one block and in this dtype.
        Torch's attention in fp32 rounds otherwise where rows begin at no multiple of 16 bytes, so
        that the block size may show in the last bits of a head_dim that is no multiple of 4.
        """
        blocks, size = self._planes[plane], self._block_size
        block_idx, offset = divmod(start, size)
        if offset + stop - start <= size:
            return blocks[self._table[block_idx], :, offset : offset + stop - start].to(dtype)
        shape = (blocks.shape[1], stop - start, blocks.shape[3])
        out = torch.empty(shape, dtype=dtype, device=blocks.device)
        done = start
        while done < stop:
            block_idx, offset = divmod(done, size)
            count = min(size - offset, stop - done)
            source = blocks[self._table[block_idx], :, offset : offset + count]
            out[:, done - start : done - start + count] = source
            done += count
        return out


class KVCache:
    """Planes of all layers over one pool of kv_blocks."""

    def __init__(self, planes: list[dict[str, torch.Tensor]], *, block_size: int) -> None:
        self._planes = planes
        self._block_size = block_size

    @classmethod
    def create(
        cls,
        planes: Sequence[KVPlane],
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        torch_device: torch.device | None = None,
    ) -> "KVCache":
        """Allocate, on the CPU by default, where pages become resident as blocks are written.

        Raises:
            CapacityError: the memory is refused.
        """
        try:
            layers = [
                {
                    plane.name: torch.empty(
                        (num_blocks, plane.num_heads, block_size, plane.head_dim),
                        dtype=dtype,
                        device=torch_device,
                    )
                    for plane in planes
                }
                for _ in range(num_layers)
            ]
        except RuntimeError as error:
            per_token = cls.bytes_per_token(planes, num_layers=num_layers, itemsize=dtype.itemsize)
            raise CapacityError(
                f"keys and values: the system refused "
                f"{format_bytes(per_token * num_blocks * block_size)} of memory; lower "
                "--max-num-seqs or --max-tokens, or free memory"
            ) from error
        return cls(layers, block_size=block_size)

    @staticmethod
    def bytes_per_token(planes: Sequence[KVPlane], *, num_layers: int, itemsize: int) -> int:
        """Bytes of one token over all layers and planes."""
        return num_layers * itemsize * sum(plane.num_elements for plane in planes)

    def sequence(self, layer_idx: int, block_table: tuple[int, ...]) -> _SequenceKV:
        """Return the planes of one sequence in one layer."""
        return _SequenceKV(self._planes[layer_idx], block_table, self._block_size)

    def plane(self, layer_idx: int, name: str) -> torch.Tensor:
        """Return all blocks of a plane, (blocks, heads, block_size, head_dim)."""
        return self._planes[layer_idx][name]
