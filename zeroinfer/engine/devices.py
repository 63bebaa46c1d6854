"""The compute device of a run: which one, what the plan must know of it, how fast it is."""

import contextlib
from dataclasses import replace

import torch

from zeroinfer.config import EngineConfig
from zeroinfer.counters import Trace
from zeroinfer.errors import CapacityError, ConfigError
from zeroinfer.memory import Arena, CpuDevice, CudaDevice, HostPins, TransferEngine
from zeroinfer.native import ProductKernel
from zeroinfer.planner import Profile
from zeroinfer.profiling import measure_device_products, measure_link
from zeroinfer.units import MIB, format_bytes

__all__ = ["CUDA_MODE", "check_settings", "gpu_budget", "open_device", "with_device_rates"]

CUDA_MODE = "cuda"
"""Name of the products of a GPU among the rates of a profile."""

_LINK_PROBE_BYTES = 64 * MIB
_MARGIN_SHARE = 0.05
_MARGIN_BYTES = 256 * MIB
"""Left free on a device beside the share: its libraries take memory when they are first used."""


def open_device(config: EngineConfig, trace: Trace | None = None) -> TransferEngine:
    """Open the device that the settings name; auto is the first GPU, if torch finds one.

    Raises:
        BackendUnavailableError: a GPU is asked for by name and there is none.
    """
    wanted = config.compute.device
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        return CudaDevice.open(trace=trace)
    return CpuDevice()


def check_settings(config: EngineConfig, device: TransferEngine) -> None:
    """Refuse tiers that this device does not have, and kernels that it cannot run.

    Raises:
        ConfigError: a setting needs another device.
    """
    if device.free_bytes is not None:
        if config.kv.tier == "dram":
            raise ConfigError(
                "kv.tier: dram is not available with a GPU, which keeps keys and values itself; "
                "use auto or gpu"
            )
        if config.compute.fused_kernels == "on" and device.torch_device.type != "cpu":
            raise ConfigError(
                "compute.fused_kernels: on is not available with a GPU, since the kernels run on "
                "the CPU; use auto or off, or compute.device: cpu"
            )
        return
    given = (
        ("offload.weights", config.offload.weights == "gpu", "auto, dram or nvme"),
        ("offload.gpu_memory", config.offload.gpu_memory is not None, "offload.dram"),
        ("kv.tier", config.kv.tier == "gpu", "auto or dram"),
    )
    for key, is_given, instead in given:
        if is_given:
            raise ConfigError(
                f"{key} needs a GPU, and this run computes on the CPU; use {instead}, or a CUDA "
                "build of torch on a machine with one"
            )


def gpu_budget(config: EngineConfig, free_bytes: int) -> tuple[int, tuple[str, ...]]:
    """Return the device memory that may be used, and what to say about it.

    Raises:
        CapacityError: more is asked for than is free.
    """
    wanted = config.offload.gpu_memory
    if wanted is None:
        margin_bytes = min(free_bytes, int(_MARGIN_SHARE * free_bytes) + _MARGIN_BYTES)
        note = (
            f"--gpu-memory not given: {format_bytes(free_bytes - margin_bytes)}, what the device "
            f"has free less a margin of {format_bytes(margin_bytes)}"
        )
        return free_bytes - margin_bytes, (note,)
    if wanted > free_bytes:
        raise CapacityError(
            f"--gpu-memory {format_bytes(wanted)} is more than the device has free: got "
            f"{format_bytes(free_bytes)}; lower it or end what else runs there"
        )
    return wanted, ()


def with_device_rates(
    profile: Profile, device: TransferEngine, kernel: ProductKernel, dtype: str
) -> Profile:
    """Return the profile with the rates of a device's link and, of a GPU, its products.

    They take about a second and are measured anew by every run.
    """
    if device.free_bytes is None:
        return profile
    rate = device.link_bytes_per_s or _measure_link(device)
    if device.name != CUDA_MODE:
        return replace(profile, h2d_bytes_per_s=rate)
    products = measure_device_products(
        kernel,
        device.torch_device,
        dtype=dtype,
        mode=CUDA_MODE,
        finish=lambda: device.synchronize(device.record()),
    )
    if isinstance(device, CudaDevice):
        # What was measured with is gone before anything of the run is taken.
        device.reset_peak()
    rates = (*profile.matmul_flops_per_s, *products)
    return replace(profile, h2d_bytes_per_s=rate, matmul_flops_per_s=rates)


def _measure_link(device: TransferEngine) -> float:
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(
            Arena.create(_LINK_PROBE_BYTES, name="link probe", is_prefaulted=True)
        )
        pins = stack.enter_context(HostPins(device.pinner))
        pins.pin(source, 0, _LINK_PROBE_BYTES)
        target = device.allocate(_LINK_PROBE_BYTES, name="link probe")
        stack.callback(target.close)
        shape = (_LINK_PROBE_BYTES,)
        pair = (target.tensor(0, shape, torch.uint8), source.tensor(0, shape, torch.uint8))
        return measure_link(lambda: device.synchronize(device.copy([pair])), _LINK_PROBE_BYTES)
