# Two commands for everybody: `make demo` and `make test`. The rest is for those who change forebay.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS := .venv-peers
PEERS_INSTALLED := $(PEERS)/.installed
# Tests and benchmarks run beside each other on few cores: one thread each.
PINNED := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
BENCHMARKS := $(filter-out __init__ data report,$(basename $(notdir $(wildcard benchmarks/*.py))))

.PHONY: demo test faults check format config-docs bench bench-tiny bench-peers wheel clean

demo: $(INSTALLED)
	$(BIN)/forebay preprocess configs/demo_speech.toml
	$(BIN)/forebay inspect configs/demo_speech.toml
	$(PINNED) $(BIN)/forebay train configs/demo_speech.toml
	$(BIN)/forebay preprocess configs/demo_vision.toml
	$(BIN)/forebay inspect configs/demo_vision.toml
	$(PINNED) $(BIN)/forebay train configs/demo_vision.toml

test: $(INSTALLED)
	$(PINNED) $(BIN)/python -m pytest -n 2 --dist loadfile

# The fault table with its long counts: an hour or more, goes on where it was interrupted, ends with 1 where something was wrong.
# One row: `python -m tests.faults --row kill`; a file system in memory is faster: `--folder /dev/shm`.
faults: $(INSTALLED)
	$(PINNED) $(BIN)/python -m tests.faults

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

config-docs: $(INSTALLED)
	$(BIN)/python docs/make_config.py

bench: $(INSTALLED)
	@for name in $(BENCHMARKS); do echo "== $$name"; $(PINNED) $(BIN)/python -m benchmarks.$$name || exit 1; done

bench-tiny: $(INSTALLED)
	@for name in $(BENCHMARKS); do echo "== $$name"; $(PINNED) $(BIN)/python -m benchmarks.$$name --tiny || exit 1; done

# Beside the peers, in an environment of their own.
bench-peers: $(PEERS_INSTALLED)
	$(PINNED) $(PEERS)/bin/python -m benchmarks.formats --plot build/formats.png
	$(PINNED) $(PEERS)/bin/python -m benchmarks.writer

# Built, and imported from a folder that is not this one, in an environment without this folder.
wheel: $(INSTALLED)
	rm -rf build dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	rm -rf build/wheel && $(PYTHON) -m venv --system-site-packages build/wheel
	build/wheel/bin/pip install --quiet --no-deps dist/forebay-*.whl
	cd build && PYTHONPATH=$(CURDIR)/$(VENV)/lib/python3.11/site-packages wheel/bin/python -P -c \
	  "import forebay, pathlib; path = pathlib.Path(forebay.__file__); assert 'wheel' in path.parts, path; print('wheel imports from', path.parent.name, forebay.__version__)"

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,report,hf,dev]'
	touch $(INSTALLED)

$(PEERS_INSTALLED): constraints.txt benchmarks/requirements-peers.txt benchmarks/requirements-peers-alone.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[report]'
	@grep -v '^#' benchmarks/requirements-peers.txt | while read -r peer; do \
	  $(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt "$$peer" || echo "$$peer does not install here"; done
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/requirements-peers-alone.txt || true
	# litdata asks for it and does without; it does not load beside this torch, and then breaks whoever finds it.
	$(PEERS)/bin/pip uninstall --quiet --yes torchvision || true
	touch $(PEERS_INSTALLED)

clean:
	rm -rf $(VENV) $(PEERS) build dist caches runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
