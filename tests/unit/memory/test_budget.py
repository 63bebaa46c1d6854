"""Source: vllm-project/vllm#47372, budgets taken from the host's memory inside a container."""

import json
import sys

import pytest

from tests.helpers.cgroups import run_limited
from zeroinfer.errors import StorageError
from zeroinfer.memory import MemoryLimit, default_dram_budget, probe_memory_limit
from zeroinfer.units import GIB, MIB

V1_NO_LIMIT = 9223372036854771712
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
V2_MOUNT = "41 31 0:38 {root} {point} rw - cgroup2 cgroup2 rw"


class FakeRoot:
    """A folder of made-up control files, read in place of the machine's."""

    def __init__(self, path):
        self.path = path
        self.write("proc/meminfo", f"MemTotal: {24 * MIB} kB\nMemAvailable: {20 * MIB} kB\n")

    def write(self, name, text):
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def v1(self, path, *, limit, usage, stat=""):
        folder = f"sys/fs/cgroup/memory{path}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", usage)
        self.write(f"{folder}/memory.stat", stat)

    def v2(self, path, *, limit, usage, high="max", stat="", point="sys/fs/cgroup"):
        self.write(f"{point}{path}/memory.max", limit)
        self.write(f"{point}{path}/memory.high", high)
        self.write(f"{point}{path}/memory.current", usage)
        self.write(f"{point}{path}/memory.stat", stat)

    def process(self, *groups, mounts=(), pid="self"):
        self.write(f"proc/{pid}/cgroup", "\n".join(groups))
        self.write(f"proc/{pid}/mountinfo", "\n".join(mounts))

    def probe(self, pid=None):
        return probe_memory_limit(self.path, pid)


@pytest.fixture
def root(tmp_path):
    return FakeRoot(tmp_path)


def test_machine_alone_counts_where_there_are_no_groups(root):
    assert root.probe() == MemoryLimit(
        total_bytes=24 * GIB, available_bytes=20 * GIB, limit_bytes=None, source="machine"
    )


def test_v2_limit_less_use(root):
    root.process("0::/job", mounts=[V2_MOUNT.format(root="/", point="/sys/fs/cgroup")])
    root.v2("/job", limit=512 * MIB, usage=200 * MIB)
    limit = root.probe()
    assert limit.available_bytes == 312 * MIB
    assert limit.limit_bytes == 512 * MIB
    assert limit.source == "cgroup v2 /job"


def test_v2_max_means_none(root):
    root.process("0::/job")
    root.v2("/job", limit="max", usage=200 * MIB)
    assert root.probe().limit_bytes is None
    assert root.probe().source == "machine"


def test_v2_high_counts_like_a_limit(root):
    root.process("0::/job")
    root.v2("/job", limit=2 * GIB, high=GIB, usage=256 * MIB)
    assert root.probe().available_bytes == 768 * MIB


def test_nested_parents_the_one_that_leaves_least_decides(root):
    root.process("0::/a/b/c")
    root.v2("/a/b/c", limit="max", usage=10 * MIB)
    root.v2("/a/b", limit=GIB, usage=100 * MIB)
    root.v2("/a", limit=2 * GIB, usage=1900 * MIB)
    limit = root.probe()
    assert limit.available_bytes == 148 * MIB
    assert limit.limit_bytes == GIB
    assert limit.source == "cgroup v2 /a"


def test_limit_above_the_machine_leaves_the_machine(root):
    root.process("0::/job")
    root.v2("/job", limit=64 * GIB, usage=0)
    limit = root.probe()
    assert (limit.available_bytes, limit.limit_bytes) == (20 * GIB, 64 * GIB)
    assert limit.source == "machine"


def test_v1_limit_less_use(root):
    root.process("4:memory:/docker/x", mounts=[V1_MOUNT.format(root="/")])
    root.v1("/docker/x", limit=512 * MIB, usage=500 * MIB)
    limit = root.probe()
    assert limit.available_bytes == 12 * MIB
    assert limit.source == "cgroup v1 /docker/x"


def test_v1_huge_value_means_none(root):
    root.process("4:memory:/docker/x")
    root.v1("/docker/x", limit=V1_NO_LIMIT, usage=500 * MIB)
    root.v1("", limit=V1_NO_LIMIT, usage=GIB)
    assert root.probe().limit_bytes is None


def test_v1_controller_may_share_its_hierarchy(root):
    root.process("4:cpu,memory:/x", "3:cpuset:/y")
    root.v1("/x", limit=GIB, usage=0)
    assert root.probe().limit_bytes == GIB


