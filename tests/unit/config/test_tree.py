from pathlib import Path

import pytest
from pydantic import ValidationError

from zeroinfer.config import EngineConfig, IoConfig, OffloadConfig, load_config
from zeroinfer.errors import ConfigError
from zeroinfer.units import MIB


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "kv.tier=nvme",
            "kv.tier: nvme is not available: this version keeps keys and values in memory; use "
            "auto, gpu or dram",
        ),
        (
            "scheduler.admit=longest",
            "scheduler.admit: longest is not available: this version admits in the order of the "
            "input; use fifo",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("override", "need"),
    [
        ("model.dtype=fp8", "got 'fp8', need auto, bf16, fp16 or fp32"),
        ("offload.weights=disk", "got 'disk', need auto, gpu, dram or nvme"),
        ("offload.prefetch_depth=-1", "got -1, need auto or a whole number, 0 or more"),
        ("offload.prefetch_depth=1.5", "got 1.5, need auto or a whole number, 0 or more"),
        ("offload.prefetch_depth=true", "got True, need auto or a whole number, 0 or more"),
        ("scheduler.prompt_chunk_tokens=auto", "got 'auto', need a whole number, 1 or more"),
        ("scheduler.max_num_seqs=0", "got 0, need auto or a whole number, 1 or more"),
        ("scheduler.admit=", "got None, need fifo"),
        ("offload.dram=lots", "size 'lots' is not understood; write it like 5.5GiB"),
        ("offload.dram=0", "got 0, need a size such as 5.5GiB"),
        ("offload.dram=-5", "got -5, need a size such as 5.5GiB"),
        ("offload.dram=yes", "got True, need a size such as 5.5GiB"),
        ("offload.dram=auto", "size 'auto' is not understood"),
        ("offload.fetch_unit_bytes=null", "got None, need a size such as 5.5GiB"),
        (
            "io.io_chunk_bytes=6KiB",
            "got 6KiB, need auto or a size such as 5.5GiB, in steps of 4KiB",
        ),
        ("offload.debug_poison=1", "got 1, need true or false"),
        ("io.reader=mmap", "got 'mmap', need auto, threads or io_uring"),
        ("io.nvme=[1]", "got [1], need a folder or a list of folders"),
        ("io.nvme=", "got '', need a folder or a list of folders"),
        ("io.nvme=~no-such-user/x", "a home folder nobody has"),
        ("compute.batch_invariant=maybe", "got 'maybe', need auto, on or off"),
    ],
)
def test_wrong_values(override, need):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert str(caught.value).startswith(f"{override.partition('=')[0]}: ")
    assert need in str(caught.value)


def test_text_must_be_text(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("model:\n  path: 123\n")
    with pytest.raises(ConfigError, match="got 123, need text; put it in quotes"):
        load_config(path)


@pytest.mark.parametrize(("text", "value"), [("on", "on"), ("off", "off"), ('"on"', "on")])
def test_on_and_off_survive_yaml(tmp_path, text, value):
    path = tmp_path / "x.yaml"
    path.write_text(f"compute:\n  batch_invariant: {text}\n")
    assert load_config(path).compute.batch_invariant == value
    overrides = [f"compute.batch_invariant={text}"]
    assert load_config(None, overrides).compute.batch_invariant == value


def test_values_have_their_final_type():
    overrides = ["io.io_chunk_bytes=4MiB", "io.queue_depth=3", "offload.debug_poison=true"]
    config = load_config(None, overrides)
    assert config.io.io_chunk_bytes == 4 * MIB
    assert config.io.queue_depth == 3
    assert config.offload.debug_poison is True


def test_home_folder_is_expanded():
    assert load_config(None, ["io.nvme=~/x"]).io.nvme == (Path.home() / "x",)


def test_sections_are_checked_when_built_in_code():
    assert OffloadConfig(fetch_unit_bytes=4096).fetch_unit_bytes == 4096
    with pytest.raises(ValidationError, match="need auto, gpu, dram or nvme"):
        OffloadConfig(weights="disk")
    with pytest.raises(ValidationError, match="prefetch"):
        OffloadConfig(prefetch=1)


def test_config_never_changes():
    config = EngineConfig(io=IoConfig(nvme=(Path("/a"),)))
    with pytest.raises(ValidationError, match="frozen"):
        config.io.queue_depth = 2
    with pytest.raises(ValidationError, match="frozen"):
        config.io = IoConfig()


def test_dump_is_read_back():
    config = load_config(None, ["offload.dram=5GiB", "io.nvme=[/a, /b]"])
    assert EngineConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("key", ["io.queue_depth", "compute.num_threads"])
def test_threads_have_an_upper_end(key):
    with pytest.raises(ConfigError, match="got 100000, need auto or a whole number, 1 to 1024"):
        load_config(None, [f"{key}=100000"])
