# Needs Python >= 3.11 (PYTHON=python3.12 chooses one) and a package index. Everything else goes to ./.venv.
#
# On Linux, PyPI's torch brings several GB of CUDA libraries. To get the CPU build, name its index:
#   make test TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH_INDEX ?=
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test lint format venv clean

help:
	@echo "make demo    export SmolLM2-135M with the SQL adapter and answer three questions with it"
	@echo "make test    format, lint, types and all tests"
	@echo "make lint    format, lint and types only"
	@echo "make format  put the code into its format"
	@echo "make venv    install everything into $(VENV)"
	@echo "make clean   remove $(VENV), build folders and caches"

# Remade when the project's requirements change.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is older than Python 3.11; choose another with PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@if [ -n "$(TORCH_INDEX)" ]; then $(PIP) --index-url $(TORCH_INDEX) 'torch>=2.9,<=2.13'; fi
	$(PIP) --editable '.[dev]'
	@touch $@

venv: $(VENV)/.installed

demo: venv
	@$(BIN)/python -m specstream.toolchain.demo

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Two test files at a time: each has at most one process on the real model, which takes up to 4 GB.
test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 15

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
