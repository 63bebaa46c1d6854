"""Which device computes, which tiers it has, and how much of its memory may be used."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.engines import engine_config
from zeroinfer.engine.devices import (
    CUDA_MODE,
    check_settings,
    gpu_budget,
    open_device,
    with_device_rates,
)
from zeroinfer.errors import BackendUnavailableError, CapacityError, ConfigError
from zeroinfer.memory import CpuDevice, DoubleDevice
from zeroinfer.native import ProductKernel
from zeroinfer.planner import Profile
from zeroinfer.units import GIB


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("wanted", ["auto", "cpu"])
def test_without_a_gpu_the_cpu_computes(no_gpu, wanted):
    device = open_device(engine_config({"compute.device": wanted}))
    assert isinstance(device, CpuDevice)


def test_gpu_that_is_asked_for_by_name_must_be_there(no_gpu):
    with pytest.raises(BackendUnavailableError, match="CUDA device 0 is not available"):
        open_device(engine_config({"compute.device": "cuda"}))


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("offload.weights", "gpu", "auto, dram or nvme"),
        ("offload.gpu_memory", "20GiB", "offload.dram"),
        ("kv.tier", "gpu", "auto or dram"),
    ],
)
def test_tiers_of_a_gpu_are_refused_on_a_cpu(key, value, instead):
    with pytest.raises(ConfigError) as caught:
        check_settings(engine_config({key: value}), CpuDevice())
    assert str(caught.value) == (
        f"{key} needs a GPU, and this run computes on the CPU; use {instead}, or a CUDA build of "
        "torch on a machine with one"
    )


def test_tiers_of_a_cpu_are_refused_on_a_gpu():
    with DoubleDevice.open() as device:
        check_settings(engine_config({"offload.weights": "gpu", "kv.tier": "gpu"}), device)
        with pytest.raises(ConfigError, match=r"kv\.tier: dram is not available with a GPU"):
            check_settings(engine_config({"kv.tier": "dram"}), device)


def test_compiled_kernels_are_refused_on_a_gpu():
    wanted = engine_config({"compute.fused_kernels": "on"})
    check_settings(wanted, CpuDevice())
    with DoubleDevice.open() as device:
        check_settings(wanted, device)
        device.torch_device = torch.device("cuda")
        check_settings(engine_config({"compute.fused_kernels": "off"}), device)
        with pytest.raises(ConfigError) as caught:
            check_settings(wanted, device)
    assert str(caught.value) == (
        "compute.fused_kernels: on is not available with a GPU, since the kernels run on the CPU; "
        "use auto or off, or compute.device: cpu"
    )


def test_budget_is_what_is_free_less_a_margin_that_is_said():
    budget, (note,) = gpu_budget(engine_config(), 10 * GIB)
    assert budget == 10 * GIB - int(0.05 * 10 * GIB) - GIB // 4
    assert note.startswith("--gpu-memory not given: 9.2 GiB, what the device has free less a mar")
    assert gpu_budget(engine_config(), 1000)[0] == 0


def test_budget_that_was_set_is_kept_unless_it_is_not_free():
    config = engine_config({"offload.gpu_memory": "4GiB"})
    assert gpu_budget(config, 10 * GIB) == (4 * GIB, ())
    with pytest.raises(CapacityError) as caught:
        gpu_budget(config, 3 * GIB)
    assert str(caught.value) == (
        "--gpu-memory 4.0 GiB is more than the device has free: got 3.0 GiB; lower it or end what "
        "else runs there"
    )


def test_rates_of_a_device_join_the_profile():
    kernel, profile = ProductKernel.resolve(torch.float32), Profile.assumed()
    assert with_device_rates(profile, CpuDevice(), kernel, "fp32") is profile
    with DoubleDevice.open(bytes_per_s=5e9) as device:
        joined = with_device_rates(profile, device, kernel, "fp32")
        assert joined.h2d_bytes_per_s == 5e9
        assert joined.matmul_flops_per_s == profile.matmul_flops_per_s


def test_link_and_products_of_a_gpu_are_measured(monkeypatch):
    """A double that says it is a GPU of unknown speed, and products that take no time here."""
    monkeypatch.setattr("zeroinfer.engine.devices._LINK_PROBE_BYTES", 1 << 20)
    products = SimpleNamespace(calls=[])

    def measure(kernel, torch_device, *, dtype, mode, finish):
        finish()
        products.calls.append((torch_device.type, dtype, mode))
        return ()

    monkeypatch.setattr("zeroinfer.engine.devices.measure_device_products", measure)
    with DoubleDevice.open(bytes_per_s=50e6) as device:
        device.name, device.link_bytes_per_s = CUDA_MODE, None
        joined = with_device_rates(
            Profile.assumed(), device, ProductKernel.resolve(torch.float32), "fp32"
        )
    assert 30e6 < joined.h2d_bytes_per_s <= 50e6
    assert products.calls == [("cpu", "fp32", CUDA_MODE)]
    assert device.used_bytes == 0
