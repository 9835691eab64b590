# The two commands: `make demo` and `make test`. Both install what they need into .venv first.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint bench clean

demo: .venv/installed-demo
	$(BIN)/python -m jaxtrain --config configs/demo.yaml --run-dir runs/demo-jax
	$(BIN)/python -m torchtrain --config configs/demo.yaml --run-dir runs/demo-torch
	$(BIN)/python -m shared.compare runs/demo-jax runs/demo-torch --json runs/demo.json --picture runs/demo.png

test: .venv/installed-dev lint
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 10

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/installed-dev
	$(BIN)/python tests/bench/overhead.py
	$(BIN)/python tests/bench/loader.py
	PYTHONPATH=. $(BIN)/python tests/bench/memory.py
	PYTHONPATH=. $(BIN)/python tests/bench/loss.py
	$(BIN)/python tests/bench/checkpoint.py
	$(BIN)/python tests/bench/faults.py

clean:
	rm -rf .venv .cache runs

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed-demo: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing into .venv (a few minutes the first time) ..."
	$(INSTALL) --editable '.[jax,torch,demo]'
	@touch $@

.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing into .venv (a few minutes the first time) ..."
	$(INSTALL) --editable '.[jax,torch,demo,dev]'
	@touch $@ .venv/installed-demo
