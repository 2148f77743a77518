# Every target makes its own virtual environment in .venv: Python 3.11 or newer with pip, and make,
# are all that a machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test check bench clean

help: ## Say what there is
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST))

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable ".[dev,data,torch]"
	@touch $@

demo: $(INSTALLED) ## Compress a real model, from download to table
	$(BIN)/python -m demo

test: $(INSTALLED) ## Run all tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup -q

check: $(INSTALLED) ## Lint, types, layers, docs in step
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

bench: $(INSTALLED) ## Measure side by side with peers; results go to benchmarks/results
	$(BIN)/python -m benchmarks

clean: ## Remove what the other targets made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis demo/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
