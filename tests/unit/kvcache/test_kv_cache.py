import pytest
import torch

from zeroinfer.errors import CapacityError
from zeroinfer.kvcache import KVCache, KVPlane

PLANES = (
    KVPlane(name="key", num_heads=2, head_dim=3),
    KVPlane(name="value", num_heads=1, head_dim=5),
)


def _cache(*, block_size=4, num_blocks=6, dtype=torch.float32):
    return KVCache.create(
        PLANES, num_layers=2, num_blocks=num_blocks, block_size=block_size, dtype=dtype
    )


def _values(count, heads=2, dim=3, seed=0):
    return torch.randn((count, heads, dim), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pieces", [[11], [1] * 11, [3, 5, 3], [4, 4, 3]])
@pytest.mark.parametrize("table", [(5, 0, 3), (1, 2, 4)])
def test_written_positions_are_read_back(pieces, table):
    sequence, values = _cache().sequence(1, table), _values(11)
    start = 0
    for count in pieces:
        sequence.write("key", start, values[start : start + count])
        start += count
    for stop in (1, 4, 5, 8, 11):
        got = sequence.read("key", stop, torch.float32)
        assert torch.equal(got, values[:stop].transpose(0, 1))


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 8, 10])
def test_reads_may_start_anywhere(start):
    sequence = _cache().sequence(1, (5, 0, 3))
    sequence.write("key", 0, _values(11))
    for stop in range(start + 1, 12):
        got = sequence.read("key", stop, torch.float32, start=start)
        assert torch.equal(got, _values(11)[start:stop].transpose(0, 1))


def test_one_block_is_read_in_place():
    cache = _cache(block_size=16)
    sequence = cache.sequence(0, (2,))
    sequence.write("key", 0, _values(7))
    read = sequence.read("key", 7, torch.float32)
    sequence.write("key", 3, _values(1, seed=9))
    assert torch.equal(read[:, 3], _values(1, seed=9)[0])


def test_sequences_layers_and_planes_do_not_touch_each_other():
    cache = _cache()
    places = [(layer, table) for layer in (0, 1) for table in ((0, 1), (2, 3))]
    for idx, (layer, table) in enumerate(places):
        cache.sequence(layer, table).write("key", 0, _values(7, seed=idx))
        cache.sequence(layer, table).write("value", 0, _values(7, 1, 5, seed=100 + idx))
    for idx, (layer, table) in enumerate(places):
        sequence = cache.sequence(layer, table)
        got = sequence.read("key", 7, torch.float32)
        assert torch.equal(got, _values(7, seed=idx).transpose(0, 1))
        got = sequence.read("value", 7, torch.float32)
        assert torch.equal(got, _values(7, 1, 5, seed=100 + idx).transpose(0, 1))


@pytest.mark.parametrize("stop", [3, 9])
def test_stored_dtype_rounds_once(stop):
    sequence = _cache(dtype=torch.bfloat16).sequence(0, (4, 1, 0))
    sequence.write("key", 0, _values(9))
    got = sequence.read("key", stop, torch.float32)
    assert got.dtype == torch.float32
    assert torch.equal(got, _values(9)[:stop].transpose(0, 1).to(torch.bfloat16).float())


def test_bytes_per_token():
    assert KVCache.bytes_per_token(PLANES, num_layers=3, itemsize=2) == 3 * 2 * (6 + 5)


def test_memory_that_is_refused_is_a_capacity_error():
    with pytest.raises(CapacityError, match=r"keys and values: .* TiB of memory; lower --max-num"):
        _cache(num_blocks=1 << 44)
