# Every target makes .venv first if it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check slow e2e format clean

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch -e '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/terashard demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_wheel.py

slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow --timeout 3000

e2e: $(VENV)/.installed
	$(BIN)/python -m pytest -m e2e --timeout 3000

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache
