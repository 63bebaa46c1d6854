"""Free list and reference counts of kv_blocks; numbers only, no tensors."""

from zeroinfer.units import ceil_div

__all__ = ["BlockPool"]


class BlockPool:
    """Hands out kv_blocks of a fixed number of tokens.

    A block with more than one reference is shared; it returns to the pool with its last one.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    def num_needed(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return ceil_div(num_tokens, self.block_size)

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether `allocate` would succeed now."""
        return self.num_needed(num_tokens) <= self.num_free

    def allocate(self, num_tokens: int) -> tuple[int, ...]:
        """Take blocks for this many tokens, one reference each."""
        needed = self.num_needed(num_tokens)
        assert needed <= self.num_free, f"{needed} kv_blocks asked for, {self.num_free} free"
        table = tuple(self._free.pop() for _ in range(needed))
        for block in table:
            self._references[block] = 1
        return table

    def share(self, table: tuple[int, ...]) -> None:
        """Add a reference to each block."""
        for block in table:
            assert self._references[block] > 0, f"kv_block {block} is shared while free"
            self._references[block] += 1

    def release(self, table: tuple[int, ...]) -> None:
        """Drop a reference of each block."""
        for block in table:
            assert self._references[block] > 0, f"kv_block {block} is released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
