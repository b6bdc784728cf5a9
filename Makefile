# Every target does its own set-up on a fresh machine: .venv, torch, then this project with what the target needs. `make help` lists them.

PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
# auto: the CPU build where there is no NVIDIA GPU, or nothing; any: else the plain one; cpu; cuda
TORCH_BUILD ?= auto
NPROC ?= 2
# one more than the cores it is planned for: tests wait for processes to start, to end or to give up
JOBS ?= 3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# what is told of a fresh machine: torch, the package, and with `make train` the example
STEPS := $(if $(filter train,$(MAKECMDGOALS)),3,2)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test suite coverage test-slow test-matrix mutate bench lint form types docs docs-serve clean

help:
	@echo "make train       train a GPT with ZeRO-3 on $(NPROC) processes and show it   (ARGS='--steps 100 ...')"
	@echo "make test        lint, types, the whole quick test suite: what CI runs, 16 minutes on 2 cores   (JOBS=1: one file at a time)"
	@echo "make suite       the tests alone: neither lint nor types"
	@echo "make coverage    the same suite with coverage, which must stay at 90%: a quarter slower"
	@echo "make test-slow   the tests that take minutes or repeat random faults, then make coverage"
	@echo "make test-matrix make test on every Python from 3.11 that is here, each in .venv-<version>, on the oldest torch, with other kernels"
	@echo "make mutate      deliberate faults, one at a time: which of them the tests find   (ARGS='--only codec')"
	@echo "make bench       the step benchmark, DeepSpeed included   (ARGS='...')"
	@echo "make lint        ruff (rules and format), mypy, the limits of scripts/shape.py"
	@echo "make docs        the documentation site, into site/: broken links and anchors fail"
	@echo "make docs-serve  the same on a local port, built again when a page changes"
	@echo "make clean       remove .venv and every cache"

train: $(VENV)/.ready-base
	@echo "== step 3 of $(STEPS): $(BIN)/zeroshard run --nproc $(NPROC) examples/train_gpt.py $(ARGS)"
	@$(BIN)/zeroshard run --nproc $(NPROC) examples/train_gpt.py $(ARGS)
	@echo "== done; this brings zeroshard and its python into your PATH: . $(BIN)/activate"

# mypy has one core; the suite has the other meanwhile
test: $(VENV)/.ready-test
	@$(MAKE) --no-print-directory form
	@$(MAKE) --no-print-directory -j2 types suite

# bytecode is kept whatever the environment says: hundreds of processes import the same files
suite: export PYTHONDONTWRITEBYTECODE =
suite: $(VENV)/.ready-test
	$(BIN)/python -m pytest $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile --no-loadscope-reorder) $(ARGS)

# Not in `make test`: Python 3.11 has no sys.monitoring, and there tracing costs a sixth to a third of the suite's time.
coverage: $(VENV)/.ready-test
	$(BIN)/python -m pytest --cov --cov-report=term

test-slow: $(VENV)/.ready-test
	$(BIN)/python -m pytest -m slow --timeout 1800 -o skip_budget=33 $(ARGS)  # eight need DeepSpeed, six sshd, five mpirun, four Slurm, three TRL, two root, two Ray, one each kubeflow, tensorboard, wandb: see CONTRIBUTING.md
	$(if $(ARGS),,$(MAKE) coverage)

test-matrix:
	$(PYTHON) scripts/matrix.py $(ARGS)

mutate: $(VENV)/.ready-test
	$(BIN)/python scripts/mutate.py $(ARGS)

bench: $(VENV)/.ready-bench
	$(BIN)/zeroshard bench step $(ARGS)

lint: form types

form: $(VENV)/.ready-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python scripts/shape.py --check

types: $(VENV)/.ready-test
	$(BIN)/mypy

docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

docs-serve: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve $(ARGS)

clean:
	rm -rf site $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "zeroshard needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "== an environment of $(PYTHON), in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch comes first: package metadata cannot ask for its CPU build, and scripts/install_torch.py can
$(VENV)/.ready-torch: $(BIN)/python
	@echo "== step 1 of $(STEPS): torch, into $(VENV)"
	@$(BIN)/python scripts/install_torch.py $(TORCH_VERSION) --build $(TORCH_BUILD) --target "$(firstword $(MAKECMDGOALS) train)"
	@touch $@

$(VENV)/.ready-base: $(VENV)/.ready-torch pyproject.toml
	@echo "== step 2 of $(STEPS): zeroshard and what it needs beside torch (numpy, pydantic, rich, safetensors, xxhash: about 30 MB to download)"
	@$(PIP) install -e .
	@touch $@

$(VENV)/.ready-test $(VENV)/.ready-bench $(VENV)/.ready-docs: $(VENV)/.ready-%: $(VENV)/.ready-torch pyproject.toml
	@echo "== step 2 of $(STEPS): zeroshard with its packages for: $*"
	@$(PIP) install -e ".[$*]"
	@touch $@
