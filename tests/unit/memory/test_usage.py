import os
import subprocess
import sys

import pytest

from zeroinfer import memory
from zeroinfer.memory import (
    limit_malloc_growth,
    measure_base_bytes,
    process_anonymous_bytes,
    process_rss_bytes,
    process_tree_peak_bytes,
    usage,
)
from zeroinfer.units import MIB


def run_python(program):
    """Run a program in a fresh interpreter, whose heap and peak are its own; return its words."""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=50
    )
    return done.stdout.split()


def test_resident_bytes_follow_use():
    before_bytes = process_rss_bytes()
    data = bytearray(b"x") * (64 * MIB)
    assert process_rss_bytes() - before_bytes > 56 * MIB
    del data
    assert 0 < process_anonymous_bytes() < process_rss_bytes()
    assert measure_base_bytes() >= process_anonymous_bytes()


def test_peak_remembers_what_was_freed():
    peak_mib, rss_mib = run_python(
        "from zeroinfer.memory import process_rss_bytes, process_tree_peak_bytes as peak\n"
        "data = bytearray(b'x') * (96 << 20); del data\n"
        "print(peak() >> 20, process_rss_bytes() >> 20)"
    )
    assert int(peak_mib) - int(rss_mib) > 80


def test_peak_sums_over_children_and_grandchildren():
    hold = "data = bytearray(b'x') * (64 << 20); print('up', flush=True); input()"
    nest = (
        "import subprocess, sys; "
        f"child = subprocess.Popen([sys.executable, '-c', {hold!r}], stdin=subprocess.PIPE); "
        "input(); child.communicate(b'.')"
    )
    alone_bytes = process_tree_peak_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", nest], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"up\n"
        assert process_tree_peak_bytes() - alone_bytes > 64 * MIB
        assert process_tree_peak_bytes(child.pid) > 64 * MIB
        child.stdin.write(b"\n")
        child.stdin.close()


def test_process_that_has_ended_counts_nothing():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert process_rss_bytes(child.pid) == 0


def test_heap_is_reused_after_the_limit_is_set():
    program = """
import resource, sys
from zeroinfer.memory import limit_malloc_growth
if {is_limited}: assert limit_malloc_growth()
import numpy as np
def layer():
    for _ in range(2):
        data = np.ones(48 << 20, np.uint8)
        del data
layer()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5): layer()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    (default_faults,) = run_python(program.format(is_limited=False))
    (limited_faults,) = run_python(program.format(is_limited=True))
    assert int(limited_faults) < int(default_faults) / 4


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(os, "confstr_names", {})
    assert limit_malloc_growth() is False


@pytest.mark.parametrize(("largest", "is_set"), [(64 * MIB, True), (32 * MIB, True), (MIB, False)])
def test_older_library_gets_the_threshold_it_takes(monkeypatch, largest, is_set):
    calls = []

    class FakeLibrary:
        @staticmethod
        def mallopt(option, value):
            calls.append((option, value))
            return int(option != -3 or value <= largest)

    monkeypatch.setattr(usage.ctypes, "CDLL", lambda name: FakeLibrary)
    assert limit_malloc_growth(trim_threshold_bytes=1 << 40) is is_set
    assert [value for option, value in calls if option == -3][-1] == max(largest, 32 * MIB)
    assert (-1, (1 << 31) - 1) in calls


def test_probes_do_not_load_torch():
    program = "import sys, zeroinfer.memory; print('torch' in sys.modules)"
    assert run_python(program) == ["False"]


def test_face_resolves_every_name_and_no_other():
    assert all(hasattr(memory, name) for name in memory.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Swap'"):
        _ = memory.Swap
