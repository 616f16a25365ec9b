# make eval    evaluate the published shapes quickly on this machine's device
# make test    every test          make check    lint and the fast tests
# PYTHON=...   the interpreter the environment is made from (3.11 or newer)
# TORCH_INDEX=https://download.pytorch.org/whl/cpu   take torch from there: the CPU build, some 200 MB
# PYTEST_ARGS=...   more arguments for the tests

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
DEVICE := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
# Two files of tests at a time, in the order of tests/conftest.py, but not on a GPU, which what they time would share.
PARALLEL := $(if $(filter cpu,$(DEVICE)),-n 2 --dist loadfile --no-loadscope-reorder)
CONSTRAINTS := constraints-$(DEVICE).txt
BIN := .venv/bin
# The stamp carries the device, so a GPU that appears later brings its own pinned set.
STAMP := .venv/installed-$(DEVICE)

# An interpreter that rooflane runs on.
RECENT := import sys; sys.exit(sys.version_info < (3, 11))

# Without a working interpreter nothing is installed, whatever the stamp says.
$(shell test ! -e .venv || $(BIN)/python -c 'import pip; $(RECENT)' >/dev/null 2>&1 || rm -f .venv/installed-*)

.PHONY: eval test check lint setup clean

eval: $(STAMP)
	$(BIN)/rooflane eval shapes/published.csv --quick

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

check: lint
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu" $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

setup: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@# An environment that is too old, broken or half made is made again; the interpreter is checked before that.
	@if ! $(BIN)/python -c 'import pip; $(RECENT)' >/dev/null 2>&1; then \
		test -n "$(PYTHON)" || { echo "rooflane needs Python 3.11 or newer: install one, or name it with make PYTHON=/path/to/python"; exit 1; }; \
		"$(PYTHON)" -c '$(RECENT)' || { echo "rooflane needs Python 3.11 or newer, and $(PYTHON) is not one: name another with make PYTHON=/path/to/python"; exit 1; }; \
		test ! -e .venv || echo '.venv has no working Python 3.11 or newer with pip: it is made again.'; \
		"$(PYTHON)" -m venv --clear .venv || { rm -rf .venv; echo "$(PYTHON) cannot make an environment; on Debian: apt-get install python3-venv"; exit 1; }; \
	fi
	@echo 'Setting up .venv with $(CONSTRAINTS); the first time takes a few minutes.'
	@if test $(DEVICE) = cpu -a -z "$(TORCH_INDEX)" && ! $(BIN)/python -c 'import torch' >/dev/null 2>&1; then \
		echo 'No NVIDIA GPU was found. On Linux the default torch brings the CUDA libraries: a download of more than 2 GB.'; \
		echo 'For the CPU build (some 200 MB) stop this and run: make TORCH_INDEX=https://download.pytorch.org/whl/cpu'; \
	fi
	@test -z "$(TORCH_INDEX)" || $(BIN)/python -m pip install --quiet --index-url "$(TORCH_INDEX)" "$$(grep '^torch==' $(CONSTRAINTS))"
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info
