# On a fresh machine: `make demo`, `make test`, `make test-long`. Each makes .venv itself.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-long mutants lint packages wheel tables clean
.DEFAULT_GOAL := test

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Frameworks that there are adapters for, or examples, and whose tests only `make test-long` runs.
.venv/adapters: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,adapters]'
	touch $@

demo: .venv/ready
	$(BIN)/python -m bench.demo

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# More processes than cores: some tests wait.
test: lint packages
	$(BIN)/pytest -n 3 --dist worksteal --durations=20

# What takes long or depends on chance: faults at random, many workers, hosts that are cut off, steps
# that are timed, and every property on new random cases. Prints its seed; SEED=... replays it.
ifndef SEED
SEED := $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
endif
test-long: .venv/adapters packages
	@echo "replay this run with: make test-long SEED=$(SEED)"
	EVENSTEP_SEED=$(SEED) HYPOTHESIS_PROFILE=long \
	    $(BIN)/pytest -n auto --dist worksteal -m "long or hypothesis" --hypothesis-seed=$(SEED) || \
	    { echo "replay this run with: make test-long SEED=$(SEED)"; exit 1; }

# Breaks the code in one place after the other, and names the breaks that no test notices.
mutants: .venv/ready
	$(BIN)/python -m tests.mutants

# What some tests need of Debian, if this machine lacks it and lets us.
packages:
	.ci/packages
	.ci/promtool

# Builds sdist and wheel into dist/, installs the wheel into a new environment, and runs it there.
wheel: .venv/ready
	$(BIN)/python .ci/wheel.py

# Rewrites the tables in docs/ from the simulator; `python -m bench.matrix` that of docs/loops.md.
tables: .venv/ready
	$(BIN)/python -m bench.policies
	$(BIN)/python -m bench.papers

clean:
	rm -rf dist .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
