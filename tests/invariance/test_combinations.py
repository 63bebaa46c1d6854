"""Forms of a model's files and ways of streaming them, in pairs that nothing else tries together.

Every row below is one of each: a family, a spelling of its names, how its head is kept, element
types, layout of the files, home of the weights, depth, reader, device, schedule, kernels. The rows
are chosen so that any two values meet in some row. Oracle of each: the same values in one fp32 file
under the family's own names, resident, fetched when needed and no sooner.
"""

import functools
from functools import partial

import pytest
import torch

from tests.helpers import forms
from tests.helpers.covering import cover
from tests.helpers.engines import assert_same_bits, greedy_requests, plan_of, run_requests
from tests.helpers.forms import Form, save_form, table_name
from tests.helpers.rings import open_uring_reader
from zeroinfer.memory import DoubleDevice
from zeroinfer.native import ThreadReader

KIB = 1024
REQUESTS = greedy_requests([[5, 250, 17, 33, 299, 2, 8], [77], range(100, 121)], max_tokens=2)
PLAIN = {"offload.weights": "dram", "offload.prefetch_depth": 0}
COMPUTE = {
    "fp32-fused": ("fused", {"model.dtype": "fp32", "scheduler.prompt_chunk_tokens": 4}),
    "bf16-fused": ("fused", {"model.dtype": "bf16"}),
    "fp16-fused": ("fused", {"model.dtype": "fp16", "scheduler.prompt_chunk_tokens": 4}),
    "bf16-native": ("native", {"model.dtype": "bf16", "scheduler.prompt_chunk_tokens": 4}),
    "fp32-torch": ("native", {"model.dtype": "fp32", "compute.fused_kernels": "off"}),
    "bf16-torch": (
        "upcast",
        {"model.dtype": "bf16", "compute.fused_kernels": "off", "scheduler.prompt_chunk_tokens": 4},
    ),
    "fp16-torch": ("upcast", {"model.dtype": "fp16", "compute.fused_kernels": "off"}),
}
"""Way of multiplying, element type, kernels and grid of prompts: what may change bits."""
SCHEDULES = {
    "together": {"scheduler.max_num_seqs": 3, "scheduler.max_num_batched_tokens": 40},
    "alone": {"scheduler.max_num_seqs": 1, "scheduler.max_num_batched_tokens": 30},
    "cut": {
        "scheduler.max_num_seqs": 2, "scheduler.max_num_batched_tokens": 23, "kv.block_size": 5,
    },
}  # fmt: skip
READERS = {"threads": ThreadReader.open, "io_uring": open_uring_reader}
UNITS = {"pieces": 8 * KIB, "stages": 1024 * KIB}
"""Fetch units that cut a table of tokens, and units of whole stages."""
AXES = {
    "family": forms.FAMILIES,
    "files": forms.FILES,
    "compute": tuple(COMPUTE),
    "home": ("resident", "most", "half", "least", "nvme"),
    "dtype": forms.DTYPES,
    "names": forms.NAMES,
    "head": ("tied", "twice", "untied"),
    "depth": ("0", "1", "auto"),
    "schedule": tuple(SCHEDULES),
    "device": ("cpu", "double"),
    "reader": ("threads", "io_uring"),
    "units": tuple(UNITS),
}
ROWS = cover(
    AXES, is_possible=forms.is_possible, threes=("home", "names", "head", "device", "units")
)


@pytest.fixture(autouse=True)
def least_tiles(many_tiles, monkeypatch):
    """Tiles of the fewest rows there can be, so that a table of 300 tokens is cut."""
    monkeypatch.setattr("zeroinfer.native.products._UPCAST_TILE_BYTES", KIB)
    monkeypatch.setattr("zeroinfer.native.products._NATIVE_TILE_BYTES", KIB)


@pytest.fixture
def run_row(force_mode, monkeypatch, tmp_path):
    """Save the form of a row and run it as the row says."""
    # Folders stand for disks: the files of a striped store then come from three readers.
    monkeypatch.setattr(
        "zeroinfer.native.striped_reader._device", lambda path: path.resolve().parent.stat().st_ino
    )

    def run(row):
        mode, settings = COMPUTE[row["compute"]]
        force_mode(mode)
        open_one = READERS[row["reader"]]
        monkeypatch.setattr(
            "zeroinfer.engine.streaming.open_reader", lambda _, **options: open_one(**options)
        )
        folder = save_form(_form(row), tmp_path)
        settings = {
            **_fixed(settings),
            **SCHEDULES[row["schedule"]],
            "io.io_chunk_bytes": 8 * KIB,
            "io.queue_depth": 3,
            "offload.fetch_unit_bytes": UNITS[row["units"]],
            "offload.prefetch_depth": row["depth"],
        }
        home = HOMES[row["device"]](row["home"], partial(_plan, folder, settings, row["device"]))
        device = _open_device(row["device"])
        return run_requests(folder, REQUESTS, {**settings, **home}, device=device)

    return run


