# `make train` and `make test` need Python >= 3.11, make and a package index. Everything they install is in .venv; or in
# another folder: make check PYTHON=python3.13 VENV=.venv/newest

VENV ?= .venv
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
BIN := $(VENV)/bin
# The versions known to work together, one file for each Python; a Python without a file takes the newest.
LOCKED = $(wildcard constraints/python$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt)
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(LOCKED)) --editable
# A `pip.conf` or environment that asks for user installs would miss the virtual environment.
export PIP_USER = 0
# Where there is an NVIDIA GPU, what JAX needs to use it is installed too.
GPU := $(if $(wildcard /dev/nvidia[0-9]*),[gpu])

.PHONY: train test check quick fuzz fuzz_runs fuzz_trainings chaos site lint format lock clean

train: $(VENV)/core.stamp
	$(BIN)/trellis train

# Compilers and traces ask for small memory by the million: with jemalloc, which Ray's package has for Linux, tests take a
# tenth less time than with the system's allocator, and a twentieth less again in large pages.
JEMALLOC = $(abspath $(firstword $(wildcard $(VENV)/lib/python3*/site-packages/ray/core/libjemalloc.so)))
PYTEST = $(if $(JEMALLOC),LD_PRELOAD=$(JEMALLOC) MALLOC_CONF=thp:always) $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8 --dist=worksteal

test: lint
	$(PYTEST)

# The inner loop. `quick` goes without the linters.
check: lint quick
quick: $(VENV)/test.stamp
	$(PYTEST) -m "not slow"

# Random programs in the language, each against its twin in plain jax.numpy: make fuzz COUNT=10000 SEED=0
COUNT ?= 1000
SEED ?= 0
fuzz: $(VENV)/test.stamp
	$(BIN)/python -m tests.fuzz --count $(COUNT) --seed $(SEED) $(OPTIONS)

# Random runs, three steps of each on a mesh as on one device: make fuzz_runs COUNT=100 SEED=0
fuzz_runs: $(VENV)/test.stamp
	$(BIN)/python -m tests.fuzz.runs --count $(COUNT) --seed $(SEED) $(OPTIONS)

# Random trainings, stopped and resumed on another mesh, as on one device: make fuzz_trainings COUNT=30 SEED=0
fuzz_trainings: $(VENV)/test.stamp
	$(BIN)/python -m tests.fuzz.trainings --count $(COUNT) --seed $(SEED) $(OPTIONS)

# Faults at random moments in real runs, none of which may lose anything: make chaos MINUTES=60 SEED=0
MINUTES ?= 10
chaos: $(VENV)/test.stamp
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) --seed $(SEED) $(OPTIONS)

# The documents as a site, in build/site: open build/site/index.html.
site: $(VENV)/test.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(VENV)/test.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/ty check --python $(VENV) --no-progress

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Writes the constraints of every Python anew, from what the package index has today.
lock: | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/python constraints/lock.py

clean:
	rm -rf .venv .cache build .pytest_cache .ruff_cache .hypothesis

# Whether a Python, which may be none, is new enough.
IS_NEW = -c 'import sys; sys.exit(sys.version_info < (3, 11))'

$(VENV)/bin/python:
	@$(or $(PYTHON),false) $(IS_NEW) || { echo "Trellis needs Python 3.11 or newer; say which with: make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/core.stamp: pyproject.toml $(LOCKED) | $(VENV)/bin/python
	@$(BIN)/python $(IS_NEW) || { echo "$(VENV) has a Python older than 3.11; remove it, and it is made anew"; exit 2; }
	@echo "Installing Trellis into $(VENV)"
	$(INSTALL) '.$(GPU)' || { echo "pip did not install Trellis, and says why above; it needs a package index that it reaches"; exit 2; }
	@touch $@

$(VENV)/test.stamp: $(VENV)/core.stamp
	@echo "Installing what the tests need into $(VENV)"
	$(INSTALL) '.[test]'
	@touch $@
