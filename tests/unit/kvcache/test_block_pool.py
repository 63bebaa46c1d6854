import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from zeroinfer.kvcache import BlockPool


def test_allocates_whole_blocks():
    pool = BlockPool(num_blocks=5, block_size=16)
    assert [pool.num_needed(tokens) for tokens in (1, 16, 17, 33)] == [1, 1, 2, 3]
    table = pool.allocate(33)
    assert len(set(table)) == 3
    assert pool.num_free == 2
    assert pool.can_allocate(32)
    assert not pool.can_allocate(33)


def test_released_blocks_are_used_again():
    pool = BlockPool(num_blocks=2, block_size=4)
    first = pool.allocate(8)
    pool.release(first)
    assert set(pool.allocate(8)) == set(first)


def test_shared_block_returns_with_its_last_reference():
    pool = BlockPool(num_blocks=1, block_size=4)
    table = pool.allocate(1)
    pool.share(table)
    pool.release(table)
    assert pool.num_free == 0
    pool.release(table)
    assert pool.num_free == 1


def test_more_than_is_free_is_our_own_error():
    with pytest.raises(AssertionError, match="3 kv_blocks asked for, 2 free"):
        BlockPool(num_blocks=2, block_size=4).allocate(9)


def test_double_release_is_our_own_error():
    pool = BlockPool(num_blocks=2, block_size=4)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(AssertionError, match=f"kv_block {table[0]} is released twice"):
        pool.release(table)


def test_sharing_a_free_block_is_our_own_error():
    with pytest.raises(AssertionError, match="kv_block 0 is shared while free"):
        BlockPool(num_blocks=2, block_size=4).share((0,))


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocate, share and release keeps every block counted once."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(num_blocks=12, block_size=4)
        self.tables = []

    @rule(num_tokens=st.integers(1, 24))
    def allocate(self, num_tokens):
        if self.pool.can_allocate(num_tokens):
            self.tables.append(self.pool.allocate(num_tokens))

    @rule(pick=st.integers(0, 99))
    def share(self, pick):
        if self.tables:
            table = self.tables[pick % len(self.tables)]
            self.pool.share(table)
            self.tables.append(table)

    @rule(pick=st.integers(0, 99))
    def release(self, pick):
        if self.tables:
            self.pool.release(self.tables.pop(pick % len(self.tables)))

    @invariant()
    def free_and_held_are_all(self):
        held = {block for table in self.tables for block in table}
        assert self.pool.num_free + len(held) == 12

    @invariant()
    def tables_overlap_only_by_sharing(self):
        distinct = list(dict.fromkeys(self.tables))
        blocks = [block for table in distinct for block in table]
        assert len(blocks) == len(set(blocks))


TestPoolMachine = PoolMachine.TestCase
