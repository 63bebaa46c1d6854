"""A small limit on locked memory: a device warns once and goes on; the CPU needs none.

Source: case 4.12 (deepspeedai/DeepSpeed#2977). Root passes the limit, so the child gives up the
capability to lock before it executes, and with it every way to have it again.
"""

import ctypes
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.checkpoints import tiny_llama
from tests.helpers.engines import run_rows
from zeroinfer.memory import DoubleDevice, MlockPinner

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 64 * 1024
_PR_CAPBSET_DROP, _CAP_IPC_LOCK = 24, 14

CHILD = """
import json, logging, sys
from pathlib import Path

messages = []

class Keep(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())

logging.getLogger().addHandler(Keep())
from tests.helpers.engines import run_rows
from zeroinfer.memory import CpuDevice, DoubleDevice, MlockPinner

def run(kind, weights):
    messages.clear()
    device = DoubleDevice.open(pinner=MlockPinner()) if kind == "double" else CpuDevice()
    settings = {"offload.weights": weights, "offload.fetch_unit_bytes": "128KiB"}
    ids = run_rows(Path(sys.argv[1]), [[5, 9, 17], [7]], settings, max_tokens=4, device=device).ids
    locked = Path("/proc/self/status").read_text().split("VmLck:")[1].split()[0]
    return {"ids": ids, "messages": list(messages), "locked_kib": int(locked)}

ways = [(kind, weights) for kind in ("double", "cpu") for weights in ("dram", "nvme")]
print(json.dumps({" ".join(way): run(*way) for way in ways}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose units are larger than the limit."""
    folder = tmp_path_factory.mktemp("locked") / "llama"
    return tiny_llama(folder, hidden_size=128, intermediate_size=256)


def limit_locked_memory():
    """Set the limit and drop the capability that would pass it; runs in the child."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LIMIT_BYTES, LIMIT_BYTES))
    # Refused to users who lack it anyway.
    ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_IPC_LOCK, 0, 0, 0)


@pytest.fixture(scope="module")
def limited(model):
    """What ran in a process that may lock 64 KiB."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(model)],
        cwd=REPOSITORY,
        preexec_fn=limit_locked_memory,
        capture_output=True,
        text=True,
        check=False,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def ids(model):
    """What comes out without a limit, with every lock granted."""
    settings = {"offload.weights": "dram", "offload.fetch_unit_bytes": "128KiB"}
    device = DoubleDevice.open(pinner=MlockPinner())
    return run_rows(model, [[5, 9, 17], [7]], settings, max_tokens=4, device=device).ids


@pytest.mark.parametrize("weights", ["dram", "nvme"])
def test_refused_locks_cost_one_warning_and_no_bit(limited, ids, weights):
    run = limited[f"double {weights}"]
    assert run["ids"] == ids
    (warning,) = [text for text in run["messages"] if text.startswith("locking ")]
    assert "Cannot allocate memory (ENOMEM)" in warning
    assert "ulimit -l" in warning


@pytest.mark.parametrize("weights", ["dram", "nvme"])
def test_cpu_locks_nothing(limited, ids, weights):
    run = limited[f"cpu {weights}"]
    assert run["ids"] == ids
    assert run["locked_kib"] == 0
    assert not run["messages"]
