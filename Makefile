# `make train` and `make test` need Python 3.10 or later and a package index, and nothing by hand.

PYTHON ?= python3
# The release that hooktrain is tested with. For a GPU build from another index set for example
# TORCH="torch --index-url https://download.pytorch.org/whl/cu126".
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: train test gpu store examples engines types lint format docs check-site benchmark clean

train: .venv/installed
	$(BIN)/python tools/train_net.py --config-file configs/digits_cnn.py

# The tests of a file share runs and processes, so they stay together.
test: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu and not examples"

gpu: .venv/installed-dev
	$(BIN)/python -c 'import torch; torch.zeros(1, device="cuda")'  # fails without a card
	$(BIN)/python -m pytest -W default tests/gpu

store: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --editable '.[store-server]'
	$(BIN)/python -m pytest tests/checkpoint/test_store.py tests/tools/test_stored_runs.py

examples: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --editable '.[examples]'
	$(BIN)/python -m pytest -n 2 tests/examples

engines: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --editable '.[engines]'
	$(BIN)/python -m pytest -W default tests/engines

types: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --editable '.[types]'
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m pytest tests/test_types.py

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	rm -rf output/new && $(BIN)/hooktrain new output/new && $(BIN)/mypy output/new/train.py

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -d output/doctrees docs output/site

check-site: docs
	$(BIN)/python -m pip install --quiet playwright
	$(BIN)/python tools/check_site.py

benchmark: .venv/installed
	$(BIN)/python tools/benchmark.py step

clean:
	rm -rf .venv output

.venv/installed: setup.py pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

# Each release of torchvision is made for one of torch, so the torch that is there is asked for again.
# Where there is none for it, a few tests are skipped.
.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	-$(BIN)/python -m pip install --quiet --editable '.[vision]' \
		torch==$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("torch"))')
	touch $@
