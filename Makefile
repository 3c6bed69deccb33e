PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-all gpu-test browser-test lint wheel format docs clean study bench

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# PyTorch is installed first, because the versions of other packages depend on it.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/mvrbm/compiled/*.[ch])
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("mvrbm needs Python 3.11 or newer, but $(PYTHON) is %d.%d: try make PYTHON=python3.11" % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): the first time takes a few minutes"
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e ".[all,docs,dev]"
	@touch $@

demo: $(STAMP)  ## train on 4,000 digits and write report.html
	$(BIN)/mvrbm demo --out report.html --force

study: $(STAMP)  ## run a study, as in make study ARGS="digits --scale quick --out runs/digits"
	$(BIN)/python -m studies $(or $(ARGS),--help)

bench: $(STAMP)  ## measure speed, as in make bench ARGS="--quick --out runs/bench"
	$(BIN)/python -m benchmarks $(or $(ARGS),--quick)

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: lint  ## run lint and the fast tests, in less than five minutes
	$(PYTEST) -m "not slow"

test-all: lint  ## run lint and all tests
	$(PYTEST)

# Without a GPU, Triton's interpreter runs the kernels, as in `make test-all`.
gpu-test: $(STAMP)  ## test the kernels and CUDA graphs on this machine's GPU
	$(BIN)/python -m pytest tests/backends tests/random tests/test_cuda_graphs.py

# With MVRBM_BROWSER=required, a missing browser is an error.
browser-test: $(STAMP)  ## test pages in Chrome or Chromium (on Debian: apt-get install -y chromium)
	MVRBM_BROWSER=$(or $(MVRBM_BROWSER),1) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser tests/pages

lint: $(STAMP)  ## check style, types, layers, structure and spelling, changing nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.check_structure
	$(BIN)/codespell

wheel: $(STAMP)  ## build wheels and check that they contain only the library
	$(BIN)/python -m tools.check_structure --wheel

format: $(STAMP)  ## format the code and fix style with ruff
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# One thread: the examples are small, and threads wait for each other if the machine does other work.
docs: $(STAMP)  ## build the documentation into docs/_build/html
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -W -n --keep-going -b html docs docs/_build/html
	$(BIN)/python -m tools.check_links docs/_build/html

clean:  ## remove build products, but not the environment
	rm -rf build dist docs/_build docs/generated docs/gallery docs/tutorials docs/sg_execution_times.rst .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache mutants
	find src studies benchmarks tests tools docs -name __pycache__ -type d -prune -exec rm -rf {} +
