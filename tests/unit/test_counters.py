import json
import subprocess
import sys
import threading
import time

import pytest

from zeroinfer.counters import IoCounters, Trace, seconds_since_start


def read_events(trace, folder):
    path = folder / "trace.json"
    trace.write(path)
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def test_counters_start_at_zero():
    counters = IoCounters()
    assert (counters.bytes_read, counters.num_reads, counters.busy_s) == (0, 0, 0)


def test_disabled_trace_keeps_nothing(tmp_path):
    trace = Trace()
    trace.add("nvme", "read", 0.0, 1.0)
    with trace.span("compute", "mlp"):
        pass
    assert read_events(trace, tmp_path) == []


def test_lanes_times_and_names(tmp_path):
    trace = Trace(is_enabled=True)
    trace.add("nvme", "unit 1", 10.0, 10.5)
    trace.add("compute", "unit 0", 10.25, 10.75)
    events = read_events(trace, tmp_path)
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
    assert lanes == {"compute": 0, "nvme": 1}
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert spans["unit 1"]["tid"] == lanes["nvme"]
    assert spans["unit 1"]["ts"] == 0
    assert spans["unit 1"]["dur"] == pytest.approx(500_000)
    assert spans["unit 0"]["ts"] == pytest.approx(250_000)


def test_span_is_recorded_when_its_body_fails(tmp_path):
    trace = Trace(is_enabled=True)
    with pytest.raises(KeyError), trace.span("compute", "mlp"):
        raise KeyError("x")
    (event,) = (e for e in read_events(trace, tmp_path) if e["ph"] == "X")
    assert event["dur"] >= 0


def test_number_of_events_is_limited(tmp_path):
    trace = Trace(is_enabled=True, max_events=3)
    for idx in range(10):
        trace.add("nvme", str(idx), idx, idx + 1)
    names = [e["name"] for e in read_events(trace, tmp_path) if e["ph"] == "X"]
    assert names == ["0", "1", "2"]


def test_threads_lose_no_event(tmp_path):
    trace = Trace(is_enabled=True)

    def add_many(lane):
        for idx in range(200):
            trace.add(lane, str(idx), idx, idx)

    threads = [threading.Thread(target=add_many, args=(f"lane {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(e["ph"] == "X" for e in read_events(trace, tmp_path)) == 800


def test_process_starts_when_it_was_started():
    code = (
        "import time; from zeroinfer.counters import seconds_since_start as since; "
        "now_s = time.perf_counter(); print(now_s - since(now_s))"
    )
    before_s = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The kernel counts in steps of 0.01 s.
    assert before_s - 0.02 <= float(done.stdout) <= time.perf_counter()


def test_seconds_since_start_go_with_the_clock():
    now_s = time.perf_counter()
    assert seconds_since_start(now_s + 5) - seconds_since_start(now_s) == pytest.approx(5, abs=0.5)


def test_lanes_within_a_name_are_told_apart_in_one_trace(tmp_path):
    trace = Trace(is_enabled=True)
    for disk in ("sda", "sdb"):
        trace.within("disks").within(disk).add("read 0", disk, 0.0, 1.0)
    events = read_events(trace, tmp_path)
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
    assert {e["name"]: e["tid"] for e in events if e["ph"] == "X"} == {
        "sda": lanes["disks sda read 0"],
        "sdb": lanes["disks sdb read 0"],
    }
    assert len(set(lanes.values())) == 2
