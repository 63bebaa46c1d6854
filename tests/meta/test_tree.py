"""Rules about files that no linter checks."""

import re
from pathlib import Path

import pytest
import yaml

import zeroinfer
from zeroinfer.config import describe_config, load_config, render_reference

ROOT = Path(__file__).parents[2]
FOLDERS = ("zeroinfer", "tests", "tools", "configs", "csrc", ".ci")
SUFFIXES = {".py", ".md", ".toml", ".yaml", ".txt", ".sh", ".c", ".h", ".cpp", ".cmake", ".jsonl"}
MAX_LINES = 600
MAX_FILE_BYTES = 200_000


def text_files() -> list[Path]:
    tops = [path for path in ROOT.iterdir() if path.is_file()]
    inner = [path for name in FOLDERS for path in (ROOT / name).rglob("*")]
    kept = [p for p in tops + inner if p.suffix in SUFFIXES or p.name in {"Makefile", "run"}]
    return sorted(p for p in kept if p.is_file() and "__pycache__" not in p.parts)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


FILES = text_files()
MODULES = [path for path in FILES if path.suffix == ".py"]
PAGES = [path for path in FILES if path.suffix == ".md"]
CONFIGS = [path for path in FILES if path.suffix == ".yaml" and path.parent.name == "configs"]


def test_files_are_clean_text():
    faults = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):
            faults.append(f"{relative(path)}: no newline at the end")
        for number, line in enumerate(text.splitlines(), 1):
            if line != line.rstrip(" \t\r"):
                faults.append(f"{relative(path)}:{number}: space at the end of the line")
            if line.startswith(("<" * 7, ">" * 7)):
                faults.append(f"{relative(path)}:{number}: merge marker")
    assert not faults, "\n".join(faults)


def test_no_large_files():
    large = [relative(p) for p in FILES if p.stat().st_size > MAX_FILE_BYTES]
    assert not large


def test_code_is_ascii():
    assert not [relative(path) for path in MODULES if not path.read_bytes().isascii()]


def test_modules_are_short():
    lengths = {relative(p): len(p.read_text(encoding="utf-8").splitlines()) for p in MODULES}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_links_lead_to_files(path):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
    local = [
        target for target in targets if "://" not in target and not target.startswith("mailto")
    ]
    assert not [target for target in local if not (path.parent / target).exists()]


def test_changelog_is_at_the_package_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[([^\]]+)\]", text, flags=re.MULTILINE)
    assert sections[0] in {"Unreleased", zeroinfer.__version__}
    released = [name for name in sections if name != "Unreleased"]
    assert released[:1] == [zeroinfer.__version__]


@pytest.mark.parametrize("path", CONFIGS, ids=relative)
def test_configs_load(path):
    load_config(path)
    assert path.read_text(encoding="utf-8").startswith("# "), "say first what the file is for"
    assert yaml.safe_load(path.read_text(encoding="utf-8"))


def test_there_are_configs():
    assert {"tiny.yaml", "demo.yaml"} <= {path.name for path in CONFIGS}


def test_config_reference_is_up_to_date():
    on_disk = (ROOT / "configs/README.md").read_text(encoding="utf-8")
    assert on_disk == render_reference(), "configs/README.md is out of date; run make docs"


def test_every_key_has_help():
    assert all(entry.help.endswith(".") for entry in describe_config())
