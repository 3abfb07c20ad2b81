# Every target sets up what it needs: on a fresh machine with Python 3.11+ and make, `make demo` or `make test` is all there is to type.
#   make demo PYTHON=python3.12      chooses another interpreter for the virtual environment

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Two test processes to a core: much of what they do is wait for workers and links.
PYTEST := -q -n $(shell $(PYTHON) -c "import os; print(min(8, 2 * (os.cpu_count() or 2)))") --dist worksteal

.PHONY: help demo test test-full lint format install clean
.DEFAULT_GOAL := help

help:            ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(STAMP)       ## four workers over an emulated thin link, uncompressed against subspace
	$(BIN)/python bench/demo.py

test: $(STAMP)       ## run the tests
	$(BIN)/python -m pytest $(PYTEST)

test-full: $(STAMP)  ## run the tests and the long matrices
	$(BIN)/python -m pytest $(PYTEST) -m "full or not full"

lint: $(STAMP)       ## check format, lint rules and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)     ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(STAMP)    ## set up .venv with all extras but trackio

# The stamp is written last: an interrupted installation starts again.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("thinwire needs Python 3.11 or newer; this is " + sys.version.split()[0] + "; try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf,plot,track,zfp,dev]'
	@touch $@

clean:           ## remove the virtual environment and caches, keep runs
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
