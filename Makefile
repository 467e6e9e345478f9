# Each target sets up what it needs: Python 3.11 or newer, make and access to PyPI are enough.
#   VENV    the environment that is made and used   (make VENV=/some/where test)
#   JOBS    tests run at once            (make JOBS=4 test; a server under test takes 4 GB)
#   PYTHON  the interpreter it is made from         (make PYTHON=python3.12 demo)
VENV   ?= .venv
PYTHON ?= python3
JOBS   ?= 2

SHELL := /bin/bash
BIN   := $(VENV)/bin
READY := $(VENV)/.swiftcache-ready

.DEFAULT_GOAL := help
.PHONY: help install demo test test-faults test-gpu lint format clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name what; do \
		printf '  make %-11s %s\n' "$$name" "$$what"; done

install: $(READY) ## Install SGLang, SwiftCache and the tools into VENV (about 10 GB, 3 to 5 minutes)

$(READY): pyproject.toml scripts/install.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else \
		"SwiftCache needs Python 3.11 or newer and $(PYTHON) is %d.%d: name another one, as in make PYTHON=python3.12" % v)'
	@$(PYTHON) scripts/install.py $(VENV)
	@touch $@

demo: $(READY) ## Hold a conversation with a small model whose prefix cache lies in two donors' memory
	@PYTHONPATH=scripts:test $(BIN)/python -m demo

test: $(READY) ## Run every test that needs no GPU
	@$(BIN)/python -m pytest -m "not gpu" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-faults: $(READY) ## Try each fault in each phase of a server, and measure the time to recover
	@PYTHONPATH=scripts:test $(BIN)/python -m faults $(ARGS)

test-gpu: $(READY) ## Run the tests that need an NVIDIA GPU
	@$(BIN)/python -m pytest -m gpu $(ARGS)

lint: $(READY) ## Check style, types and the one-way imports
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/python scripts/lint_imports.py --no-logo .importlinter .importlinter-overlay

format: $(READY) ## Rewrite the code in the project's style
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean: ## Remove VENV and what tools left behind; the prepared model stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
