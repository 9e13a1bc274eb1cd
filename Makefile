# Every target sets up .venv by itself; the stamp makes the second run skip that.
# `make test PYTEST_ARGS="-k walk -x"` hands arguments to pytest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=

# Idle OpenMP threads that spin slow everything else down several times on few cores.
export OMP_WAIT_POLICY = passive
export TOKENIZERS_PARALLELISM = false

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick lint format bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install hfspec with its tools at the tested versions

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(STAMP) ## fetch a pair of models (once) and compare plain, assisted and hfspec
	$(BIN)/hfspec demo

test: $(STAMP) ## the whole suite on the newest transformers, then the host contract on the older ones
	$(BIN)/python -m pytest -n auto --maxprocesses 4 -m "not real_pair" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m real_pair $(PYTEST_ARGS) || [ $$? -eq 5 ]  # 5: none was chosen
	$(BIN)/nox -s host

quick: $(STAMP) ## a telling minute of the suite: acceptance, caches, budget, sampling, patching, some texts
	$(BIN)/python -m pytest -q -n 2 -m "not real_pair" tests/accept tests/cache tests/budget/test_cost.py \
		tests/budget/test_controller.py tests/budget/test_timing.py tests/sampling tests/test_config.py \
		tests/test_patch.py tests/lossless/test_identity.py $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, mypy and the import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## let ruff fix and lay out the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## measure on this machine; results go to benchmarks/out
	mkdir -p benchmarks/out
	$(BIN)/hfspec bench --output benchmarks/out/bench.json --chart benchmarks/out/bench.png

clean: ## remove everything that was made here (the model cache stays)
	rm -rf $(VENV) .nox build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
