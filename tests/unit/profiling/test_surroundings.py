import os

import pytest

from zeroinfer.profiling.surroundings import (
    describe_filesystems,
    describe_machine,
    read_io_limits,
)


def put(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_limits_of_v1_groups_are_read(tmp_path):
    put(tmp_path, "proc/self/cgroup", "5:memory:/other\n4:blkio:/jobs/a\n0::/\n")
    group = "sys/fs/cgroup/blkio/jobs/a/blkio.throttle.read_bps_device"
    put(tmp_path, group, "254:0 800000000\n")
    assert read_io_limits(tmp_path) == "blkio.throttle.read_bps_device 254:0 800000000"


def test_limits_of_v2_groups_are_read(tmp_path):
    put(tmp_path, "proc/self/cgroup", "0::/jobs/a\n")
    put(tmp_path, "sys/fs/cgroup/jobs/a/io.max", "254:0 rbps=1000 wbps=max riops=max wiops=max\n")
    assert read_io_limits(tmp_path) == "io.max 254:0 rbps=1000 wbps=max riops=max wiops=max"


def test_a_limit_of_an_ancestor_counts(tmp_path):
    put(tmp_path, "proc/self/cgroup", "0::/jobs/a/b\n")
    put(tmp_path, "sys/fs/cgroup/jobs/io.max", "254:0 rbps=1000\n")
    put(tmp_path, "sys/fs/cgroup/jobs/a/b/io.max", "")
    assert read_io_limits(tmp_path) == "io.max 254:0 rbps=1000"


def test_other_groups_do_not_count(tmp_path):
    put(tmp_path, "proc/self/cgroup", "0::/jobs/a\n")
    put(tmp_path, "sys/fs/cgroup/jobs/b/io.max", "254:0 rbps=1000\n")
    assert read_io_limits(tmp_path) == ""


def test_no_control_groups_at_all(tmp_path):
    assert read_io_limits(tmp_path) == ""


def test_the_machine_is_its_processor_and_cpus(tmp_path):
    put(tmp_path, "proc/cpuinfo", "processor : 0\nmodel name\t: Fast 9000\nmodel name\t: Other\n")
    num_cpus = len(os.sched_getaffinity(0))
    assert describe_machine(tmp_path) == f"Fast 9000, {num_cpus} CPUs"
    assert describe_machine(tmp_path / "nowhere").endswith(f", {num_cpus} CPUs")


def test_filesystems_are_named_once_each(tmp_path):
    number = f"{os.major(tmp_path.stat().st_dev)}:{os.minor(tmp_path.stat().st_dev)}"
    put(
        tmp_path,
        "proc/self/mountinfo",
        f"30 1 {number} / /data rw,noatime shared:1 - xfs /dev/nvme0n1 rw\n"
        "31 1 250:9 / /other rw - ext4 /dev/sda rw\n",
    )
    for name in ("a", "b"):
        (tmp_path / name).touch()
    assert describe_filesystems([tmp_path / "a", tmp_path / "b"], tmp_path) == "xfs /dev/nvme0n1"
    put(tmp_path, "proc/self/mountinfo", "")
    assert describe_filesystems([tmp_path / "a"], tmp_path) == f"device {number}"


def test_a_missing_file_has_no_file_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        describe_filesystems([tmp_path / "missing"])
