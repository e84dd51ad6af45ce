# `make demo` runs all stages on a generated corpus, `make test` runs the tests; each creates .venv if it is not there.
#   PYTHON=python3.12 make demo    another interpreter, 3.11 to 3.13
#   TORCH=cpu make demo            PyTorch's small build for machines without a GPU

PYTHON ?= python3
BIN := .venv/bin
ifeq ($(TORCH),cpu)
INDEX := --extra-index-url https://download.pytorch.org/whl/cpu
endif
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check $(INDEX) -c constraints.txt
# Two tests at a time on two cores: a thread each, or they wait for one another. Commands under test share bytecode.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: demo test test-all lint slow clean

demo: .venv/installed
	@$(BIN)/python -m pipeline demo

test: lint
	@echo "running the fast tests ..."
	@$(PYTEST) -m "not slow" --dist worksteal

test-all: test slow

lint: .venv/installed-test
	@echo "checking style and types ..."
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

slow: .venv/installed-test
	@echo "running the slow tests ..."
	@$(PYTEST) -m slow --dist loadgroup --durations 15

clean:
	rm -rf .venv runs/demo data/demo *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else f"Python {v[0]}.{v[1]} is not supported: give another, PYTHON=python3.12 make ...")'
	@test -x $(BIN)/pip || { echo "creating .venv ..."; $(PYTHON) -m venv .venv; }
	@echo "installing packages, PyTorch is the largest ..."
	@$(INSTALL) -e .
	@touch $@

.venv/installed-test: .venv/installed
	@echo "installing packages for tests ..."
	@$(INSTALL) -e '.[test]'
	@touch $@
