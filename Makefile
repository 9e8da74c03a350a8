# `make up` runs perdure, `make test` tests it. `make help` lists the other targets.
#
#   make up ARGS="--port 9000"             options of `perdure up`
#   make test PYTEST_ARGS="-k lease -x"    options of pytest; TEST_PROCESSES=1, one test at a time
#   make test PYTHON=python3.12            another interpreter for .venv
#   make chaos SECONDS=600 SEED=4          ten minutes of the same faults each time
#   make chaos BROKER=rabbitmq POOLER=1    over RabbitMQ, and with PgBouncer before PostgreSQL

PYTHON ?= $(shell for each in python3 python3.12 python3.13 python3.14 python3.11; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; done || echo python3)
BIN := .venv/bin
SOURCES := perdure workers tasks schedules alembic benchmarks examples tests
ARGS ?=
SECONDS ?=
SEED ?=
BROKER ?=
POOLER ?=
# More processes than cores, since tests mostly wait; the long tests, which `make check` adds, wait most. The number is
# limited, since each process first collects all tests.
CORES := $(shell getconf _NPROCESSORS_ONLN)
TEST_PROCESSES ?= $(shell echo $$(($(CORES) < 8 ? $(CORES) + 1 : 8)))
PYTEST_ARGS ?=
# The packages of which `make coverage` requires 95 %.
COVERED := turns sessions memory casebank
# `make exhaustive` runs the tests here that use a database a second time with unprepared statements, as behind a pooler.
UNPREPARED := tests/turns tests/sessions tests/memory tests/casebank tests/users tests/schedules \
	tests/adapters/pydantic_ai/test_both_kinds.py
# Write bytecode even if the environment forbids it: otherwise each test process compiles all modules again.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) \
	--dist loadfile --no-loadscope-reorder

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help up demo test check exhaustive coverage lint types imports dead-code docs format bench chaos browser install clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

up: .venv/embedded.installed ## run everything on this machine: servers, gateway, workers, beat, Flower
	@$(BIN)/perdure up $(ARGS)

demo: .venv/embedded.installed ## kill a worker in the middle of an answer, and see the answer arrive
	@$(BIN)/perdure demo $(ARGS)

test: .venv/test.installed ## run the tests, except the longest, on throw-away servers
	$(PYTEST) -m "not chaos and not long and not browser" $(PYTEST_ARGS)

check: .venv/dev.installed lint types imports dead-code ## run all checks and most tests, as continuous integration does
	.ci/clients
	.ci/helm
	.ci/again env $(PYTEST) -m "not chaos and not exhaustive and not browser" $(PYTEST_ARGS)

exhaustive: .venv/dev.installed ## run every test with every variant, also with the oldest pydantic-ai: 40 minutes
	.ci/clients
	.ci/helm
	.ci/again env $(PYTEST) $(PYTEST_ARGS)
	.ci/again env $(PYTEST) --unprepared -m "not chaos and not long and not browser" $(UNPREPARED) $(PYTEST_ARGS)
	.ci/oldest .ci/again env $(PYTEST) -m "not long" tests/adapters $(PYTEST_ARGS)
	.ci/oldest .ci/again env $(PYTEST) tests/models/adapted tests/models/test_tolerance_of_all.py $(PYTEST_ARGS)

check exhaustive: TEST_PROCESSES = $(shell echo $$(($(CORES) < 4 ? $(CORES) * 2 : 8)))

# Measures without the processes that tests start and kill. A package under 95 % fails.
coverage: .venv/dev.installed ## measure which branches the tests run
	.ci/clients
	.ci/helm
	$(PYTEST) --cov --cov-report= $(PYTEST_ARGS)
	$(BIN)/coverage report --format=total
	@for each in $(COVERED); do \
		$(BIN)/coverage report --include="perdure/$$each/*" --fail-under=95 || low=1; \
	done; test -z "$$low"

lint: .venv/dev.installed ## check rules, docstrings and format with ruff
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: .venv/dev.installed ## check types with mypy in strict mode
	$(BIN)/mypy

imports: .venv/dev.installed ## check the import contracts
	$(BIN)/lint-imports

dead-code: .venv/dev.installed ## find unused code
	$(BIN)/vulture

docs: .venv/test.installed ## generate docs/http.md from the gateway's OpenAPI document
	$(BIN)/python -m tests.repository.http_reference

format: .venv/dev.installed ## format the sources
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: .venv/bench.installed ## run the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

chaos: .venv/test.installed ## run the long fault-injection tests, with faults for SECONDS (180), drawn from SEED
	CHAOS_SECONDS=$(SECONDS) CHAOS_SEED=$(SEED) CHAOS_BROKER=$(BROKER) CHAOS_POOLER=$(POOLER) \
		$(BIN)/python -m pytest -m chaos --timeout 0 $(PYTEST_ARGS)

browser: .venv/dev.installed ## test the web chat in headless Chromium
	$(BIN)/python -m pytest tests/browser -m "browser or not browser" $(PYTEST_ARGS)

install: .venv/dev.installed ## create .venv with the dependencies for development

clean: ## remove .venv, caches and build results; the data in PERDURE_DATA_DIR stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage build dist
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# .ci/install runs only if the marker file of an extra is missing or outdated. An extra includes the previous ones,
# whose markers .ci/install writes, too.
.venv/%.installed: pyproject.toml constraints.txt .ci/install .ci/uv.txt
	@.ci/install $* $(PYTHON)
