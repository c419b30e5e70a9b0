# surespec: everything below does its own set-up. `make demo` and `make test` are the two to know.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || echo python3)
VENV ?= .venv
# Work where n-gram drafting is at home; DEMO_PROMPTS=chat or mixed shows work where it is not.
DEMO_PROMPTS ?= copy
DEMO_OUT ?= demo$(if $(filter-out copy,$(DEMO_PROMPTS)),-$(DEMO_PROMPTS))
BIN := $(VENV)/bin

.PHONY: demo test test-model test-real test-dynamo test-faults engine-vllm engine-sglang engine-dynamo engine-llamacpp lint clean help

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

demo: $(VENV)/.base  ## tune a small real model on this machine: verdict, report, command
	@$(BIN)/surespec fetch smollm2-135m > /dev/null
	@$(BIN)/surespec tune --model smollm2-135m --prompts $(DEMO_PROMPTS) --out $(DEMO_OUT) $(if $(wildcard $(DEMO_OUT)/manifest.json),--resume); \
	code=$$?; echo "exit code $$code (0 keep, 10 disable, 11 marginal or inconclusive: each is a result)"; \
	case $$code in 0|10|11) exit 0;; *) exit $$code;; esac

test: $(VENV)/.dev  ## the tests (toy models, minutes)
	$(BIN)/python -m pytest

test-model: $(VENV)/.dev  ## the tests that need the small real model
	@$(BIN)/surespec fetch smollm2-135m > /dev/null
	$(BIN)/python -m pytest -m model --timeout 900

test-real: $(VENV)/.dev engine-vllm engine-sglang $(if $(LLAMACPP),engine-llamacpp)  ## tests on real engines: vLLM and SGLang on the CPU; LLAMACPP=1 adds llama.cpp
	@echo "Real engines under test: vllm, sglang$(if $(LLAMACPP), and llamacpp)."
	$(BIN)/python -m pytest -m real --timeout 1500 tests/real/test_real_vllm.py tests/real/test_real_sglang.py $(if $(LLAMACPP),tests/real/test_real_llamacpp.py)

test-faults: $(VENV)/.dev  ## every fault at every moment of a tune (under 10 minutes)
	$(BIN)/python -m pytest tests/faults -m 'faults or not faults' --timeout 300

test-dynamo: $(VENV)/.dev engine-dynamo  ## tests on a real Dynamo: frontend, router, vLLM's worker and our own
	$(BIN)/python -m pytest -m real --timeout 1500 tests/real/test_real_dynamo.py

engine-vllm: $(VENV)/.base  ## install vLLM for CPUs beside the checkout, once, and check that it serves (3.8 GB)
	$(BIN)/python tools/install_engine.py vllm

engine-sglang: engine-vllm  ## SGLang beside vLLM's environment (its server runs on a CPU without speculation)
	$(BIN)/python tools/install_engine.py sglang

engine-dynamo: engine-vllm  ## NVIDIA Dynamo beside vLLM's environment: real frontend, router and workers
	$(BIN)/python tools/install_engine.py dynamo

engine-llamacpp: $(VENV)/.base  ## the same for llama.cpp (compiling takes half an hour)
	$(BIN)/python tools/install_engine.py llamacpp

lint: $(VENV)/.dev  ## ruff and mypy --strict
	$(BIN)/ruff check src tests tools benchmarks
	$(BIN)/ruff format --check src tests tools benchmarks
	$(BIN)/mypy

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache dist

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "surespec needs Python 3.11 or newer (found: $$($(PYTHON) -V)); set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base pyproject.toml
	$(BIN)/python -m pip install --quiet --group dev
	@touch $@
