import gc
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroinfer.errors import CapacityError
from zeroinfer.memory import Arena, arena, process_anonymous_bytes
from zeroinfer.units import MIB


@pytest.fixture
def small():
    with Arena.create(3 * mmap.PAGESIZE + 100, name="small", is_prefaulted=False) as opened:
        yield opened


def test_is_page_aligned_and_zeroed(small):
    assert small.address % mmap.PAGESIZE == 0
    assert small.num_bytes == 3 * mmap.PAGESIZE + 100
    assert small.name == "small"
    assert bytes(small.view(0, small.num_bytes)) == bytes(small.num_bytes)


def test_views_are_writable_aliases(small):
    small.view(5, 3)[:] = b"abc"
    assert bytes(small.view(4, 5)) == b"\0abc\0"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
@pytest.mark.parametrize("offset", [0, 1, 3, 4095])
def test_tensors_alias_any_offset(small, dtype, offset):
    values = torch.arange(6, dtype=torch.float32).to(dtype).reshape(2, 3)
    small.view(offset, values.nbytes)[:] = values.view(torch.uint8).numpy().tobytes()
    tensor = small.tensor(offset, (2, 3), dtype)
    assert torch.equal(tensor, values)
    assert tensor.data_ptr() == small.address + offset
    assert tensor.is_contiguous()
    tensor.zero_()
    assert bytes(small.view(offset, values.nbytes)) == bytes(values.nbytes)


@given(offset=st.integers(0, 500), shape=st.lists(st.integers(0, 5), max_size=4))
@settings(max_examples=50, deadline=None)
def test_tensor_has_the_shape_or_is_refused(offset, shape):
    with Arena.create(1000, name="x", is_prefaulted=False) as opened:
        num_bytes = 2 * torch.Size(shape).numel()
        if offset + num_bytes > 1000:
            with pytest.raises(AssertionError, match="leaves 1000"):
                opened.tensor(offset, shape, torch.bfloat16)
        else:
            assert opened.tensor(offset, shape, torch.bfloat16).shape == torch.Size(shape)


def test_poison_is_nan_in_every_float_type_and_stays_in_its_range(small):
    small.poison(8, 64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert small.tensor(8, (8,), dtype).isnan().all()
    assert bytes(small.view(7, 66)) == b"\0" + b"\xff" * 64 + b"\0"
    small.poison(small.num_bytes, 0)


@pytest.mark.parametrize(("offset", "length"), [(-1, 2), (0, 10**9), (3 * 4096 + 100, 1), (5, -1)])
def test_ranges_outside_are_refused_by_name(small, offset, length):
    with pytest.raises(AssertionError, match="arena small: range"):
        small.view(offset, length)


@pytest.mark.parametrize("has_populate", [True, False])
def test_prefault_takes_the_memory_at_once(monkeypatch, has_populate):
    if not has_populate:
        monkeypatch.setattr(arena, "_MADV_POPULATE_WRITE", 9999)
    before_bytes = process_anonymous_bytes()
    with Arena.create(96 * MIB, name="x", is_prefaulted=True):
        assert process_anonymous_bytes() - before_bytes > 90 * MIB


def test_without_prefault_memory_comes_with_use():
    before_bytes = process_anonymous_bytes()
    with Arena.create(96 * MIB, name="x", is_prefaulted=False):
        assert process_anonymous_bytes() - before_bytes < 8 * MIB


def test_released_pages_are_given_back_and_their_neighbours_kept():
    with Arena.create(64 * MIB, name="x", is_prefaulted=False) as opened:
        opened.poison(0, opened.num_bytes)
        before_bytes = process_anonymous_bytes()
        opened.release_pages(100, 48 * MIB)
        assert before_bytes - process_anonymous_bytes() > 40 * MIB
        assert set(opened.view(0, mmap.PAGESIZE)) == {0xFF}
        assert set(opened.view(mmap.PAGESIZE, mmap.PAGESIZE)) == {0}
        assert set(opened.view(48 * MIB, mmap.PAGESIZE)) == {0xFF}
        opened.release_pages(10, 20)
        assert set(opened.view(0, mmap.PAGESIZE)) == {0xFF}


def test_close_gives_memory_back_although_a_tensor_lives():
    opened = Arena.create(64 * MIB, name="x", is_prefaulted=True)
    tensor = opened.tensor(0, (4,), torch.float32)
    view = opened.view(16, 4)
    tensor.fill_(1.0)
    before_bytes = process_anonymous_bytes()
    opened.close()
    opened.close()
    assert before_bytes - process_anonymous_bytes() > 56 * MIB
    assert tensor.tolist() == [0.0] * 4
    assert bytes(view) == bytes(4)


def test_mapping_goes_with_the_last_reference():
    opened = Arena.create(64 * MIB, name="x", is_prefaulted=False)
    address = opened.address
    tensor = opened.tensor(0, (4,), torch.float32)
    opened.close()
    assert _is_mapped(address)
    del tensor
    gc.collect()
    assert not _is_mapped(address)


def test_use_after_close_is_refused():
    with Arena.create(10, name="late", is_prefaulted=False) as opened:
        pass
    with pytest.raises(AssertionError, match="arena late is closed"):
        opened.view(0, 1)


def test_empty_arena_holds_empty_things_only():
    with Arena.create(0, name="none", is_prefaulted=True) as opened:
        assert opened.num_bytes == 0
        assert len(opened.view(0, 0)) == 0
        assert opened.tensor(0, (0, 3), torch.float32).shape == (0, 3)
        with pytest.raises(AssertionError, match="leaves 0"):
            opened.view(0, 1)


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 70])
def test_refused_memory_names_arena_and_size(num_bytes):
    with pytest.raises(CapacityError, match=r"landing ring: .* TiB of memory .*lower --dram"):
        Arena.create(num_bytes, name="landing ring", is_prefaulted=False)


def _is_mapped(address):
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = (line.split()[0].split("-") for line in lines)
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)
