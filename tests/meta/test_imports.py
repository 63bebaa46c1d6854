"""Import rules that the static contract cannot see."""

import importlib
import pkgutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import zeroinfer

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(
    info.name for info in pkgutil.walk_packages(zeroinfer.__path__, "zeroinfer.") if info.ispkg
)

PROBE = """
import importlib, pkgutil, sys

def load(name):
    module = importlib.import_module(name)
    if "torch" in sys.modules or "transformers" in sys.modules:
        sys.exit(f"{name} loads torch or transformers")
    return module

for name in sys.argv[1:]:
    module = load(name)
    if name != "zeroinfer" and hasattr(module, "__path__"):
        for info in pkgutil.walk_packages(module.__path__, name + "."):
            load(info.name)
"""


def pure_modules() -> list[str]:
    """The modules that the static contract names, and that exist already."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (c for c in contracts["contracts"] if c["type"] == "forbidden")
    existing = {info.name for info in pkgutil.iter_modules(zeroinfer.__path__, "zeroinfer.")}
    return [name for name in contract["source_modules"] if name in existing]


def probe(*names: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PROBE, *names], capture_output=True, text=True, check=False
    )


def test_pure_packages_do_not_load_torch():
    names = pure_modules()
    assert "zeroinfer.config" in names
    done = probe("zeroinfer", *names)
    assert done.returncode == 0, done.stderr


def test_command_line_starts_without_torch():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, zeroinfer.cli; sys.exit('torch' in sys.modules)"],
        check=False,
    )
    assert done.returncode == 0, "importing zeroinfer.cli loads torch; verbs import when they run"


def test_probe_sees_torch():
    assert "loads torch" in probe("torch").stderr


@pytest.mark.parametrize("name", ["zeroinfer", *PACKAGES])
def test_every_package_face_resolves(name):
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    missing = [entry for entry in module.__all__ if not hasattr(module, entry)]
    assert not missing, f"{name}.__all__ names what is not there: {missing}"


def test_nothing_else_is_public():
    public = {
        name
        for name, value in vars(zeroinfer).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public <= set(zeroinfer.__all__)


def test_public_names_resolve_in_a_fresh_interpreter():
    code = "import zeroinfer; [getattr(zeroinfer, name) for name in zeroinfer.__all__]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_contract_names_every_package():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (c["layers"] for c in contracts["contracts"] if c["type"] == "layers")
    named = {name.strip(" ()") for row in layers for name in row.split("|")}
    existing = {info.name for info in pkgutil.iter_modules(zeroinfer.__path__)}
    # The compiled module is no package, and only `native` imports it.
    assert existing - {"_C"} <= named
