"""Reader, weight store and coordinator of one plan, opened and closed together."""

import contextlib
import functools
from collections.abc import Mapping
from typing import Self

from zeroinfer.closing import Closing
from zeroinfer.config import EngineConfig
from zeroinfer.counters import Trace
from zeroinfer.engine.prepare import Prepared
from zeroinfer.errors import StorageError
from zeroinfer.memory import Arena, LinkCounters, TransferEngine
from zeroinfer.native import Reader, open_over, open_reader
from zeroinfer.offload import (
    DeviceStore,
    DeviceTransport,
    FetchCoordinator,
    Home,
    RowTable,
    WeightStore,
)
from zeroinfer.planner import Plan

__all__ = ["Streaming"]


class Streaming(Closing):
    """Owns what moves weights, the device among it."""

    def __init__(
        self,
        *,
        reader: Reader,
        store: WeightStore | DeviceStore,
        staging: Arena,
        fetch: FetchCoordinator,
        device: TransferEngine,
    ) -> None:
        self.reader = reader
        self.fetch = fetch
        self.device = device
        self._store = store
        self._staging = staging
        counters = device.counters
        self._before = counters.bytes_copied, counters.busy_s

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        prepared: Prepared,
        plan: Plan,
        trace: Trace,
        *,
        reader: Reader | None = None,
    ) -> Self:
        """Start the reader, allocate the arenas, build the coordinator.

        Args:
            config: reader and debug settings.
            prepared: sources of the units.
            plan: where everything goes.
            trace: receives reads and waits.
            reader: used instead of the configured one; for tests.

        Raises:
            BackendUnavailableError: the reader was asked for by name and is not available.
            CapacityError: the system refuses the memory.
            StorageError: a file cannot be opened.
        """
        with contextlib.ExitStack() as stack:
            profile = prepared.profile
            if reader is None:
                open_one = functools.partial(
                    open_reader,
                    config.io.reader,
                    io_chunk_bytes=profile.io_chunk_bytes,
                    queue_depth=profile.queue_depth,
                )
                paths = {extent.path for extent in prepared.tensors.values()}
                reader = open_over(paths, open_one, trace=trace)
            stack.callback(reader.close)
            store = _open_store(prepared, plan, reader)
            stack.callback(store.close)
            staging = stack.enter_context(
                Arena.create(plan.staging_bytes, name="staging rows", is_prefaulted=False)
            )
            fetch = FetchCoordinator(
                plan=plan,
                homes=store.homes,
                tables=_row_tables(prepared, store, reader, staging),
                reader=reader,
                transport=_transport(config, prepared, store, reader),
                is_poisoned=config.offload.debug_poison,
                trace=trace,
            )
            stack.pop_all()
        return cls(reader=reader, store=store, staging=staging, fetch=fetch, device=prepared.device)

    @property
    def link(self) -> LinkCounters:
        """What the link to the device carried since this was opened."""
        now = self.device.counters
        bytes_before, busy_before_s = self._before
        return LinkCounters(
            bytes_copied=now.bytes_copied - bytes_before, busy_s=now.busy_s - busy_before_s
        )

    def check_moved(self, plan: Plan, *, num_steps: int) -> None:
        """Make sure that each link carried at least what the plan streams over it, in sum.

        Padding, resident weights, gathered rows and what is read ahead count as moved too: a tier
        that carries nothing shows, one read too few need not.

        Args:
            plan: what a step streams.
            num_steps: steps finished since this was opened.

        Raises:
            StorageError: fewer bytes came than the plan streams.
        """
        moved = (
            ("read from nvme", plan.streamed_bytes, self.reader.counters.bytes_read),
            ("copied to the gpu", plan.h2d_bytes, self.link.bytes_copied),
        )
        for what, planned, num_bytes in moved:
            if num_bytes < planned * num_steps:
                raise StorageError(
                    f"the plan has {planned * num_steps} bytes {what} in {num_steps} step(s), only "
                    f"{num_bytes} were; please report this as a bug"
                )

    def close(self) -> None:
        """Wait for reads and copies in flight, then give the memory back; idempotent."""
        self.reader.close()
        self.device.close()
        self._store.close()
        self._staging.close()


def _open_store(prepared: Prepared, plan: Plan, reader: Reader) -> WeightStore | DeviceStore:
    if plan.gpu is None:
        return WeightStore.open(plan, prepared.sources, reader=reader)
    return DeviceStore.open(plan, prepared.sources, reader=reader, device=prepared.device)


def _transport(
    config: EngineConfig, prepared: Prepared, store: WeightStore | DeviceStore, reader: Reader
) -> DeviceTransport | None:
    if isinstance(store, WeightStore):
        return None
    return DeviceTransport(
        store=store,
        reader=reader,
        device=prepared.device,
        is_poisoned=config.offload.debug_poison,
    )


def _row_tables(
    prepared: Prepared, store: WeightStore | DeviceStore, reader: Reader, staging: Arena
) -> dict[str, RowTable]:
    names = {
        param.name for stage in prepared.model.stages for op in stage.ops for param in op.gathered
    }
    return {
        name: RowTable(
            name=name,
            extent=prepared.tensors[name],
            file=reader.open_file(prepared.tensors[name].path),
            pieces=_resident_pieces(store.host_homes, name),
            device_pieces=_resident_pieces(store.device_homes, name),
            staging=staging,
        )
        for name in names
    }


def _resident_pieces(homes: Mapping[int, Home], name: str) -> tuple[Home, ...]:
    return tuple(home for home in homes.values() if home.is_resident and name in home.tensors)
