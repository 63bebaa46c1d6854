"""What this machine can do, as plain data that the planner reads.

``zeroinfer.profiling`` measures it; nothing here touches a disk or loads torch.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from zeroinfer.units import MIB

__all__ = ["DiskCell", "MatmulRate", "Profile"]

SCHEMA_VERSION = 1
_SOURCES = ("measured", "cached", "assumed")


class DiskCell(NamedTuple):
    """One measured cell of the chunk x depth grid."""

    io_chunk_bytes: int
    queue_depth: int
    read_bytes_per_s: float


class MatmulRate(NamedTuple):
    """The measured rate of products with one number of activation rows."""

    dtype: str
    """Short name of the weights' dtype: bf16, fp16, fp32."""
    mode: str
    """How the product is made: native, fused or upcast, or cuda on a GPU (measured by each run)."""
    num_rows: int
    flops_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Rates of one machine and the file system that weights lie on."""

    nvme_read_bytes_per_s: float
    """Direct reads at the chosen chunk and depth."""
    io_chunk_bytes: int
    """Bytes of one read call."""
    queue_depth: int
    """Reads in flight."""
    dram_copy_bytes_per_s: float
    """Bytes copied from DRAM to DRAM, each counted once."""
    h2d_bytes_per_s: float | None = None
    """Host to device copies; None without a GPU."""
    matmul_flops_per_s: tuple[MatmulRate, ...] = ()
    """Product rates by dtype, mode and row count."""
    grid: tuple[DiskCell, ...] = ()
    """Every cell that was measured, for the table of ``zeroinfer profile``."""
    source: str = "measured"
    """``measured``, ``cached`` or ``assumed``."""
    measured_at_unix_s: float = 0.0
    """When it was measured; 0 if it was not."""
    filesystem: str = ""
    """Type, device and mount point of the weights' file systems."""

    def __post_init__(self) -> None:
        if self.source not in _SOURCES:
            raise ValueError(f"profile source must be one of {_SOURCES}, got {self.source!r}")
        for name in ("nvme_read_bytes_per_s", "io_chunk_bytes", "queue_depth",
                     "dram_copy_bytes_per_s"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"profile {name} must be positive, got {getattr(self, name)}")

    @classmethod
    def assumed(cls) -> "Profile":
        """Return low figures for a machine that was not measured."""
        return cls(
            nvme_read_bytes_per_s=0.5e9,
            io_chunk_bytes=2 * MIB,
            queue_depth=2,
            dram_copy_bytes_per_s=4e9,
            matmul_flops_per_s=_ASSUMED_RATES,
            source="assumed",
        )

    def matmul_rate(self, dtype: str, mode: str, num_rows: int) -> float:
        """Return the flops per second of products with `num_rows` activation rows.

        Between measured row counts the rate follows a power law; below the smallest it shrinks
        with the rows, since the weight's bytes then cost the time; above the largest it stays.
        What was not measured is taken from the assumed figures, of the same mode if need be; of a
        GPU nothing is assumed.

        Raises:
            ValueError: `num_rows` is below 1, or the mode has no rate.
        """
        if num_rows < 1:
            raise ValueError(f"num_rows must be at least 1, got {num_rows}")
        for rates in (self.matmul_flops_per_s, _ASSUMED_RATES):
            points = sorted((r[2], r[3]) for r in rates if r[0] == dtype and r[1] == mode)
            if points:
                return _interpolate(points, num_rows)
        same_mode = sorted((r[2], r[3]) for r in _ASSUMED_RATES if r[1] == mode)
        if not same_mode:
            raise ValueError(
                f"product mode must be native, fused, upcast or a measured one, got {mode!r}"
            )
        return _interpolate(same_mode, num_rows)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data with a schema version."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        data["matmul_flops_per_s"] = [list(rate) for rate in self.matmul_flops_per_s]
        data["grid"] = [list(cell) for cell in self.grid]
        return {"schema": SCHEMA_VERSION, **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Profile":
        """Read what ``to_dict`` gave.

        Raises:
            ValueError: another schema version, or a field is missing, unknown or out of range.
        """
        if data.get("schema") != SCHEMA_VERSION:
            raise ValueError(
                f"profile schema is unknown: got {data.get('schema')!r}, need {SCHEMA_VERSION}"
            )
        fields = {key: value for key, value in data.items() if key != "schema"}
        try:
            rates = tuple(MatmulRate(*rate) for rate in fields.pop("matmul_flops_per_s"))
            grid = tuple(DiskCell(*cell) for cell in fields.pop("grid"))
            return cls(matmul_flops_per_s=rates, grid=grid, **fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"profile is damaged: {error}") from error


def _interpolate(points: list[tuple[int, float]], num_rows: int) -> float:
    """Interpolate sorted (rows, rate) points as a power law."""
    if num_rows <= points[0][0]:
        return points[0][1] * num_rows / points[0][0]
    for (rows_0, rate_0), (rows_1, rate_1) in itertools.pairwise(points):
        if num_rows <= rows_1:
            share = math.log(num_rows / rows_0) / math.log(rows_1 / rows_0)
            return math.exp(math.log(rate_0) + share * math.log(rate_1 / rate_0))
    return points[-1][1]


def _rates(dtype: str, mode: str, *giga_flops: float) -> tuple[MatmulRate, ...]:
    rows = (1, 16, 64, 256)
    return tuple(
        MatmulRate(dtype, mode, num_rows, rate * 1e9)
        for num_rows, rate in zip(rows, giga_flops, strict=True)
    )


# Two cores with AVX2 and one memory channel do better than this.
_ASSUMED_RATES = (
    *_rates("fp32", "native", 3, 30, 60, 80),
    *_rates("bf16", "native", 5, 15, 15, 20),
    *_rates("bf16", "upcast", 2, 20, 50, 70),
    *_rates("fp16", "upcast", 2, 20, 50, 70),
    *_rates("fp32", "fused", 3, 30, 60, 80),
    *_rates("bf16", "fused", 6, 40, 60, 80),
    *_rates("fp16", "fused", 6, 40, 60, 80),
)
