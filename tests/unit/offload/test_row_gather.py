"""Rows of a table, wherever they are: on disk, in resident pieces, or both."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.io_shim import PreadvShim, ShimReader
from tests.helpers.streams import TABLE_ROWS, open_stream, write_weights
from zeroinfer.diskformat import TensorExtent
from zeroinfer.dtypes import DType, TensorSpec
from zeroinfer.errors import StorageError
from zeroinfer.memory import Arena
from zeroinfer.native import ThreadReader
from zeroinfer.offload import RowTable, staging_bytes


@pytest.fixture
def weights(tmp_path):
    return write_weights(tmp_path / "weights.bin")


def gather(stream, ids):
    landed = stream.fetch.acquire(stream.units[0].unit_idx)
    return landed.gather("embed", torch.tensor(ids))


def check(stream, ids):
    rows = gather(stream, ids)
    assert torch.equal(rows, stream.weights.tensors["embed"][torch.tensor(ids)])


def test_rows_come_in_the_order_of_the_ids_with_duplicates(weights):
    with open_stream(weights, weights="nvme") as stream:
        stream.fetch.start_step(has_next=False)
        check(stream, [5, 699, 5, 0, 0, 44, 5])


def test_each_row_is_needed_once_however_often_it_is_asked_for(weights):
    with open_stream(weights, weights="nvme", prefetch_depth=0) as stream:
        stream.fetch.start_step(has_next=False)
        check(stream, [9, 9, 9, 10])
        assert stream.fetch.bytes_needed == 2 * 128


def test_more_rows_than_the_staging_holds_come_in_batches(weights):
    with open_stream(weights, weights="nvme") as stream:
        stream.fetch.start_step(has_next=False)
        check(stream, list(range(TABLE_ROWS)))
        check(stream, list(range(TABLE_ROWS - 1, -1, -2)) * 2)


def test_rows_far_apart_fill_the_staging_exactly(tmp_path):
    # Each row lies across two blocks, so that every run is as long as it can be.
    weights = write_weights(tmp_path / "wide.bin", prefix_bytes=4096 - 1, columns=4096)
    with open_stream(weights, weights="nvme", target_bytes=1 << 19) as stream:
        stream.fetch.start_step(has_next=False)
        check(stream, list(range(0, TABLE_ROWS, 2)))


def test_rows_of_a_resident_table_are_never_read_by_row(weights):
    reader = ShimReader(ThreadReader.open(io_chunk_bytes=8192, queue_depth=2))
    with open_stream(weights, reader=reader) as stream:
        stream.fetch.start_step(has_next=False)
        check(stream, [3, 0, 699, 3])
        assert not any(is_urgent for *_, is_urgent in reader.submits)
        stream.run_step(has_next=False)


def test_rows_are_joined_from_a_device_host_memory_and_the_disk(weights):
    """A head tied to the table may be on the device in part."""
    with open_stream(weights) as stream:
        pieces = stream.fetch._tables["embed"].pieces
        table = replace(
            stream.fetch._tables["embed"], pieces=pieces[1::3], device_pieces=pieces[2::3]
        )
        stream.fetch._tables["embed"] = table
        stream.fetch.start_step(has_next=False)
        check(stream, [699, 0, 70, 333, 71, 0, 650, 128, *range(500, 420, -1)])
        held = [range(h.row_starts["embed"], h.row_starts["embed"] + h.tensors["embed"].shape[0])
                for h in table.device_pieces]  # fmt: skip
        before = stream.fetch.bytes_needed
        check(stream, [row for rows in held for row in (rows[-1], rows[0], rows[-1])])
        assert stream.fetch.bytes_needed == before, "rows of the device were read"


def test_rows_are_joined_from_resident_pieces_and_the_disk(weights):
    reader = ShimReader(ThreadReader.open(io_chunk_bytes=8192, queue_depth=2))
    with open_stream(weights, reader=reader) as stream:
        table = stream.fetch._tables["embed"]
        assert len(table.pieces) > 3
        some = replace(table, pieces=table.pieces[1::2])
        stream.fetch._tables["embed"] = some
        stream.fetch.start_step(has_next=False)
        ids = [699, 0, 70, 333, 71, 0, 650, 128]
        before = stream.fetch.bytes_needed
        check(stream, ids)
        here = {
            row
            for home in some.pieces
            for row in range(
                home.row_starts["embed"],
                home.row_starts["embed"] + home.tensors["embed"].shape[0],
            )
        }
        missing = set(ids) - here
        assert 0 < len(missing) < len(set(ids))
        urgent = sum(is_urgent for *_, is_urgent in reader.submits)
        assert 0 < urgent <= len(missing)
        loaded = sum(home.num_bytes for home in some.pieces)
        submitted = stream.fetch.bytes_needed - before - 128 * len(missing)
        assert 0 <= submitted <= loaded


def test_row_reads_go_ahead_of_queued_chunks(weights):
    reader = ShimReader(ThreadReader.open(io_chunk_bytes=8192, queue_depth=2))
    with open_stream(weights, weights="nvme", reader=reader) as stream:
        stream.fetch.start_step(has_next=False)
        before = len(reader.submits)
        check(stream, [1, 600])
        assert all(is_urgent for *_, is_urgent in reader.submits[before:][:2])


def table_at_end(path, *, num_rows, row_elements, file_bytes):
    """A table whose last byte is the last of a file of exactly `file_bytes`."""
    tensor = torch.arange(num_rows * row_elements, dtype=torch.float32).to(torch.bfloat16)
    tensor = tensor.view(num_rows, row_elements)
    offset = file_bytes - tensor.nbytes
    path.write_bytes(b"\x11" * offset + tensor.view(torch.uint8).numpy().tobytes())
    spec = TensorSpec(name="t", shape=tuple(tensor.shape), dtype=DType.BF16)
    return TensorExtent(spec=spec, path=path, offset=offset), tensor


@pytest.mark.parametrize("rest", [0, 1, 100, 511, 512, 4095])
def test_last_row_may_end_with_a_file_of_any_length(tmp_path, rest):
    extent, tensor = table_at_end(
        tmp_path / "t.bin", num_rows=400, row_elements=8, file_bytes=5 * 4096 + rest
    )
    with (
        ThreadReader.open(io_chunk_bytes=4096, queue_depth=2) as reader,
        Arena.create(staging_bytes([16]), name="staging", is_prefaulted=False) as staging,
    ):
        file = reader.open_file(extent.path)
        table = RowTable(name="t", extent=extent, file=file, pieces=(), staging=staging)
        ids = torch.tensor([399, 0, 398, 399])
        rows, needed = table.gather(ids, reader, place=torch.clone)
        assert torch.equal(rows, tensor[ids])
        assert needed == 3 * 16
        everything, _ = table.gather(torch.arange(400), reader, place=torch.clone)
        assert torch.equal(everything, tensor)


def test_failed_row_read_names_file_and_offset_and_the_next_gather_is_right(weights):
    shim = PreadvShim()
    reader = ThreadReader.open(io_chunk_bytes=8192, queue_depth=2, preadv=shim)
    with open_stream(weights, weights="nvme", prefetch_depth=0, reader=reader) as stream:
        stream.fetch.start_step(has_next=False)
        shim.fails_at = lambda call: call.offset >= 40_000
        with pytest.raises(StorageError) as caught:
            gather(stream, [1, 400, 690])
        assert str(weights.path) in str(caught.value)
        assert "(EIO)" in str(caught.value)
        shim.fails_at = lambda call: False
        check(stream, [1, 400, 690])


def test_staging_of_no_table_is_empty():
    assert staging_bytes([]) == 0
    assert staging_bytes([16, 5000]) == 256 * (8192 + 4096)
