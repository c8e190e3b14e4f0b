# The commands of the project. Variables: VENV (the environment), TORCH (what pip
# installs there as torch, say TORCH=torch==2.13.0), RANKS, STAGE and ARGS (of
# train; of bench), SANITIZE (address,undefined or thread), PEERS (of bench: torch,
# or all, which installs DeepSpeed into PEERS_VENV).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

VENV ?= .venv
TORCH ?= torch
RANKS ?= 2
STAGE ?= 3
ARGS ?=
SANITIZE ?= address,undefined
PEERS ?= torch
PEERS_VENV ?= .venv-peers

BIN := $(VENV)/bin
PYTHON := $(BIN)/python
# By torch's version, as in setup.py; evaluated in recipes, when torch is there.
BUILD = build/$(shell $(PYTHON) -c "from importlib.metadata import version; print(version('torch'))")

comma := ,
SANITIZED = $(BUILD)-$(subst $(comma),-,$(SANITIZE))
# torch is not instrumented: the thread sanitizer sees only what stays in ours.
SANITIZED_TESTS = $(if $(findstring thread,$(SANITIZE)),-R "layout|memory|host$$|host_recovery",)

PYTEST = OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q --durations 25

CPP = $(shell git ls-files -co --exclude-standard -- '*.h' '*.cpp' '*.cu')
TIDY = $(shell git ls-files -co --exclude-standard -- 'zero/*.cpp' 'csrc/kernels/*.cpp')
# clang-tidy brings clang's headers, but no omp.h: the compiler's, after all others.
TIDY_FLAGS = --quiet --extra-arg=-idirafter$(dir $(shell g++ -print-file-name=include/omp.h)) \
  --extra-arg=-Wno-deprecated-declarations --extra-arg=-Wno-unknown-pragmas

.PHONY: build dependencies nvcc system-packages train train-cpp test quick bench peers instructions \
  sanitize lint stubs format clean

build: dependencies system-packages
	$(PYTHON) setup.py -q build_ext --inplace
	@if ! [ $(VENV)/.editable -nt setup.py -a $(VENV)/.editable -nt pyproject.toml ]; then \
	  $(PYTHON) -m pip install -q --no-deps --no-build-isolation -e . && touch $(VENV)/.editable; \
	fi

# pip runs when the requirements have changed, or when TORCH is given and is not
# what it was the last time; a torch that is there already is kept otherwise.
dependencies: $(PYTHON)
	@if ! [ $(VENV)/.dependencies -nt requirements-dev.txt ] || \
	   [[ "$(origin TORCH)" != file && "$$(cat $(VENV)/.dependencies)" != "$(TORCH)" ]]; then \
	  $(PYTHON) -m pip install -q --upgrade pip && \
	  $(PYTHON) -m pip install -q "$(TORCH)" && \
	  $(PYTHON) -m pip install -q -r requirements-dev.txt && \
	  echo "$(TORCH)" > $(VENV)/.dependencies; \
	fi

# The wheels of nvcc, for a torch with CUDA where no nvcc of its version is found:
# cmake/ZeroCuda.cmake looks in the same places.
nvcc: dependencies
	@cuda=$$($(PYTHON) -c 'import torch; print(torch.version.cuda or "")'); \
	[ -n "$$cuda" ] || exit 0; \
	for nvcc in "$${CUDACXX:-}" "$$(command -v nvcc || true)" "$${CUDA_HOME:-}/bin/nvcc" \
	    "$${CUDA_PATH:-}/bin/nvcc" /usr/local/cuda/bin/nvcc; do \
	  if "$$nvcc" --version 2> /dev/null | grep -q "release $${cuda%%.*}\."; then exit 0; fi; \
	done; \
	$(PYTHON) -m pip install -q "nvidia-cuda-nvcc==$$cuda.*" "nvidia-nvvm==$$cuda.*" \
	  "nvidia-cuda-crt==$$cuda.*" "nvidia-cuda-cccl==$$cuda.*"

$(PYTHON):
	python3 -m venv $(VENV)

