# make eval    evaluate the published shapes quickly on the device at hand
# make test    every test          make check    lint and the fast tests
# PYTHON=...   the interpreter the environment is made from (3.11 or newer)

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
DEVICE := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
# Two files of tests at a time, in the order of tests/conftest.py, but not on a GPU, which what they time would share.
PARALLEL := $(if $(filter cpu,$(DEVICE)),-n 2 --dist loadfile --no-loadscope-reorder)
CONSTRAINTS := constraints-$(DEVICE).txt
BIN := .venv/bin
# The stamp carries the device, so a GPU that appears later brings its own pinned set.
STAMP := .venv/installed-$(DEVICE)

.PHONY: eval test check lint setup clean

eval: $(STAMP)
	$(BIN)/rooflane eval shapes/published.csv --quick

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL)

check: lint
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

setup: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "rooflane needs Python 3.11 or newer: install one, or name it with make PYTHON=/path/to/python"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'Setting up .venv with $(CONSTRAINTS); the first time takes a few minutes.'
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info
