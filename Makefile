# One command each; VENV names the virtual environment they use.
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: help check test lint types imports wheel demo clean
help: ## say what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/ruff:
	python3 -m venv $(VENV)
	$(BIN)/pip install -q -e '.[dev]'

check: ## everything that CI runs
	bash .ci/run

test: $(BIN)/ruff ## the tests
	$(BIN)/pytest

lint: $(BIN)/ruff ## ruff
	$(BIN)/ruff check xce_supervisor tests
	$(BIN)/ruff format --check xce_supervisor tests

types: $(BIN)/ruff ## mypy, strict
	$(BIN)/mypy

imports: $(BIN)/ruff ## the floors
	$(BIN)/lint-imports

wheel: $(BIN)/ruff ## dist/*.whl
	$(BIN)/python -m build --wheel

demo: $(BIN)/ruff ## the demo
	$(BIN)/xce-supervisor demo

clean: ## what tools left behind
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