# Catch2 for the C++ tests, nlohmann/json for the library's build, valgrind for what
# counts instructions.
system-packages:
	@missing=; \
	has() { for folder in /usr/include /usr/local/include; do \
	  if compgen -G "$$folder/$$1" > /dev/null; then return 0; fi; done; return 1; }; \
	has 'catch2/catch*.hpp' || missing="$$missing catch2"; \
	has nlohmann/json.hpp || missing="$$missing nlohmann-json3-dev"; \
	has valgrind/callgrind.h || missing="$$missing valgrind"; \
	if [ -n "$$missing" ]; then \
	  [ "$$(id -u)" = 0 ] || { echo "packages are missing: sudo apt-get install$$missing" >&2; exit 1; }; \
	  apt-get install -y -q $$missing || { apt-get update -q && apt-get install -y -q $$missing; }; \
	fi

train: build
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) \
	  examples/train_gpt.py --stage $(STAGE) $(ARGS)

train-cpp: build
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) --no-python \
	  $(BUILD)/train_gpt --stage $(STAGE) $(ARGS)

quick: SELECTED = -m "not slow"
test quick: build
	$(BIN)/ctest --test-dir $(BUILD) -j 2 --output-on-failure
	$(PYTEST) $(SELECTED) -n 2 tests/python tests/distributed
	$(PYTEST) $(SELECTED) tests/gpu

bench: build $(if $(filter all,$(PEERS)),peers)
	$(PYTHON) benchmarks/run.py --peers $(PEERS) $(ARGS)

# DeepSpeed's own operators are not built: torch's optimizer steps in benchmarks.
peers: dependencies
	@torch="torch==$$($(PYTHON) -c "from importlib.metadata import version as v; print(v('torch').split('+')[0])")"; \
	if [[ "$$(cat $(PEERS_VENV)/.installed 2> /dev/null)" != "$$torch" ]]; then \
	  python3 -m venv $(PEERS_VENV) && \
	  $(PEERS_VENV)/bin/python -m pip install -q "$$torch" numpy setuptools wheel ninja && \
	  DS_BUILD_OPS=0 $(PEERS_VENV)/bin/python -m pip install -q --no-build-isolation deepspeed && \
	  echo "$$torch" > $(PEERS_VENV)/.installed; \
	fi

# ARGS=--update after a change that makes steps cheaper, or dearer for a reason.
instructions: build
	$(PYTHON) benchmarks/instructions.py $(or $(ARGS),--check)

sanitize: dependencies system-packages
	PATH="$(abspath $(BIN)):$$PATH" cmake -G Ninja -S . -B $(SANITIZED) -DZERO_SANITIZE=$(SANITIZE) \
	  -DZERO_WITH_CUDA=OFF -DZERO_BUILD_PYTHON=OFF -DZERO_BUILD_EXAMPLES=OFF \
	  -DPython3_EXECUTABLE=$(abspath $(PYTHON))
	PATH="$(abspath $(BIN)):$$PATH" cmake --build $(SANITIZED) --parallel $${MAX_JOBS:-$$(nproc)}
	$(BIN)/ctest --test-dir $(SANITIZED) --output-on-failure $(SANITIZED_TESTS)

# Each source by itself, with its own includes.
lint: build
	@PATH="$(abspath $(BIN)):$$PATH" cmake -G Ninja -S . -B build/lint $${CMAKE_ARGS:-} -DCMAKE_UNITY_BUILD=OFF \
	  -DPython3_EXECUTABLE=$(abspath $(PYTHON)) > /dev/null
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@printf '%s\n' $(TIDY) | \
	  xargs -P $$(nproc) -n 1 $(BIN)/clang-tidy -p build/lint $(TIDY_FLAGS)

stubs: build
	$(BIN)/pybind11-stubgen zero_torch._C -o python

format: dependencies
	$(BIN)/clang-format -i $(CPP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf build python/*.egg-info python/zero_torch/{lib,include,share,_build_info.py} \
	  python/zero_torch/_C.*.so $(VENV)/.editable
	find python tests examples benchmarks -name __pycache__ -prune -exec rm -r {} +
