"""The package builds with a compiler and without one."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from zeroinfer.native import extension_error
from zeroinfer.native.extension import extension

ROOT = Path(__file__).parents[2]


def test_the_extension_is_there_wherever_a_compiler_is():
    # A failed build falls back to pure Python, which must not pass for a good one.
    if shutil.which("cc") and shutil.which("c++"):
        assert extension_error is None
    else:
        assert extension is not None or "install gcc and g++" in extension_error


@pytest.mark.skipif(extension is None, reason="the extension was not built")
def test_the_extension_is_installed_with_its_stub():
    stub = Path(extension.__file__).with_name("_C.pyi").read_text(encoding="utf-8")
    assert "class Uring" in stub
    assert "def uring_probe() -> int" in stub


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory):
    """Build the wheel on a machine whose compilers cannot be found, and unpack it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable, "-m", "pip", "wheel", str(ROOT), "--wheel-dir", str(folder),
        "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check",
        f"--config-settings=build-dir={folder / 'build'}",
    ]  # fmt: skip
    environment = os.environ | {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return wheel, folder / "site"


def test_without_a_compiler_the_wheel_is_pure_and_typed(pure_wheel):
    wheel, site = pure_wheel
    assert wheel.name.endswith("-py3-none-any.whl")
    assert (site / "zeroinfer" / "py.typed").exists()
    names = {path.relative_to(site / "zeroinfer") for path in site.rglob("*") if path.is_file()
             if path.is_relative_to(site / "zeroinfer")}  # fmt: skip
    modules = {path.relative_to(ROOT / "zeroinfer") for path in (ROOT / "zeroinfer").rglob("*.py")}
    assert modules <= names
    assert not [name for name in names if name.name.startswith("_C")]


def test_without_the_extension_the_package_says_so_and_reads_with_threads(pure_wheel):
    # Without `site` the path files of this environment, and so the real package, stay away.
    script = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from zeroinfer.cli import main\n"
        "from zeroinfer.native import extension_error, open_reader\n"
        "open_reader('auto', io_chunk_bytes=4096, queue_depth=1).close()\n"
        "assert 'zeroinfer._C is missing' in extension_error, extension_error\n"
        "sys.exit(main(['env']))\n"
    )
    folders = [str(pure_wheel[1]), sysconfig.get_paths()["purelib"]]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, *folders],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "extension: zeroinfer._C is missing, since" in done.stdout
    assert "io_uring: not available: zeroinfer._C is missing" in done.stdout
    assert "threads: available" in done.stdout
