# Two commands are enough: `make up` runs perdure, `make test` tests it. `make help` lists the rest.
#
#   make up ARGS="--port 9000"             options of `perdure up`
#   make test PYTEST_ARGS="-k lease -x"    options of pytest; TEST_PROCESSES=1, one test at a time
#   make test PYTHON=python3.12            another interpreter for .venv

PYTHON ?= $(shell for each in python3 python3.12 python3.13 python3.14 python3.11; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; done || echo python3)
BIN := .venv/bin
SOURCES := perdure workers tasks schedules alembic benchmarks examples tests
ARGS ?=
# More than cores, for tests wait; the long ones, which `make check` adds, wait most. Each collects all tests first.
CORES := $(shell getconf _NPROCESSORS_ONLN)
TEST_PROCESSES ?= $(shell echo $$(($(CORES) < 8 ? $(CORES) + 1 : 8)))
PYTEST_ARGS ?=
# What `make check` runs again with statements as behind a pooler.
UNPREPARED := tests/turns tests/sessions tests/memory tests/casebank tests/users tests/schedules
# Bytecode is kept whatever the environment says: else each test process compiles everything again.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) \
	--dist loadfile --no-loadscope-reorder

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help up test check lint types imports dead-code docs format bench chaos browser install clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

up: .venv/embedded.installed ## run everything on this machine: servers, gateway, workers, beat, Flower
	@$(BIN)/perdure up $(ARGS)

test: .venv/test.installed ## the tests, on throw-away servers of their own; the longest are left to `make check`
	$(PYTEST) -m "not chaos and not long and not browser" $(PYTEST_ARGS)

check: .venv/dev.installed lint types imports dead-code ## what continuous integration checks: all of these, and every test
	$(PYTEST) $(PYTEST_ARGS)
	$(PYTEST) --unprepared -m "not chaos and not long and not browser" $(UNPREPARED) $(PYTEST_ARGS)

check: TEST_PROCESSES = $(shell echo $$(($(CORES) < 4 ? $(CORES) * 2 : 8)))

lint: .venv/dev.installed ## ruff: rules, docstrings, format
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: .venv/dev.installed ## mypy, strict
	$(BIN)/mypy

imports: .venv/dev.installed ## which room may know which
	$(BIN)/lint-imports

dead-code: .venv/dev.installed ## what nothing calls
	$(BIN)/vulture

docs: .venv/test.installed ## docs/http.md, from the gateway's OpenAPI document
	$(BIN)/python -m tests.repository.http_reference

format: .venv/dev.installed ## put the sources into shape
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: .venv/bench.installed ## turns per second and what a turn costs, beside others
	$(BIN)/python -m benchmarks $(ARGS)

chaos: .venv/test.installed ## long fault injection
	$(BIN)/python -m pytest -m chaos --timeout 0 $(PYTEST_ARGS)

browser: .venv/dev.installed ## the web chat in headless Chromium: its whole story
	$(BIN)/python -m pytest tests/browser -m "browser or not browser" $(PYTEST_ARGS)

install: .venv/dev.installed ## .venv with all that working on perdure needs

clean: ## remove .venv, caches and build results; the data in PERDURE_DATA_DIR stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# Done already? Then no pip runs. A part stands on those before it, which are marked along with it.
.venv/%.installed: pyproject.toml constraints.txt .ci/install
	@.ci/install $* $(PYTHON)
