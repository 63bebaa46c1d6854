import dataclasses
import json

import pytest

from zeroinfer.planner import DiskCell, MatmulRate, Profile

PROFILE = Profile(
    nvme_read_bytes_per_s=2e9,
    io_chunk_bytes=1 << 20,
    queue_depth=4,
    dram_copy_bytes_per_s=1e10,
    matmul_flops_per_s=(
        MatmulRate("bf16", "native", 256, 1.6e12),
        MatmulRate("bf16", "native", 1, 2e10),
        MatmulRate("bf16", "native", 16, 4e11),
    ),
    grid=(DiskCell(1 << 20, 4, 2e9), DiskCell(1 << 20, 1, 1e9)),
    measured_at_unix_s=1.5,
    filesystem="ext4 /dev/vda",
)


def test_a_profile_survives_json():
    assert Profile.from_dict(json.loads(json.dumps(PROFILE.to_dict()))) == PROFILE


def test_to_dict_has_the_keys_of_the_report():
    assert PROFILE.to_dict().keys() >= {
        "nvme_read_bytes_per_s", "io_chunk_bytes", "queue_depth", "dram_copy_bytes_per_s",
        "h2d_bytes_per_s", "matmul_flops_per_s",
    }  # fmt: skip


def test_measured_rates_are_returned_as_they_are():
    for rate in PROFILE.matmul_flops_per_s:
        measured = PROFILE.matmul_rate("bf16", "native", rate.num_rows)
        assert measured == pytest.approx(rate.flops_per_s)


def test_rates_between_rows_follow_a_power_law():
    # 64 is half way from 16 to 256 in the logarithm: the geometric mean.
    assert PROFILE.matmul_rate("bf16", "native", 64) == pytest.approx((4e11 * 1.6e12) ** 0.5)


def test_rates_beyond_the_measured_rows():
    assert PROFILE.matmul_rate("bf16", "native", 4096) == 1.6e12
    few = dataclasses.replace(
        PROFILE, matmul_flops_per_s=(MatmulRate("fp32", "native", 16, 1.6e11),)
    )
    assert few.matmul_rate("fp32", "native", 4) == pytest.approx(4e10)


def test_what_was_not_measured_is_assumed():
    assumed = Profile.assumed()
    assert PROFILE.matmul_rate("fp32", "native", 16) == assumed.matmul_rate("fp32", "native", 16)
    assert assumed.matmul_rate("fp64", "native", 16) > 0
    assert assumed.source == "assumed"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("bf16", "native", 0), "num_rows must be at least 1, got 0"),
        (
            ("bf16", "sideways", 1),
            "mode must be native, fused, upcast or a measured one, got 'side",
        ),
    ],
)
def test_bad_questions_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        PROFILE.matmul_rate(*args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "schema is unknown: got 99, need 1"),
        ({"queue_depth": 0}, "queue_depth must be positive, got 0"),
        ({"source": "guessed"}, "source must be one of .* got 'guessed'"),
        ({"surplus": 1}, "damaged: .*surplus"),
        ({"grid": [[1, 2]]}, "damaged"),
        ({"grid": None}, "damaged"),
    ],
)
def test_damaged_data_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Profile.from_dict({**PROFILE.to_dict(), **change})


def test_a_missing_field_is_refused():
    data = PROFILE.to_dict()
    del data["matmul_flops_per_s"]
    with pytest.raises(ValueError, match="damaged: 'matmul_flops_per_s'"):
        Profile.from_dict(data)
