# Every target makes .venv first if it is missing, or if it is of another Python than $(PYTHON).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check slow e2e format clean

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v <= (3, 13))' || { \
	  echo "terashard needs Python 3.11 to 3.13; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	       "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test "$$($(BIN)/python -V 2>&1)" = "$$($(PYTHON) -V 2>&1)" || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing terashard and torch into $(VENV) (a minute or more) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch -e '.[dev]'
	@touch $@

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
