# One line each: `make help`. Everything runs in .venv, which the first target that needs it creates.

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))' >/dev/null 2>&1 \
	&& command -v $$python && break; done)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_VERSION := $(shell sed -n 's/^torch==//p' .ci/constraints.txt)
# A user's own choice, e.g. `make demo TORCH=torch==2.13.0` for the CUDA build; empty: what the machine needs.
TORCH ?=
RUN ?= runs/demo
PORT ?= 5000
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
# Tests in as many processes as there are cores, at most four; tests/conftest.py keeps those with Ray in one of them.
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 4
JOB := tests/pipelines/cluster/test_job_submit.py
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq

.PHONY: help demo test faults gpu check lint fast job ui clean
.NOTPARALLEL:
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z]+:.*## ' Makefile | sed -E 's/:.*## /|/' | while IFS='|' read -r target text; do \
		printf '  make %-8s %s\n' "$$target" "$$text"; done

demo: $(INSTALLED) ## the whole pipeline on the built-in photos (ARGS="--dry-run", ARGS="--rerun sample", ...)
	$(BIN)/python pipelines/full_multidim.py --config demo $(ARGS)

test: $(INSTALLED) ## every test that needs no GPU (a submitted Ray job: `make check`; killed processes: `make faults`)
	$(PYTEST) -m "not gpu and not faults" $(if $(filter check,$(MAKECMDGOALS)),,--ignore $(JOB)) $(ARGS)

faults: $(INSTALLED) ## killed workers, machines, drivers and servers; several Ray nodes on this machine (minutes)
	$(BIN)/python -m pytest -m "faults and not gpu" $(ARGS)

gpu: $(INSTALLED) ## the tests that need an NVIDIA GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

# In `make check test` the tests run once: the fast ones and the job as part of `test`.
check: lint $(if $(filter test,$(MAKECMDGOALS)),,fast job) ## style, types, import rules, fast tests, one submitted Ray job

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fast: $(INSTALLED)
	$(PYTEST) -q -m "not slow and not gpu and not faults"

job: $(INSTALLED)
	$(BIN)/python -m pytest -q $(JOB)

ui: $(INSTALLED) ## MLflow on this machine's own port 5000 (RUN=runs/demo PORT=5000)
	@test -f $(RUN)/mlflow.db || { echo "No $(RUN)/mlflow.db: run \`make demo\` first, or name a run folder: RUN=..."; \
		exit 2; }
	@! $(BIN)/python -c "import socket; socket.create_connection(('127.0.0.1', $(PORT)))" 2>/dev/null || \
		{ echo "Port $(PORT) is in use: end what uses it, or name another one: PORT=..."; exit 2; }
	@echo "Open http://127.0.0.1:$(PORT)/#/experiments?workflowType=machine_learning (Ctrl-C ends it)"
	@$(BIN)/python -c "from pipelines.tracking import make_client as m; m('sqlite:///$(abspath $(RUN))/mlflow.db')" # has it moved?
	MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(BIN)/mlflow server \
		--backend-store-uri sqlite:///$(abspath $(RUN))/mlflow.db --host 127.0.0.1 --port $(PORT) --workers 1

clean: ## removes .venv and caches; runs/ stays
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
	find spn data_prep pipelines tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first: pip would otherwise take the default build, gigabytes of CUDA, on machines without a GPU too.
# The CPU build is asked for without the extra index at first, so that a wheel at hand is found without a network.
$(INSTALLED): pyproject.toml .ci/constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 with its venv module was not found (on Debian and Ubuntu:" \
		"apt install python3-venv). Name one with: make PYTHON=/path/to/python3.12 ..."; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "Creating .venv with $(PYTHON)"; \
		$(PYTHON) -m venv --clear .venv; }
	@if [ -n "$(TORCH)" ]; then echo "Installing $(TORCH)"; $(PIP) "$(TORCH)"; \
	elif [ "$$(uname)" = Darwin ] || nvidia-smi -L >/dev/null 2>&1; then \
		echo "Installing torch $(TORCH_VERSION)"; $(PIP) torch==$(TORCH_VERSION); \
	else \
		echo "Installing torch $(TORCH_VERSION), CPU build (200 MB): this machine has no NVIDIA GPU"; \
		$(PIP) torch==$(TORCH_VERSION)+cpu 2>/dev/null || \
		$(PIP) torch==$(TORCH_VERSION)+cpu --retries 1 --extra-index-url $(TORCH_INDEX) 2>/dev/null || { \
			echo "No CPU build at $(TORCH_INDEX) for this Python (TORCH_INDEX=... names another index):" \
			"taking the default build, several GB"; $(PIP) torch==$(TORCH_VERSION); }; \
	fi
	@echo "Installing the other packages (one to three minutes)"
	@$(PIP) -c .ci/constraints.txt -e '.[dev]'
	@touch $@
