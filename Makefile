# Two commands for users: `make demo` and `make test`. One for contributors: `make check`.
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= python3
PYTEST_WORKERS ?= 3

.PHONY: install demo test check docs lint format clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Trains on two ranks, then the same global batches in one process, and compares the parameters.
demo: install
	@rm -rf $(VENV)/demo && mkdir $(VENV)/demo
	@echo "Two ranks:"
	@OMP_NUM_THREADS=1 $(BIN)/paceline run -n 2 examples/digits.py --save $(VENV)/demo/two.pt
	@echo "One process, on the same global batches (the last two lines):"
	@OMP_NUM_THREADS=1 $(BIN)/python examples/digits.py --save $(VENV)/demo/one.pt | tail -n 2
	@$(BIN)/python examples/compare.py $(VENV)/demo/two.pt $(VENV)/demo/one.pt

# Much of it starts processes, which need not compile what they import.
test: install
	@$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS)

check: lint
	$(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) -m "not slow"

# The site, to be opened from the disk or served as it is.
docs: install
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

lint: install
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: install
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
