"""A small file of weights, its plan, and everything that streams it, without a model.

The loop of the engine is replayed by `Stream.run_step`, which compares every landed tensor with
the bytes of the file.
"""

import contextlib
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.helpers.plan_inputs import make_inputs, with_gpu
from zeroinfer.diskformat import TensorExtent
from zeroinfer.dtypes import DType, TensorSpec
from zeroinfer.memory import Arena
from zeroinfer.native import ThreadReader
from zeroinfer.offload import (
    DeviceStore,
    DeviceTransport,
    FetchCoordinator,
    RowTable,
    WeightStore,
    staging_bytes,
    unit_sources,
)
from zeroinfer.planner import OpData, ParamData, Plan, StageData, build_units, make_plan
from zeroinfer.units import MIB

__all__ = ["Stream", "Weights", "open_stream", "write_weights"]

ROWS, COLUMNS = 48, 64
TABLE_ROWS = 700
GATHERED_IDS = (3, 3, TABLE_ROWS - 1)
"""What every step gathers: two rows, 256 bytes."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A file of bf16 tensors one after the other."""

    path: Path
    extents: Mapping[str, TensorExtent]
    tensors: Mapping[str, torch.Tensor]

    @property
    def stages(self):
        """An embedding by row, layers of three tensors, and a head that may be cut."""
        layers = sorted({name.rpartition(".")[0] for name in self.tensors if "." in name})
        table = OpData(gathered=(self.param("embed"),))
        head = OpData(params=(self.param("head"),), tile_rows=16, flops_per_row=1000)
        return [
            StageData(name="embed", ops=(table,)),
            *(StageData(name=layer, ops=self._layer_ops(layer)) for layer in layers),
            StageData(name="head", ops=(head,)),
        ]

    def param(self, name):
        tensor = self.tensors[name]
        row_bytes = tensor.nbytes // tensor.shape[0]
        return ParamData(name=name, num_rows=tensor.shape[0], row_bytes=row_bytes)

    def _layer_ops(self, layer):
        matrices = tuple(
            OpData(params=(self.param(f"{layer}.{name}"),), tile_rows=16) for name in ("a", "b")
        )
        return (OpData(params=(self.param(f"{layer}.norm"),)), OpData(), *matrices)


def write_weights(path, *, num_layers=6, prefix_bytes=4099, columns=COLUMNS, tail_bytes=0):
    """Write random tensors behind an odd number of bytes, so that they lie at odd offsets.

    In the file each has a prefix before its parameter's name, as in many checkpoints.
    """
    shapes = {"embed": (TABLE_ROWS, columns)}
    for layer in range(num_layers):
        shapes[f"l{layer}.norm"] = (ROWS + 1,)
        shapes[f"l{layer}.a"] = (ROWS, columns)
        shapes[f"l{layer}.b"] = (2 * ROWS, columns)
    shapes["head"] = (5 * ROWS, columns)
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    extents, data = {}, bytearray(b"\x5a" * prefix_bytes)
    for name, tensor in tensors.items():
        spec = TensorSpec(name=f"outer.{name}", shape=tuple(tensor.shape), dtype=DType.BF16)
        extents[name] = TensorExtent(spec=spec, path=path, offset=len(data))
        data += tensor.view(torch.uint8).numpy().tobytes()
    path.write_bytes(data + b"\xa5" * tail_bytes)
    return Weights(path=path, extents=extents, tensors=tensors)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One open plan; `events` are the coordinator's (kind, step, unit)."""

    weights: Weights
    plan: Plan
    reader: object
    store: WeightStore | DeviceStore
    fetch: FetchCoordinator
    events: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def units(self):
        """Units that a step acquires, in order."""
        return [unit for unit in self.plan.units if not unit.is_gathered]

    def expected(self, piece):
        return self.weights.tensors[piece.name][piece.row_start : piece.row_stop]

    def use(self, unit):
        """Acquire a unit and compare its tensors with the file."""
        landed = self.fetch.acquire(unit.unit_idx)
        for piece in unit.slices:
            assert torch.equal(landed[piece.name], self.expected(piece)), (unit.name, piece)
        return landed

    def run_step(self, *, has_next, num_units=None):
        """Use and release the first units, all by default; the first stage gathers its rows."""
        self.fetch.start_step(has_next=has_next)
        for unit in self.units[:num_units]:
            landed = self.use(unit)
            if unit.stage_idx == 0:
                ids = torch.tensor(GATHERED_IDS)
                assert torch.equal(landed.gather("embed", ids), self.weights.tensors["embed"][ids])
            self.fetch.release(unit.unit_idx)

    def kinds(self, kind):
        """Units of one kind of event, in order."""
        return [unit_idx for each, _, unit_idx in self.events if each == kind]


@contextmanager
def open_stream(
    file,
    /,
    *,
    reader=None,
    device=None,
    gpu_bytes=None,
    is_poisoned=True,
    target_bytes=8192,
    on_event=None,
    **settings,
):
    """Plan and open; `settings` are fields of PlanInputs. Reader and device are closed on exit.

    With a device, `gpu_bytes` is what weights may use on it, all that is there by default.
    """
    units = build_units(file.stages, target_bytes=target_bytes)
    sources = unit_sources(units, file.extents)
    table = file.extents["embed"]
    row_bytes = table.spec.nbytes // table.spec.shape[0]
    inputs = make_inputs(
        **{
            "units": units,
            "footprints": tuple(source.footprint for source in sources),
            "staging_bytes": staging_bytes([row_bytes]),
            "budget_bytes": 512 * MIB,
            **settings,
        }
    )
    if device is not None:
        inputs = with_gpu(
            inputs,
            footprints=tuple(source.device_footprint for source in sources),
            weight_bytes=device.free_bytes if gpu_bytes is None else gpu_bytes,
            h2d_bytes_per_s=device.link_bytes_per_s,
        )
    plan = make_plan(inputs)
    reader = reader or ThreadReader.open(io_chunk_bytes=8192, queue_depth=3)
    events = []

    def record(kind, step, unit_idx):
        events.append((kind, step, unit_idx))
        if on_event is not None:
            on_event(kind, step, unit_idx)

    with contextlib.ExitStack() as stack:
        store = _open_store(plan, sources, reader, device)
        stack.callback(store.close)
        # Whatever reads and copies do at the end, they do before their memory goes.
        stack.callback(device.close if device is not None else int)
        stack.callback(reader.close)
        staging = stack.enter_context(
            Arena.create(plan.staging_bytes, name="staging", is_prefaulted=False)
        )
        pieces, device_pieces = (
            tuple(h for h in homes.values() if h.is_resident and "embed" in h.tensors)
            for homes in (store.host_homes, store.device_homes)
        )
        rows = RowTable(
            name="embed",
            extent=table,
            file=reader.open_file(table.path),
            pieces=pieces,
            device_pieces=device_pieces,
            staging=staging,
        )
        transport = None
        if device is not None:
            transport = DeviceTransport(
                store=store, reader=reader, device=device, is_poisoned=is_poisoned
            )
        fetch = FetchCoordinator(
            plan=plan,
            homes=store.homes,
            tables={"embed": rows},
            reader=reader,
            transport=transport,
            is_poisoned=is_poisoned,
            on_event=record,
        )
        yield Stream(
            weights=file, plan=plan, reader=reader, store=store, fetch=fetch, events=events
        )
        fetch.drain()


def _open_store(plan, sources, reader, device):
    try:
        if device is None:
            return WeightStore.open(plan, sources, reader=reader)
        return DeviceStore.open(plan, sources, reader=reader, device=device)
    except BaseException:
        reader.close()
        raise
