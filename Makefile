# From a clean clone: `make demo` runs the main job on the CPU, `make test` passes the tests. Both set up what they need.
#
#   PYTHON=...       interpreter for the virtual environment (default: python3.11 where present, else python3)
#   TORCH_SPEC=...   the torch to install, for example TORCH_SPEC='torch==2.13.0+cpu' with your own package index configured
#   DEMO_ARGS=...    passed on to examples/tiny_moe_lm.py, for example DEMO_ARGS=--short
#   PYTEST_ARGS=...  passed on to pytest

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := $(VENV)/constraints.txt
EXTRAS := torch,flax,cli,examples,test
SOURCES := pyproject.toml constraints-cpu.txt Makefile $(wildcard bridge/*.cc bridge/*.h bridge/CMakeLists.txt)

.DEFAULT_GOAL := help
.PHONY: help install demo test lint typecheck bench bench-bridge clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

$(VENV)/.installed: $(SOURCES)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python {sys.version.split()[0]} found; jax_mxfp4_moe needs 3.11 or later: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@if [ -n "$(TORCH_SPEC)" ]; then echo "$(TORCH_SPEC)" > $(CONSTRAINTS); else cp constraints-cpu.txt $(CONSTRAINTS); fi
	@echo "installing $$(grep -v '^#' $(CONSTRAINTS)) for $$($(BIN)/python --version); where no CPU build of it is at hand this downloads several gigabytes: set TORCH_SPEC to choose another"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	touch $@

install: $(VENV)/.installed  ## make the virtual environment, install the package and its CPU dependencies, build the bridge

demo: install  ## train a small MoE language model, put its experts into MXFP4, and print the table
	$(BIN)/python examples/tiny_moe_lm.py $(DEMO_ARGS)

test: install  ## run the tests
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

lint: install  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: install  ## mypy
	$(BIN)/mypy

bench: install  ## one row per workload and implementation
	$(BIN)/python -m jax_mxfp4_moe.bench

bench-bridge: install  ## host microseconds of a call through each bridge
	$(BIN)/python benchmarks/bridge.py

clean:  ## remove the virtual environment and every build output
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
