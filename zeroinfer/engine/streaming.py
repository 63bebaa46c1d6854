"""Reader, weight store and coordinator of one plan, opened and closed together."""

import contextlib
from collections.abc import Mapping
from typing import Self

from zeroinfer.closing import Closing
from zeroinfer.config import EngineConfig
from zeroinfer.counters import Trace
from zeroinfer.engine.prepare import Prepared
from zeroinfer.memory import Arena
from zeroinfer.native import Reader, ThreadReader
from zeroinfer.offload import FetchCoordinator, Home, RowTable, WeightStore
from zeroinfer.planner import Plan

__all__ = ["Streaming"]


class Streaming(Closing):
    """Owns what moves weights."""

    def __init__(
        self, *, reader: Reader, store: WeightStore, staging: Arena, fetch: FetchCoordinator
    ) -> None:
        self.reader = reader
        self.fetch = fetch
        self._store = store
        self._staging = staging

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
            CapacityError: the system refuses the memory.
            StorageError: a file cannot be opened.
        """
        with contextlib.ExitStack() as stack:
            profile = prepared.profile
            if reader is None:
                reader = ThreadReader.open(
                    io_chunk_bytes=profile.io_chunk_bytes,
                    queue_depth=profile.queue_depth,
                    trace=trace,
                )
            stack.callback(reader.close)
            store = stack.enter_context(WeightStore.open(plan, prepared.sources, reader=reader))
            staging = stack.enter_context(
                Arena.create(plan.staging_bytes, name="staging rows", is_prefaulted=False)
            )
            fetch = FetchCoordinator(
                plan=plan,
                homes=store.homes,
                tables=_row_tables(prepared, store.homes, reader),
                staging=staging,
                reader=reader,
                is_poisoned=config.offload.debug_poison,
                trace=trace,
            )
            stack.pop_all()
        return cls(reader=reader, store=store, staging=staging, fetch=fetch)

    def close(self) -> None:
        """Wait for reads in flight, then give the memory back; idempotent."""
        self.reader.close()
        self._store.close()
        self._staging.close()


def _row_tables(
    prepared: Prepared, homes: Mapping[int, Home], reader: Reader
) -> dict[str, RowTable]:
    names = {
        param.name for stage in prepared.model.stages for op in stage.ops for param in op.gathered
    }
    return {
        name: RowTable(
            extent=prepared.tensors[name],
            file=reader.open_file(prepared.tensors[name].path),
            pieces=tuple(
                home for home in homes.values() if home.is_resident and name in home.tensors
            ),
        )
        for name in names
    }