@pytest.fixture(scope="module")
def plain_runs(tmp_path_factory):
    """Runs of the plainest form, each once."""

    @functools.cache
    def run(family, head, compute):
        folder = save_form(Form(family=family, head=head), tmp_path_factory.mktemp("plain"))
        reader = ThreadReader.open(io_chunk_bytes=8 * KIB, queue_depth=1)
        settings = {**_fixed(COMPUTE[compute][1]), **PLAIN}
        run = run_requests(folder, REQUESTS, settings, reader=reader)
        assert all(torch.isfinite(logits).all() for logits in run.logits)
        return run

    return run


@pytest.fixture
def oracle(plain_runs, force_mode):
    """The plain run of a row."""

    def run(row):
        force_mode(COMPUTE[row["compute"]][0])
        head = "untied" if row["head"] == "untied" else "tied"
        return plain_runs(row["family"], head, row["compute"])

    return run


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.values()))
def test_same_bits(run_row, oracle, row):
    run = run_row(row)
    assert_same_bits(run, oracle(row))
    assert bool(run.plan.streamed) or row["home"] in ("resident", "most")
    assert not run.plan.resident or row["home"] != "nvme"


@pytest.mark.parametrize("device", AXES["device"])
@pytest.mark.parametrize("family", forms.FAMILIES)
def test_some_pieces_of_a_tied_table_in_memory(run_row, oracle, family, device):
    """Names without the outer prefix: a piece is known by its parameter's name, not the file's."""
    row = {
        "family": family, "files": "single", "compute": "fp32-fused", "home": "half",
        "dtype": "fp32", "names": "bare", "head": "tied", "depth": "auto", "schedule": "together",
        "device": device, "reader": "threads", "units": "pieces",
    }  # fmt: skip
    run = run_row(row)
    table = table_name(family)
    pieces = {u.unit_idx for u in run.plan.units if any(s.name == table for s in u.slices)}
    in_memory = pieces & (run.plan.resident if device == "cpu" else run.plan.gpu.dram)
    assert 0 < len(in_memory) < len(pieces)
    assert_same_bits(run, oracle(row))


def _form(row):
    return Form(**{name: row[name] for name in ("family", "head", "names", "dtype", "files")})


def _fixed(settings):
    """Rows of any number beside a row, on the CPU whatever else is there."""
    return {**settings, "compute.batch_invariant": "on", "compute.device": "cpu"}


def _plan(folder, settings, device):
    """Return the plan under which nothing stays."""
    settings = {**settings, "offload.weights": "nvme"}
    return plan_of(folder, REQUESTS, settings, device=_open_device(device))


def _open_device(name):
    return None if name == "cpu" else DoubleDevice.open()


def _half(sizes):
    """Return about half of these sizes together, and not all of them."""
    return min(sum(sizes) // 2 + max(sizes), sum(sizes) - min(sizes))


def _home_on_cpu(home, nothing_stays):
    """`most` has no place for one byte: of an untied model only the table is then left out."""
    if home in ("resident", "nvme"):
        return {"offload.weights": "dram" if home == "resident" else "nvme"}
    plan = nothing_stays()
    sizes = [plan.footprints[idx] for idx in plan.streamed]
    budgets = {"most": sum(plan.footprints) - 1, "half": _half(sizes), "least": max(sizes)}
    return {"offload.dram_weights": budgets[home]}


def _home_on_a_device(home, nothing_stays):
    """`least` is the device's least and all in DRAM, `half` about half of both."""
    if home in ("resident", "nvme"):
        return {"offload.weights": "gpu" if home == "resident" else "nvme"}
    plan = nothing_stays()
    own_bytes = plan.total_gpu_bytes - plan.ring.num_bytes
    sizes = [plan.gpu.footprints[idx] for idx in plan.streamed]
    if home == "half":
        in_dram = _half([plan.footprints[idx] for idx in plan.streamed])
        return {"offload.gpu_memory": own_bytes + _half(sizes), "offload.dram_weights": in_dram}
    weights = {"offload.weights": "dram"} if home == "least" else {}
    budget = max(sizes) if home == "least" else sum(sizes) - 1
    return {**weights, "offload.gpu_memory": own_bytes + budget}


HOMES = {"cpu": _home_on_cpu, "double": _home_on_a_device}
