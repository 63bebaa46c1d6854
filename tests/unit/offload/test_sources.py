"""What is read for a unit, and where its tensors lie inside the reads."""

import pytest
import torch

from tests.helpers.streams import write_weights
from zeroinfer.native import DIRECT_ALIGNMENT
from zeroinfer.offload import unit_sources
from zeroinfer.planner import build_units


def sources_of(weights, *, target_bytes=8192):
    units = build_units(weights.stages, target_bytes=target_bytes)
    return units, unit_sources(units, weights.extents)


@pytest.mark.parametrize("prefix_bytes", [0, 777, 4096])
def test_every_slice_lies_where_the_file_has_it(tmp_path, prefix_bytes):
    weights = write_weights(tmp_path / "w.bin", prefix_bytes=prefix_bytes)
    data = weights.path.read_bytes()
    units, sources = sources_of(weights)
    for unit, source in zip(units, sources, strict=True):
        assert (source.unit_idx, source.num_bytes) == (unit.unit_idx, unit.num_bytes)
        for piece, place in zip(unit.slices, source.slices, strict=True):
            at = source.runs[place.run_idx].offset + place.offset
            rows = weights.tensors[piece.name][piece.row_start : piece.row_stop]
            assert data[at : at + piece.num_bytes] == rows.view(torch.uint8).numpy().tobytes()
            assert (place.row_start, place.shape) == (piece.row_start, tuple(rows.shape))


def test_runs_are_aligned_and_stand_one_after_the_other(tmp_path):
    _, sources = sources_of(write_weights(tmp_path / "w.bin"), target_bytes=30_000)
    for source in sources:
        ends = [
            start + run.length for start, run in zip(source.run_offsets, source.runs, strict=True)
        ]
        assert list(source.run_offsets) == [0, *ends[:-1]][: len(source.runs)]
        assert source.footprint == (ends[-1] if ends else 0)
        assert all(run.offset % DIRECT_ALIGNMENT == 0 for run in source.runs)


def test_neighbours_of_a_unit_are_one_read(tmp_path):
    weights = write_weights(tmp_path / "w.bin", num_layers=2)
    units, sources = sources_of(weights, target_bytes=1 << 20)
    layer = next(unit for unit in units if unit.name == "l0")
    assert len(layer.slices) == 3
    assert len(sources[layer.unit_idx].runs) == 1


def test_unit_without_tensors_reads_nothing(tmp_path):
    units, sources = sources_of(write_weights(tmp_path / "w.bin"))
    embed = next(unit for unit in units if unit.name == "embed")
    assert sources[embed.unit_idx].runs == ()
    assert sources[embed.unit_idx].footprint == 0
