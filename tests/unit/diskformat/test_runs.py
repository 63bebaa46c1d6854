"""Runs: every byte once, aligned, no block read twice."""

import itertools
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import given

from tests.helpers.raw_checkpoints import write_folder
from zeroinfer.diskformat import Extent, open_checkpoint, plan_runs

A, B = Path("/m/a"), Path("/m/b")


def extent(offset, length, path=A):
    return Extent(path=path, offset=offset, length=length)


def spans(runs):
    return [(run.path, run.offset, run.length) for run in runs]


def test_neighbours_become_one_run():
    (run,) = plan_runs([extent(5000, 100), extent(100, 4900)], alignment=4096, max_gap_bytes=0)
    assert (run.offset, run.length, run.needed_bytes, run.required_bytes) == (0, 8192, 5000, 5100)
    assert run.pieces == ((1, 100), (0, 5000))


def test_a_gap_is_read_up_to_the_limit():
    extents = [extent(0, 4096), extent(16384, 4096)]
    assert spans(plan_runs(extents, alignment=4096, max_gap_bytes=12287)) == [
        (A, 0, 4096),
        (A, 16384, 4096),
    ]
    assert spans(plan_runs(extents, alignment=4096, max_gap_bytes=12288)) == [(A, 0, 20480)]


def test_a_gap_inside_touching_blocks_costs_nothing():
    extents = [extent(0, 10), extent(8000, 10)]
    assert spans(plan_runs(extents, alignment=4096, max_gap_bytes=0)) == [(A, 0, 8192)]


def test_files_stay_apart_and_sorted():
    extents = [extent(0, 10, B), extent(0, 10, A)]
    runs = plan_runs(extents, alignment=512, max_gap_bytes=1 << 40)
    assert spans(runs) == [(A, 0, 512), (B, 0, 512)]


def test_tail_reaches_beyond_the_file_and_says_what_must_arrive():
    """Source: llama.cpp#18766 (3.11)."""
    size = 3 * 4096 + 100
    (run,) = plan_runs([extent(8192, size - 8192)], alignment=4096, max_gap_bytes=0)
    assert (run.offset, run.length, run.required_bytes) == (8192, 8192, 4196)
    assert run.offset + run.required_bytes == size


def test_shared_bytes_count_once():
    (run,) = plan_runs(
        [extent(0, 100), extent(0, 100), extent(50, 100)], alignment=1, max_gap_bytes=0
    )
    assert (run.length, run.needed_bytes) == (150, 150)
    assert run.pieces == ((0, 0), (1, 0), (2, 50))


def test_empty_extents_read_nothing():
    assert plan_runs([extent(10, 0)], alignment=4096, max_gap_bytes=0) == []
    (run,) = plan_runs([extent(10, 0), extent(0, 20)], alignment=4096, max_gap_bytes=0)
    assert run.pieces == ((1, 0),)


def test_layers_that_span_shards_are_covered_once(tmp_path):
    """Source: transformers-bloom-inference#24 (2.10)."""
    shards = {
        "model-00001-of-00002.safetensors": {"l0.a": ("F32", (40, 30)), "l1.a": ("F32", (40, 30))},
        "model-00002-of-00002.safetensors": {"l1.b": ("F32", (33,)), "l0.b": ("F32", (31,))},
    }
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", shards))
    for layer in ("l0", "l1"):
        parts = [e for name, e in checkpoint.tensors.items() if name.startswith(layer)]
        extents = [extent(e.offset, e.spec.nbytes, e.path) for e in parts]
        runs = plan_runs(extents, alignment=4096, max_gap_bytes=0)
        assert [run.path for run in runs] == list(checkpoint.files)
        assert sum(run.needed_bytes for run in runs) == sum(e.spec.nbytes for e in parts)


EXTENTS = st.lists(
    st.builds(
        Extent,
        path=st.sampled_from([A, B]),
        offset=st.integers(0, 300),
        length=st.integers(0, 60),
    ),
    max_size=12,
)


@given(extents=EXTENTS, alignment=st.sampled_from([1, 8, 32]), gap=st.integers(0, 64))
def test_properties(extents, alignment, gap):
    runs = plan_runs(extents, alignment=alignment, max_gap_bytes=gap)
    assert sorted(idx for run in runs for idx, _ in run.pieces) == [
        idx for idx, e in enumerate(extents) if e.length
    ]
    for run in runs:
        assert run.offset % alignment == run.length % alignment == 0
        covered = set()
        for idx, inside in run.pieces:
            piece = extents[idx]
            assert (piece.path, piece.offset) == (run.path, run.offset + inside)
            assert inside + piece.length <= run.required_bytes <= run.length
            covered |= set(range(piece.offset, piece.end))
        assert run.needed_bytes == len(covered)
        assert run.length - run.required_bytes < alignment
        assert min(covered) - run.offset < alignment
    for left, right in itertools.pairwise(runs):
        if left.path == right.path:
            # Apart by a whole block at least, or they would have been one read.
            assert left.offset + left.length < right.offset
            first = min(extents[idx].offset for idx, _ in right.pieces)
            assert first - (left.offset + left.required_bytes) > gap
        else:
            assert left.path < right.path


@given(extents=EXTENTS, gap=st.integers(0, 64))
def test_a_gap_is_never_longer_than_asked_for(extents, gap):
    for run in plan_runs(extents, alignment=1, max_gap_bytes=gap):
        pieces = sorted((extents[idx] for idx, _ in run.pieces), key=lambda e: e.offset)
        end = pieces[0].end
        for piece in pieces:
            assert piece.offset - end <= gap
            end = max(end, piece.end)
