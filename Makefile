# Each target sets up what it needs: a virtual environment in .venv with the pinned lock.
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
IN_VENV := PATH="$(BIN):$$PATH"

.PHONY: help repro test ui check lesson lock clean

help:
	@echo "make repro   install, then prepare, train and evaluate what is out of date"
	@echo "make ui      the MLflow UI on this project's runs, http://127.0.0.1:5000"
	@echo "make test    install the test tools too, then run the test suite"
	@echo "make check   formatter, linter, type checker"
	@echo "make lesson  fp32, mixed precision, accumulation and both, side by side: a table, a figure, four runs"
	@echo "make lock    renew requirements.txt, requirements-dev.txt from pyproject.toml"
	@echo "make clean   remove what reproductions and tools made; not runs, not .venv"

repro: $(VENV)/.runtime
	$(IN_VENV) dvc repro

# a file's tests share fixtures; the longest files (tests/end_to_end/) come early, so that no worker waits at the end
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder
test: $(VENV)/.dev
	$(IN_VENV) pytest $(SIDE_BY_SIDE)

ui: $(VENV)/.runtime
	$(IN_VENV) python -m pipeline ui

check: $(VENV)/.dev
	$(IN_VENV) ruff format --check .
	$(IN_VENV) ruff check .
	$(IN_VENV) mypy

lesson: $(VENV)/.runtime
	$(IN_VENV) python benchmarks/lesson.py

COMPILE := pip-compile --quiet --strip-extras --allow-unsafe --no-emit-index-url --no-emit-find-links \
	--no-emit-trusted-host --annotation-style=line
lock: $(VENV)/.dev
	$(IN_VENV) CUSTOM_COMPILE_COMMAND="make lock" $(COMPILE) -o requirements.txt pyproject.toml
	$(IN_VENV) CUSTOM_COMPILE_COMMAND="make lock" $(COMPILE) --extra dev -c requirements.txt \
		-o requirements-dev.txt pyproject.toml
	@echo "conda.yaml repeats the direct dependencies: bring its versions in line (a test compares them)"

clean:
	rm -rf data/prepared models reports .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find pipeline tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing into $(VENV): downloads about 3 GB (torch with CUDA), takes 5.5 GB on disk, minutes."
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: requirements.txt | $(VENV)/.python
	$(BIN)/python -m pip install --quiet -r requirements.txt
	@touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	@touch $@