def test_v1_limit_of_a_parent_outside_the_mount(root):
    root.process("4:memory:/x")
    root.v1("/x", limit=V1_NO_LIMIT, usage=0, stat=f"hierarchical_memory_limit {GIB}")
    assert root.probe().limit_bytes == GIB


def test_hybrid_machine_asks_both_versions(root):
    point = "/sys/fs/cgroup/unified"
    mounts = [V1_MOUNT.format(root="/"), V2_MOUNT.format(root="/", point=point)]
    root.process("4:memory:/x", "0::/y", mounts=mounts)
    root.v1("/x", limit=4 * GIB, usage=0)
    root.v2("/y", limit=2 * GIB, usage=0, point=point[1:])
    assert root.probe().source == "cgroup v2 /y"
    assert root.probe().limit_bytes == 2 * GIB


def test_container_that_has_its_group_mounted_as_the_top(root):
    root.process("4:memory:/docker/x/job", mounts=[V1_MOUNT.format(root="/docker/x")])
    root.v1("", limit=2 * GIB, usage=0)
    root.v1("/job", limit=GIB, usage=0)
    assert root.probe().source == "cgroup v1 /job"


@pytest.mark.parametrize("path", ["/../other", "/docker/not-mounted-here"])
def test_group_that_cannot_be_seen_stands_at_the_mount(root, path):
    root.process(f"0::{path}")
    root.v2("", limit=GIB, usage=0)
    assert root.probe().limit_bytes == GIB


def test_page_cache_does_not_count_as_use(root):
    root.process("0::/job", "4:memory:/job")
    stat = f"inactive_file {300 * MIB}\nactive_file {100 * MIB}\nanon 5"
    root.v2("/job", limit=GIB, usage=600 * MIB, stat=stat)
    root.v1("/job", limit=2 * GIB, usage=GIB, stat=f"total_inactive_file {GIB}\ncache 7")
    assert root.probe().available_bytes == GIB - 200 * MIB


def test_use_above_the_limit_leaves_nothing(root):
    root.process("0::/job")
    root.v2("/job", limit=GIB, usage=2 * GIB)
    assert root.probe().available_bytes == 0


def test_files_that_make_no_sense_are_no_limit(root):
    root.process("0::/job", "nonsense", "")
    root.v2("/job", limit="", usage="x", stat="anon\nfile many")
    assert root.probe().limit_bytes is None


def test_another_process_has_its_own_groups(root):
    root.process("0::/job", pid="77")
    root.process("0::/")
    root.v2("/job", limit=GIB, usage=0)
    assert root.probe(77).limit_bytes == GIB
    assert root.probe().limit_bytes is None


def test_unknown_memory_of_the_machine_is_refused(root):
    root.write("proc/meminfo", "MemTotal: 5 kB")
    with pytest.raises(StorageError, match=r"meminfo has no MemAvailable; mount /proc or set"):
        root.probe()


def test_this_machine_can_be_probed():
    limit = probe_memory_limit()
    assert 0 < limit.available_bytes <= limit.total_bytes


@pytest.mark.parametrize(
    ("available_bytes", "held_bytes", "margin_bytes"),
    [(20 * GIB, 0, GIB), (19 * GIB, GIB, GIB), (4 * GIB, 0, 512 * MIB)],
)
def test_default_budget_leaves_a_margin(available_bytes, held_bytes, margin_bytes):
    budget = default_dram_budget(_limit(available_bytes), held_bytes=held_bytes)
    assert budget == (available_bytes + held_bytes - margin_bytes, margin_bytes)


def test_default_budget_is_never_negative():
    assert default_dram_budget(_limit(100 * MIB), held_bytes=0) == (0, 512 * MIB)


def test_default_budget_probes_by_itself():
    budget_bytes, margin_bytes = default_dram_budget()
    assert margin_bytes >= 512 * MIB
    assert budget_bytes <= probe_memory_limit().total_bytes


def test_real_group_is_found_from_inside():
    program = (
        "import dataclasses, json; from zeroinfer.memory import probe_memory_limit; "
        "print(json.dumps(dataclasses.asdict(probe_memory_limit())))"
    )
    run = run_limited([sys.executable, "-c", program], limit_bytes=512 * MIB)
    assert run.returncode == 0, run.stderr
    limit = json.loads(run.stdout)
    assert limit["limit_bytes"] == 512 * MIB
    assert 256 * MIB < limit["available_bytes"] < 512 * MIB
    assert limit["source"].startswith("cgroup v1 /zeroinfer-test")


def _limit(available_bytes):
    return MemoryLimit(
        total_bytes=24 * GIB, available_bytes=available_bytes, limit_bytes=None, source="machine"
    )
