# Penstock. `make` alone lists the targets; each that needs the virtual environment makes it.

PYTHON_ENV := .venv/bin/python
PYTEST := $(PYTHON_ENV) -m pytest
WORKERS ?= 3
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench soak lock clean

help: ## list the targets
	@echo "Penstock: lake tables that are live"
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  WORKERS=n   test processes (3)       PYTHON=path   the Python to set up with"

setup: ## make .venv from requirements.lock; instant when nothing changed
	@scripts/setup

demo: setup ## stream documents with Spark, kill the driver half-way, count what was lost
	@.venv/bin/penstock demo

test: setup ## all tests but the soak
	@scripts/run-tests -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10 --durations-min=1

check: setup ## lint, format, types, and the tests of docs, API and project; snippets: make test
	@$(PYTHON_ENV) -m ruff check .
	@$(PYTHON_ENV) -m ruff format --check .
	@$(PYTHON_ENV) -m mypy --strict
	@$(PYTEST) -q tests/test_docs.py tests/test_public_api.py tests/test_project.py -k "not python_blocks"

format: setup ## format and fix what can be fixed
	@$(PYTHON_ENV) -m ruff check --fix .
	@$(PYTHON_ENV) -m ruff format .

bench: setup ## the benchmarks: writes, memory over a long run, reads, maintenance, packed files, Spark
	@$(PYTHON_ENV) -m bench.write
	@$(PYTHON_ENV) -m bench.memory
	@$(PYTHON_ENV) -m bench.read
	@$(PYTHON_ENV) -m bench.maintain
	@$(PYTHON_ENV) -m bench.packed
	@$(PYTHON_ENV) -m bench.spark

soak: setup ## the long tests: hundreds of kills and races
	@$(PYTEST) -q -m soak --timeout=3600 --durations=10

lock: ## resolve pyproject.toml again into requirements.lock
	@scripts/lock

clean: ## remove .venv and everything made by tools
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
