# `make demo` and `make test` are for everybody. The other commands are for people who change forebay.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS := .venv-peers
PEERS_INSTALLED := $(PEERS)/.installed
SITE := .venv-docs
SITE_INSTALLED := $(SITE)/.installed
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_INSTALLED := $(FRAMEWORKS)/.installed
# Tests and benchmarks run beside each other on few cores, so each of them gets one thread. They start hundreds of processes, which
# are to read compiled modules where a container says that Python writes none.
PINNED := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# Prints the CPU seconds of a command and its children behind it.
CPU_OF := bash -c 'TIMEFORMAT="CPU: user %U s, system %S s; wall %R s"; time "$$@"' --
BENCHMARKS := $(filter-out __init__ data here_pool picture report shard_cache,$(basename $(notdir $(wildcard benchmarks/*.py))))

.PHONY: demo demo-remote test test-wide test-frameworks faults check format config-docs bench bench-tiny bench-peers images docs wheel clean

demo: $(INSTALLED)
	$(BIN)/forebay preprocess configs/demo_speech.toml
	$(BIN)/forebay inspect configs/demo_speech.toml
	$(PINNED) $(BIN)/forebay train configs/demo_speech.toml
	$(BIN)/forebay preprocess configs/demo_vision.toml
	$(BIN)/forebay inspect configs/demo_vision.toml
	$(PINNED) $(BIN)/forebay train configs/demo_vision.toml
	$(BIN)/forebay preprocess configs/demo_any.toml
	$(PINNED) $(BIN)/forebay train configs/demo_any.toml
	$(BIN)/forebay preprocess configs/demo_film.toml
	$(BIN)/forebay inspect configs/demo_film.toml --sample dogs-zoomed
	$(BIN)/forebay preprocess configs/demo_segments.toml
	$(BIN)/forebay text configs/demo_text.toml --sample 7

# A store on this machine, and two nodes that work on what lies in it (docs/machines.md).
demo-remote: $(INSTALLED)
	$(PINNED) $(BIN)/python -m benchmarks.objects.demo

# COLD=1: every process of the tests starts from nothing, as a user's does (tests/warm/__init__.py), which takes twice the time.
test: $(INSTALLED)
	$(CPU_OF) env $(PINNED) FOREBAY_TEST_COLD=$(COLD) $(BIN)/python -m pytest -n 2 --dist loadfile --durations=20 -m "not wide"

# The tests that take long for what they add to `make test`, and all properties with more examples: before an issue is closed.
test-wide: $(INSTALLED)
	$(PINNED) FOREBAY_TEST_COLD=1 $(BIN)/python -m pytest -n 2 --dist loadfile --durations=20 -m "wide or hypothesis" --hypothesis-profile wide

# The examples of other frameworks, in an environment of their own; outside of `.ci/run`.
test-frameworks: $(FRAMEWORKS_INSTALLED)
	$(PINNED) $(FRAMEWORKS)/bin/python -m pytest -p no:cacheprovider -c /dev/null --rootdir . --noconftest tests/frameworks/jax_loop.py

# All rows of the fault table with their long counts, two beside each other. They take some hours. An interrupted run goes on where it was. The command
# ends with 1 if an outcome was wrong. `python -m tests.faults --row kill` runs one row; `--folder /dev/shm` is faster, in memory.
faults: $(INSTALLED)
	$(PINNED) FOREBAY_TEST_COLD=1 $(BIN)/python -m tests.faults --jobs 2

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(PINNED) $(BIN)/python -m pytest tests/test_imports.py tests/test_documents.py tests/test_security_page.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

config-docs: $(INSTALLED)
	$(BIN)/python docs/make_config.py

bench: $(INSTALLED)
	@for name in $(BENCHMARKS); do echo "== $$name"; $(PINNED) $(BIN)/python -m benchmarks.$$name || exit 1; done

bench-tiny: $(INSTALLED)
	@for name in $(BENCHMARKS); do echo "== $$name"; $(PINNED) $(BIN)/python -m benchmarks.$$name --tiny || exit 1; done

# Benchmarks beside other formats and loaders, which have an environment of their own.
bench-peers: $(PEERS_INSTALLED)
	$(PINNED) $(PEERS)/bin/python -m benchmarks.formats --plot build/formats.png
	$(PINNED) $(PEERS)/bin/python -m benchmarks.writer
	$(PINNED) $(PEERS)/bin/python -m benchmarks.remote

# The pictures: of the README, from the tables of the result pages, and of ARCHITECTURE.md, from the rooms on disk.
images: $(INSTALLED)
	$(BIN)/python -m benchmarks.picture
	$(BIN)/python docs/make_rooms.py

# The site of the documents in build/site: all links are checked, nothing is loaded from the network. The notebook is executed.
docs: $(INSTALLED) $(SITE_INSTALLED)
	$(PINNED) $(BIN)/python docs/make_site.py --zensical $(SITE)/bin/zensical

# The wheel is built, installed in an environment without this folder, and imported from another folder.
wheel: $(INSTALLED)
	rm -rf build dist
	mkdir dist && $(BIN)/python -c "import setuptools.build_meta as backend; backend.build_sdist('dist')" > /dev/null
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist dist/forebay-*.tar.gz  # of the sdist: what it lacks is seen here
	rm -rf build/wheel && $(PYTHON) -m venv --system-site-packages build/wheel
	build/wheel/bin/pip install --quiet --no-deps dist/forebay-*.whl
	cd build && PYTHONPATH=$(CURDIR)/$(VENV)/lib/python3.11/site-packages wheel/bin/python -P -c \
	  "import forebay, pathlib; path = pathlib.Path(forebay.__file__); assert 'wheel' in path.parts, path; print('wheel imports from', path.parent.name, forebay.__version__)"

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,lora,gpu,report,hf,remote,ray,zarr,text,video,segments,completion,diffusers,dev]'
	touch $(INSTALLED)

$(PEERS_INSTALLED): constraints.txt benchmarks/requirements-peers.txt benchmarks/requirements-peers-alone.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[report,remote]'
	@grep -v '^#' benchmarks/requirements-peers.txt | while read -r peer; do \
	  $(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt "$$peer" || echo "$$peer does not install here"; done
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/requirements-peers-alone.txt || true
	# litdata asks for torchvision and works without it. torchvision does not load beside this torch and breaks who imports it.
	$(PEERS)/bin/pip uninstall --quiet --yes torchvision || true
	touch $(PEERS_INSTALLED)

$(FRAMEWORKS_INSTALLED): constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[build]' pytest jax
	touch $(FRAMEWORKS_INSTALLED)

$(SITE_INSTALLED): constraints.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt zensical
	touch $(SITE_INSTALLED)

clean:
	rm -rf $(VENV) $(PEERS) $(SITE) $(FRAMEWORKS) build dist caches runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
