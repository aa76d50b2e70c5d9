# Needs python3 (3.11 or newer) with pip, make and git. Everything else goes to .boot and .venv in this folder.

# The interpreter of .venv: `make test PYTHON=python3.13`. It needs no pip; then python3 has pip and installs uv.
PYTHON ?= python3
VENV ?= .venv
WITH_PIP := $(shell $(PYTHON) -c 'import pip' 2>/dev/null && echo $(PYTHON) || echo python3)
# One more than the number of cores: while one process waits for a disk, a server or the clock, another uses the core.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

UV := $(WITH_PIP) .ci/uv.py
BIN := $(VENV)/bin
# Stamp files record what has been installed, so that a second `make test` installs nothing.
BOOTED := .boot/.installed
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-newer test-full lint format bench bench-peers soak lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

setup: $(DEV) ## install everything into .venv: perdure itself (editable), its dependencies, the development tools

demo: $(RUNTIME) ## an agent is killed and continues; installs only what perdure itself needs
	@$(BIN)/perdure demo

PYTEST := $(BIN)/pytest -q -n $(JOBS) --maxprocesses 8 --dist worksteal

test: $(DEV) ## the quick tests: a few minutes on two cores (tests/sets.py says which they are)
	@$(PYTEST) -m "not full and not soak" $(TESTS)

# These folders hold what depends on the version of Python. If no newer Python or nothing for it can be installed, that is no error.
test-newer: $(DEV) ## most of the quick tests on a newer Python, which is installed into .newer if this machine has none
	@if python=$$(.ci/newer_python) && $(MAKE) --no-print-directory setup PYTHON="$$python" VENV=.newer/venv; then \
	  "$$python" -VV; $(MAKE) --no-print-directory test PYTHON="$$python" VENV=.newer/venv TESTS="tests/unit tests/conformance tests/core tests/crash"; \
	else echo "test-newer: SKIPPED, because no newer Python could be installed; the lines above say why"; fi

test-full: $(DEV) ## all other tests but the soak: every boundary, class and store, mutants, power loss (about half an hour)
	@$(PYTEST) -m "full and not soak"

lint: $(DEV) ## style, format, types, and which module may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(DEV) ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV) ## measure perdure on this machine, compared with bare commits (under two minutes)
	@$(BIN)/python bench/run.py

bench-peers: $(DEV) ## the race: perdure compared with DBOS, LangGraph, Temporal and Restate, installed below .bench (about an hour; RACE="--quick" to try)
	@$(BIN)/python -m bench.race $(RACE)

soak: $(DEV) ## the long tests, one after the other; the last, the simulator with fresh seeds, runs until you stop it (or PERDURE_SOAK_S=600)
	@$(BIN)/pytest -m soak -s -o faulthandler_timeout=0

# Only from the main index: with a partial mirror the hashes of files that the mirror does not have would be missing.
# The header is our own, because uv's header would contain the command line with the settings of this machine.
LOCK := UV_INDEX= UV_FIND_LINKS= $(UV) pip compile --quiet --upgrade --universal --generate-hashes --python-version 3.11 \
  --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock'

lock: $(BOOTED) ## resolve the dependencies again: requirements.lock to run, -dev.lock to develop, -boot.lock for uv itself, one for the image of examples/service
	@$(LOCK) pyproject.toml --group build --output-file requirements.lock
	@$(LOCK) pyproject.toml --group build --extra dev --extra postgres --extra anthropic --extra openai --extra mcp --extra prices --extra s3 --extra sign --extra otel --constraints requirements.lock --output-file requirements-dev.lock
	@$(LOCK) pyproject.toml examples/service/requirements.in --extra postgres --constraints requirements-dev.lock --output-file examples/service/requirements.lock
	@$(LOCK) --group boot --output-file requirements-boot.lock

clean: ## remove everything that make has created
	rm -rf .bench .boot .newer .venv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache dist
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
  { echo "perdure needs Python 3.11 or newer, and $(PYTHON) is: $$($(PYTHON) -V 2>&1); name another one: make PYTHON=python3.12 setup" >&2; exit 1; }

# --target also works with a Python that the system's package manager manages, and needs neither venv nor ensurepip.
# uv installs everything else, so uv itself is checked by hash too. --only-binary: pip would build a source distribution
# with a build backend that is in no lock file.
$(BOOTED): requirements-boot.lock
	@$(NEW_ENOUGH)
	@echo "requirements-boot.lock -> .boot"
	@$(WITH_PIP) -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-user --upgrade --target .boot \
	  --require-hashes --only-binary :all: -r requirements-boot.lock
	@touch $@

$(VENV)/pyvenv.cfg: | $(BOOTED)
	@$(NEW_ENOUGH)
	@$(UV) venv --quiet --clear --no-project --python $(PYTHON) $(VENV)

# If PYTHON is named and .venv has another version, .venv is made again. If PYTHON is not named, any .venv is kept.
ifneq ($(origin PYTHON),file)
  ifeq ($(shell grep -Fx "version_info = $$($(PYTHON) -c 'import platform; print(platform.python_version())' 2>/dev/null)" $(VENV)/pyvenv.cfg 2>/dev/null),)
    .PHONY: $(VENV)/pyvenv.cfg
  endif
endif

# hatchling is in the lock file too: without build isolation, only packages from the lock file are fetched.
$(RUNTIME): requirements.lock pyproject.toml $(VENV)/pyvenv.cfg | $(BOOTED)
	@echo "requirements.lock and perdure -> $(VENV)"
	@$(UV) pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --offline --editable .
	@touch $@

$(DEV): requirements-dev.lock $(RUNTIME) | $(BOOTED)
	@echo "requirements-dev.lock -> $(VENV)"
	@$(UV) pip install --quiet --python $(BIN)/python --require-hashes -r requirements-dev.lock
	@touch $@
