"""Machines that presets are planned for, with the rates that the plans count on.

`cpu-box` was measured (tools/results); the others are taken from data sheets: links and disks at
what they sustain, products at 60 % of the peak and 80 % of the memory's bandwidth.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from zeroinfer.planner import MatmulRate, Profile
from zeroinfer.units import GIB, MIB

__all__ = ["HARDWARE", "Hardware", "PlannedGpu"]

_ROWS = (1, 16, 64, 256, 1024)
_CPU_MODES = ("native", "fused", "upcast")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedGpu:
    """A GPU that is not there: the part of a device that plans are made from."""

    free_bytes: int
    link_bytes_per_s: float
    name: str = "cuda"

    @property
    def torch_device(self) -> torch.device:
        """Where what little planning computes is computed."""
        return torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One machine."""

    text: str
    """What it is, for a sentence."""
    profile: Profile
    base_bytes: int
    """What interpreter and libraries take."""
    gpu: PlannedGpu | None = None


def _products(
    modes: Iterable[str], rates: Sequence[float], *, fp32_share: float
) -> tuple[MatmulRate, ...]:
    """Rates at `_ROWS`, flops per second; that share of them in fp32."""
    return tuple(
        MatmulRate(dtype, mode, rows, rate * share)
        for dtype, share in (("bf16", 1.0), ("fp16", 1.0), ("fp32", fp32_share))
        for mode in modes
        for rows, rate in zip(_ROWS, rates, strict=True)
    )


def _with_gpu(
    text: str,
    *,
    num_bytes: int,
    memory_bytes_per_s: float,
    peak_flops: float,
    h2d_bytes_per_s: float,
    dram_copy_bytes_per_s: float,
) -> Hardware:
    # Two operations for each of a weight's two bytes, in every row.
    per_row = 0.8 * memory_bytes_per_s
    rates = [min(per_row * rows, 0.6 * peak_flops) for rows in _ROWS]
    return Hardware(
        text=text,
        base_bytes=GIB,
        gpu=PlannedGpu(free_bytes=num_bytes, link_bytes_per_s=h2d_bytes_per_s),
        profile=Profile(
            nvme_read_bytes_per_s=6.5e9,
            io_chunk_bytes=2 * MIB,
            queue_depth=8,
            dram_copy_bytes_per_s=dram_copy_bytes_per_s,
            h2d_bytes_per_s=h2d_bytes_per_s,
            source="assumed",
            matmul_flops_per_s=_products(("cuda",), rates, fp32_share=0.5),
        ),
    )


HARDWARE = {
    "cpu-box": Hardware(
        text="a box with two AVX2 cores, 24 GiB of memory and one disk of 1.5 GB/s",
        base_bytes=256 * MIB,
        profile=Profile(
            nvme_read_bytes_per_s=1.5e9,
            io_chunk_bytes=2 * MIB,
            queue_depth=4,
            dram_copy_bytes_per_s=9e9,
            # The same for every kernel that the planning machine may have.
            matmul_flops_per_s=_products(
                _CPU_MODES, [9e9, 72e9, 112e9, 125e9, 125e9], fp32_share=0.95
            ),
        ),
    ),
    "a6000": _with_gpu(
        "a workstation with one RTX A6000 of 48 GB (PCIe 4.0), 128 GiB of memory and one NVMe of "
        "6.5 GB/s",
        num_bytes=47 * GIB,
        memory_bytes_per_s=768e9,
        peak_flops=155e12,
        h2d_bytes_per_s=25e9,
        dram_copy_bytes_per_s=20e9,
    ),
    "h200": _with_gpu(
        "a server with one H200 of 141 GB (PCIe 5.0), 256 GiB of memory and one NVMe of 6.5 GB/s",
        num_bytes=139 * GIB,
        memory_bytes_per_s=4.8e12,
        peak_flops=989e12,
        h2d_bytes_per_s=50e9,
        dram_copy_bytes_per_s=40e9,
    ),
}
