# `make train` and `make test` need Python >= 3.11, make and a package index. Everything they install is in .venv.

PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
BIN := .venv/bin
# The versions known to work together, one file for each Python; a Python without a file takes the newest.
LOCKED = $(wildcard constraints/python$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt)
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(LOCKED)) --editable
# A `pip.conf` or environment that asks for user installs would miss the virtual environment.
export PIP_USER = 0
# Where there is an NVIDIA GPU, what JAX needs to use it is installed too.
GPU := $(if $(wildcard /dev/nvidia[0-9]*),[gpu])

.PHONY: train test fuzz chaos site lint format lock clean

train: .venv/core.stamp
	$(BIN)/trellis train

test: lint
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8 --dist=worksteal

# Random programs in the language, each against its twin in plain jax.numpy: make fuzz COUNT=10000 SEED=0
COUNT ?= 1000
SEED ?= 0
fuzz: .venv/test.stamp
	$(BIN)/python -m tests.fuzz --count $(COUNT) --seed $(SEED) $(OPTIONS)

# Faults at random moments in real runs, none of which may lose anything: make chaos MINUTES=60 SEED=0
MINUTES ?= 10
chaos: .venv/test.stamp
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) --seed $(SEED) $(OPTIONS)

# The documents as a site, in build/site: open build/site/index.html.
site: .venv/test.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: .venv/test.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/ty check --python .venv --no-progress

format: .venv/test.stamp
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Writes the constraints of every Python anew, from what the package index has today.
lock: | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/python constraints/lock.py

clean:
	rm -rf .venv build .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Trellis needs Python 3.11 or newer; say which with: make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/core.stamp: pyproject.toml $(LOCKED) | .venv/bin/python
	@echo "Installing Trellis into .venv"
	$(INSTALL) '.$(GPU)'
	@touch $@

.venv/test.stamp: .venv/core.stamp
	@echo "Installing what the tests need into .venv"
	$(INSTALL) '.[test]'
	@touch $@
