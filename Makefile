# `make demo` runs all stages on a generated corpus, `make test` runs the tests; each creates .venv if it is not there.
#   PYTHON=python3.12 make demo    another interpreter, 3.11 to 3.13
#   TORCH=cpu make demo            PyTorch's small build for machines without a GPU

PYTHON ?= python3
BIN := .venv/bin
ifeq ($(TORCH),cpu)
INDEX := --extra-index-url https://download.pytorch.org/whl/cpu
endif
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check $(INDEX) -c constraints.txt
# Two tests at a time on two cores, a thread each, or they wait for one another. Commands under test share bytecode.
WORKERS := 2
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

.PHONY: demo check lint style types quick test fast test-all all slow clean

demo: .venv/installed
	@$(BIN)/python -m pipeline demo

check: style types

lint: check

# Types are checked while tests run: one processor would wait for mypy.
test: style
	@$(MAKE) --no-print-directory -j 2 types fast

test-all: style
	@$(MAKE) --no-print-directory -j 2 types all

style: .venv/installed-test
	@echo "checking style ..."
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: .venv/installed-test
	@echo "checking types ..."
	@$(BIN)/mypy

# Without the files that take longest: searches, and what starts processes.
LONG := model/test_decoding model/test_sampling model/test_compiled_search model/test_fast_paths model/test_compilation \
    model/test_packed_network model/test_registered_layers data_module/test_preparation data_module/test_dataset \
    data_module/test_variants data_module/test_demo_corpus data_module/test_pair_filter
quick: check
	@echo "running tests of model/ and data_module/ ..."
	@$(PYTEST) -m "not slow" --dist worksteal tests/model tests/data_module $(LONG:%=--ignore=tests/%.py)

fast: .venv/installed-test
	@echo "running the fast tests ..."
	@$(PYTEST) -m "not slow" --dist worksteal

# A third worker has the tests of a SLURM cluster, which mostly wait.
all slow: WORKERS := 3
all: .venv/installed-test
	@echo "running all tests ..."
	@$(PYTEST) --dist loadgroup --durations 15

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
