"""The loop: fetch, compute, release. Weights move here and nowhere else."""

import time
from collections.abc import Sequence

import torch

from zeroinfer.counters import Trace
from zeroinfer.engine.request import StepInterrupted
from zeroinfer.layers import Frame, Rows
from zeroinfer.memory import CpuDevice, Event, TransferEngine
from zeroinfer.models import Stage
from zeroinfer.offload import FetchCoordinator, LandedUnit
from zeroinfer.planner import FetchUnit, UnitPart

__all__ = ["StepLoop"]


class StepLoop:
    """Runs the fetch units of a plan in order over the stages of a model."""

    def __init__(
        self,
        *,
        stages: Sequence[Stage],
        units: Sequence[FetchUnit],
        fetch: FetchCoordinator,
        trace: Trace,
        device: TransferEngine | None = None,
    ) -> None:
        self._stages = stages
        self._units = [unit for unit in units if not unit.is_gathered]
        self._fetch = fetch
        self._trace = trace
        self._device = device or CpuDevice()
        self.compute_s = 0.0
        """Seconds spent in operators, waits for gathered rows left out."""
        self._first_layer: Event | None = None
        self._is_first_step = True
        self._computed: list[tuple[FetchUnit, Event | None, Event]] = []
        """Units of the step on a device that runs behind: where each began and ended."""
        self.is_stop_requested = False
        """Set it, from any thread or signal handler, to end a step after the unit in use."""
        self.checksums: list[torch.Tensor] = []
        """Sum of every hidden row after each stage: finite exactly while all its values are."""

    @property
    def first_layer_stop_s(self) -> float | None:
        """`time.perf_counter` when layer 0 had been computed for the first time."""
        event = self._first_layer
        return event.done_s if event is not None and event.is_done else None

    def run(self, frame: Frame, *, has_next: bool) -> torch.Tensor:
        """Compute one step and return the logits of the wanted rows, in host memory.

        Shapes:
            result: (R, vocab), activation dtype, R the number of `logits_indices`.

        Raises:
            StepInterrupted: a stop was requested.
            StorageError: a read failed.
        """
        self.checksums.clear()
        self._computed.clear()
        begin, before = self._device.record(), (self.compute_s, self._fetch.fetch_wait_s)
        self._fetch.start_step(has_next=has_next)
        for idx, unit in enumerate(self._units):
            landed = self._fetch.acquire(unit.unit_idx)
            start_s, waited_s = time.perf_counter(), self._fetch.fetch_wait_s
            stage = self._stages[unit.stage_idx]
            frame.layer_idx = stage.layer_idx
            for part in unit.parts:
                stage.ops[part.op_idx].run(frame, landed, _rows(part))
            self._fetch.release(unit.unit_idx)
            is_last = idx + 1 == len(self._units)
            if is_last or self._units[idx + 1].stage_idx != unit.stage_idx:
                self._end_stage(stage, frame)
            self._account(unit, landed, start_s, waited_s)
            if self.is_stop_requested:
                raise StepInterrupted
        self._is_first_step = False
        end = self._device.record()
        self._device.synchronize(end)
        if self._device.is_asynchronous:
            # What operators took cannot be seen from here: all that was no waiting was computing.
            waited_s = self._fetch.fetch_wait_s - before[1]
            self.compute_s = before[0] + end.done_s - begin.done_s - waited_s
            self._trace_computed(begin.done_s)
        return frame["logits"][: frame.batch.logits_indices.shape[0]].cpu()

    def first_bad_stage(self, row: int) -> Stage | None:
        """Return the first stage after which a row was not finite, in the last step."""
        for stage, checksum in zip(self._stages, self.checksums, strict=False):
            if not bool(torch.isfinite(checksum[row])):
                return stage
        return None

    def _end_stage(self, stage: Stage, frame: Frame) -> None:
        frame.drop_temporaries(stage.kept)
        if self._is_first_step and stage.layer_idx == 0:
            self._first_layer = self._device.record()
        if "hidden" in stage.kept:
            self.checksums.append(frame["hidden"].sum(-1))

    def _account(
        self, unit: FetchUnit, landed: LandedUnit, start_s: float, waited_s: float
    ) -> None:
        if self._device.is_asynchronous:
            if self._trace.is_enabled:
                self._computed.append((unit, landed.ready, self._device.record()))
            return
        stop_s = time.perf_counter()
        self.compute_s += stop_s - start_s - (self._fetch.fetch_wait_s - waited_s)
        self._trace.add("compute", unit.name, start_s, stop_s)

    def _trace_computed(self, start_s: float) -> None:
        """Trace the units of a step: each from when it was there and the one before was over."""
        for unit, ready, stop in self._computed:
            if ready is not None:
                start_s = max(start_s, ready.done_s)
            self._trace.add("compute", unit.name, start_s, stop.done_s)
            start_s = stop.done_s


def _rows(part: UnitPart) -> Rows | None:
    if part.row_start is None or part.row_stop is None:
        return None
    return Rows(start=part.row_start, stop=part.row_stop)
