# From a clean clone: `make demo` runs the main job on the CPU, `make test` passes the tests. Both set up what they need.
#
#   PYTHON=...       interpreter for the virtual environment (default: python3.11 where present, else python3)
#   TORCH_SPEC=...   the torch to install, for example TORCH_SPEC='torch==2.13.0+cpu' with your own package index configured
#   GPU_PYTHON=...   interpreter of `make test-gpu`, with jax, torch, nanobind and pytest installed (default: python3)
#   DEMO_ARGS=...    passed on to examples/tiny_moe_lm.py, for example DEMO_ARGS=--short
#   PYTEST_ARGS=...  passed on to pytest

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := $(VENV)/constraints.txt
EXTRAS := torch,triton,flax,cli,examples,test
SOURCES := pyproject.toml constraints-cpu.txt Makefile $(wildcard bridge/*.cc bridge/*.h bridge/CMakeLists.txt)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-gpu test-sanitize lint typecheck bench bench-bridge clean
GPU_PYTHON ?= python3

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

# Rewritten only when the torch asked for changes, so that another TORCH_SPEC installs again.
.PHONY: force
$(CONSTRAINTS): force
	@mkdir -p $(VENV)
	@if [ -n "$(TORCH_SPEC)" ]; then echo "$(TORCH_SPEC)"; grep -v '^torch=' constraints-cpu.txt; else cat constraints-cpu.txt; fi > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

$(VENV)/.installed: $(SOURCES) $(CONSTRAINTS)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python {sys.version.split()[0]} found; jax_mxfp4_moe needs 3.11 or later: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@echo "installing $$(grep -v '^#' $(CONSTRAINTS)) for $$($(BIN)/python --version); where no CPU build of it is at hand this downloads several gigabytes: set TORCH_SPEC to choose another"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	touch $@

install: $(VENV)/.installed  ## make the virtual environment, install the package and its CPU dependencies, build the bridge

demo: install  ## train a small MoE language model, put its experts into MXFP4, and print the table
	$(BIN)/python examples/tiny_moe_lm.py $(DEMO_ARGS)

# One thread each: two processes whose torch threads take both cores wait for each other.
test: install  ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

build/gpu/.built: $(wildcard bridge/*.cc bridge/*.h bridge/CMakeLists.txt)
	cmake -S bridge -B build/gpu -DPython_EXECUTABLE="$$(command -v $(GPU_PYTHON))"
	cmake --build build/gpu -j
	cmake --install build/gpu --prefix .
	touch $@

test-gpu: build/gpu/.built  ## on a GPU machine: build the bridge against its own jaxlib and torch, run the tests that need GPUs
	PYTHONPATH=. XLA_PYTHON_CLIENT_MEM_FRACTION=0.4 $(GPU_PYTHON) -m pytest tests/gpu -rs $(PYTEST_ARGS)

# The bridge's CPU tests with an instrumented extension. The interpreter, torch and XLA are not instrumented: leaks and races inside
# of them are not looked for, what the bridge itself does is.
RUN_INSTRUMENTED = import sys; sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]; \
  sys.path.insert(0, sys.argv.pop(1)); import pytest; sys.exit(pytest.main(sys.argv[1:]))
# T32 is left out: a sanitizer keeps freed memory on purpose.
SANITIZED_TESTS = tests/bridge/test_call.py tests/bridge/test_plan.py -p no:cacheprovider -q -k "not t32"

test-sanitize: install  ## the bridge's CPU tests under AddressSanitizer + UBSan, and under ThreadSanitizer
	for kind in address,undefined thread; do \
	  cmake -S bridge -B build/sanitize-$$kind -DPython_EXECUTABLE=$(abspath $(BIN))/python -DBRIDGE_SANITIZE=$$kind -DCMAKE_BUILD_TYPE=RelWithDebInfo && \
	  cmake --build build/sanitize-$$kind -j2 && rm -rf build/sanitize-$$kind/root && mkdir -p build/sanitize-$$kind/root && \
	  cp -r jax_mxfp4_moe build/sanitize-$$kind/root/ && rm -f build/sanitize-$$kind/root/jax_mxfp4_moe/_bridge*.so && \
	  cmake --install build/sanitize-$$kind --prefix build/sanitize-$$kind/root || exit 1; \
	done
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 PYTHONMALLOC=malloc JAX_PLATFORMS=cpu \
	  $(BIN)/python -c '$(RUN_INSTRUMENTED)' build/sanitize-address,undefined/root $(SANITIZED_TESTS)
	LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	  TSAN_OPTIONS="suppressions=$(abspath tests/bridge/tsan.supp) exitcode=66 report_mutex_bugs=0 detect_deadlocks=0" JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 \
	  $(BIN)/python -c '$(RUN_INSTRUMENTED)' build/sanitize-thread/root $(SANITIZED_TESTS)

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
