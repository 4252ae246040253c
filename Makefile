# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv itself.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint packages tables clean
.DEFAULT_GOAL := test

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/ready
	$(BIN)/python -m bench.demo

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint packages
	$(BIN)/pytest -n auto --dist worksteal

# What some tests need of Debian, if this machine lacks it and lets us.
packages:
	.ci/packages

# Rewrites the tables in docs/ from the simulator.
tables: .venv/ready
	$(BIN)/python -m bench.policies
	$(BIN)/python -m bench.papers
	$(BIN)/python -m bench.picture

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
