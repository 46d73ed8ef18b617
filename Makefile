# Every target is one line; "make help" lists them.
comma := ,
find_python = $(firstword $(foreach p,python3 python3.12 python3.13 python3.11,$(if $(shell $(p) -c '$(1)' 2>/dev/null && echo y),$(p))))
PYTHON ?= $(or $(call find_python,import ensurepip$(comma) sys$(comma) venv; sys.exit(sys.version_info < (3$(comma) 11))),$(call find_python,import sys; sys.exit(sys.version_info < (3$(comma) 11))))
BIN := .venv/bin
GUARD_DEMO_ARGS ?=
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types unit gpu format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## Make .venv with vLLM for this machine and this checkout; instant when nothing changed
	@$(if $(PYTHON),$(PYTHON) scripts/bootstrap.py,echo "No Python 3.11 or newer found. Install one, or run: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; exit 1)

demo: install ## Start the engine and the proxy, send guarded requests, show verdicts (GUARD_DEMO_ARGS=--once: then end)
	@$(BIN)/guard demo $(GUARD_DEMO_ARGS)

test: lint types unit ## Everything that CI checks

lint: install ## Check style and formatting
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: install ## Check types
	@$(BIN)/mypy

unit: install ## Run the tests, two processes side by side (PYTEST_ARGS="-k name" picks some)
	@$(BIN)/pytest -n 2 --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

gpu: install ## Run what needs an NVIDIA GPU: the kernels, and engines under CUDA graphs
	@$(BIN)/pytest -p tests.engine.graphs_on_cuda tests/mia/test_kernels.py $(addprefix tests/engine/test_,$(addsuffix .py,cuda_graphs exactness steering scheduling idle tensor_parallel real_weights)) $(PYTEST_ARGS)

format: install ## Repair style and formatting where that is mechanical
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean: ## Remove the virtual environment and caches; pulled models stay
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist
