# make demo    set up, fetch the embedded model, answer PROMPT on the CPU
# make test    set up, run all tests
# make lint    ruff, mypy, the import law
# make bench   the measurements that the documentation states
# make matrix  every drafter in every circumstance, bit for bit (docs/matrix.md); goes on where it
#              stopped, MATRIX_ARGS="--minutes 20" stops it
# make cycles  engines of several ranks, begun and ended 50 times, half of them killed
# make fuzz-native   the native code under address and undefined-behaviour sanitizers, with random
#              shapes and numbers; FUZZ_ARGS="SECONDS SEED", a minute without
#
# Nothing outside .venv and the model cache is touched. A second call does no set-up work.

PYTHON ?= python3
VENV   ?= .venv
MODEL  ?= smollm2
PROMPT ?= Explain step by step why ships float although steel sinks.

# Two jobs: enough for a small native module, gentle with small machines.
export CMAKE_BUILD_PARALLEL_LEVEL ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Given to commands through the environment, as typed: quotes, $ and backticks in it stay text.
override PROMPT := $(value PROMPT)
export PROMPT

BIN    := $(VENV)/bin
INPUTS := pyproject.toml constraints-cpu.txt CMakeLists.txt $(wildcard native/*)
PIP    := $(BIN)/python -m pip install --quiet -c constraints-cpu.txt

.PHONY: demo test lint bench matrix cycles fuzz-native install clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.drumline
	@$(BIN)/drumline fetch $(MODEL)
	@$(BIN)/drumline demo --model $(MODEL) --prompt "$$PROMPT"

test: $(VENV)/.drumline-test
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.drumline-test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(VENV)/.drumline
	@$(BIN)/drumline bench latency --model $(MODEL)

matrix: $(VENV)/.drumline-test
	@PYTHONPATH=tests $(BIN)/python tests/matrix.py $(MATRIX_ARGS)

cycles: $(VENV)/.drumline-test
	@CYCLES=50 $(BIN)/python -m pytest -q tests/parallel_engine/test_faults.py -k cycles

fuzz-native:
	@cmake -S native/fuzz -B build/fuzz >/dev/null
	@cmake --build build/fuzz --parallel $(CMAKE_BUILD_PARALLEL_LEVEL) >/dev/null
	@build/fuzz/fuzz_native $(FUZZ_ARGS)

install: $(VENV)/.drumline

# A stamp each: the venv, the package in it, the test tools in it.
$(BIN)/python:
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.drumline: $(INPUTS) | $(BIN)/python
	@echo "installing drumline (the first time takes a few minutes)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.drumline-test: $(INPUTS) | $(BIN)/python
	@echo "installing drumline and its test tools (the first time takes a few minutes)"
	@$(PIP) -e '.[test]'
	@touch $(VENV)/.drumline $@

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
