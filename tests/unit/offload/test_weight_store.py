"""Homes of units: inside their arenas, disjoint where they must be, and given back."""

from itertools import combinations

import pytest
import torch

from tests.helpers.streams import open_stream, write_weights
from zeroinfer.dtypes import DType
from zeroinfer.native import torch_dtype


@pytest.fixture
def weights(tmp_path):
    return write_weights(tmp_path / "weights.bin")


def test_resident_homes_never_overlap(weights):
    with open_stream(weights, dram_weights_bytes=90_000) as stream:
        homes = [home for home in stream.store.homes.values() if home.is_resident]
        assert len(homes) == len(stream.plan.resident) > 2
        for one, other in combinations(homes, 2):
            assert one.arena is other.arena
            assert (
                one.offset + one.footprint <= other.offset
                or other.offset + other.footprint <= one.offset
            )


def test_streamed_homes_are_the_places_of_the_ring(weights):
    with open_stream(weights, dram_weights_bytes=90_000) as stream:
        plan, homes = stream.plan, stream.store.homes
        assert set(homes) == plan.resident | set(plan.streamed)
        for position, idx in enumerate(plan.streamed):
            assert not homes[idx].is_resident
            assert homes[idx].offset == plan.ring.offsets[position]
            assert homes[idx].footprint == plan.footprints[idx]
            assert homes[idx].arena.num_bytes == plan.ring.num_bytes


def test_tensors_are_views_of_the_place_that_reads_land_in(weights):
    with open_stream(weights, weights="nvme") as stream:
        home = stream.store.homes[stream.plan.streamed[4]]
        home.arena.poison(home.offset, home.footprint)
        assert all(torch.isnan(tensor).all() for tensor in home.tensors.values())
        for run in home.runs:
            run.destination[:] = bytes(len(run.destination))
        assert all((tensor == 0).all() for tensor in home.tensors.values())


def test_closed_store_has_no_homes_and_kept_views_read_zeros(weights):
    with open_stream(weights, weights="nvme", is_poisoned=False) as stream:
        stream.run_step(has_next=False)
        kept = stream.store.homes[stream.plan.streamed[-1]].tensors["head"]
        assert kept.any()
        stream.store.close()
        stream.store.close()
        assert stream.store.homes == {}
        assert not kept.any()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (DType.BF16, torch.bfloat16),
        (DType.F16, torch.float16),
        (DType.F32, torch.float32),
        (DType.F64, torch.float64),
    ],
)
def test_float_types_have_their_torch_names(dtype, expected):
    assert torch_dtype(dtype) == expected
