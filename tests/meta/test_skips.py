import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SUITE = """
import pytest

def test_runs():
    pass

@pytest.mark.skip(reason="lazy")
def test_skipped():
    pass

@pytest.mark.gpu
def test_needs_gpu():
    pytest.skip("no CUDA device")

@pytest.mark.xfail(reason="known")
def test_known():
    assert False
"""


def run_suite(folder: Path, text: str, *, is_ci: bool) -> subprocess.CompletedProcess:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a device\n")
    (folder / "test_sample.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.helpers.skips",
        "-p",
        "no:cacheprovider",
    ]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    environment |= {"CI": "true"} if is_ci else {}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_ci_fails_on_a_skip_that_a_cpu_could_run(tmp_path):
    done = run_suite(tmp_path, SUITE, is_ci=True)
    assert done.returncode == 1
    assert "test_skipped: skipped under CI (lazy)" in done.stdout
    closing = done.stdout.splitlines()[-1]
    assert all(part in closing for part in ("1 error", "1 passed", "1 skipped", "1 xfailed"))


def test_a_skip_stays_a_skip_elsewhere(tmp_path):
    done = run_suite(tmp_path, SUITE, is_ci=False)
    assert done.returncode == 0
    assert "2 skipped" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(("is_ci", "returncode"), [(True, 2), (False, 5)])
def test_ci_fails_on_a_module_that_skips_itself(tmp_path, is_ci, returncode):
    text = "import pytest\npytest.skip('never here', allow_module_level=True)\n"
    done = run_suite(tmp_path, text, is_ci=is_ci)
    assert done.returncode == returncode
    assert ("skipped under CI (never here)" in done.stdout) == is_ci
