# On a fresh machine with CPython and make: `make demo`, `make sweep`, `make test`.
#
# PYTHON  the interpreter that creates .venv (CPython 3.11, 3.12 or 3.13); one that was optimised by profile, as those of
#         distributions are, takes a fifth less time over the tests
# TORCH   what to install as torch, with pip options if need be. CI runs the default; for another build:
#             make test TORCH='torch==2.11.0 --extra-index-url URL'
#         It goes in first, and nothing installed after it may replace it or what it brought along.
# FLOOR_TORCH  the same for `make test-floors`, in place of the lowest that pyproject.toml allows, whose usual build
#         is the one for CUDA: FLOOR_TORCH='torch==2.11.0 --index-url URL'
# LANES   of the tests, each with ranks of its own; two more than cores, since lanes also wait for ranks
# ARGS    passed on to pytest, to the example (`make demo ARGS=trainer.max_steps=50`) or to the benchmark
PYTHON ?= python3
TORCH ?= torch==2.13.0
FLOOR_TORCH ?=
LANES ?= 4
ARGS ?=

PINNED_TORCH := torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
EXTRAS := plots,examples,docs,dev
RUNNERS := hypothesis pytest pytest-timeout pytest-xdist
FLOORS := .venv-floors
NEWEST := .venv-newest
CLIENTS := .venv-clients
FLOOR_TESTS := $(addprefix tests/test_,$(addsuffix .py,checkpoint_before checkpoint_tree config hydra layout privates promises \
    strategy summary sweep tensor_parallel))

# Tests start hundreds of processes. Each would compile what it imports of this repository, where nothing keeps the result.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo sweep test test-device test-kernels test-gpu test-floors test-newest test-clients lint ruff format-check mypy ladder bench trace constraints setup clean FORCE

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: setup  ## train the example at stage 2 on two ranks
	OMP_NUM_THREADS=1 $(PY) examples/train.py strategy=zero2 trainer.devices=2 $(ARGS)

sweep: setup  ## compare the stages with ddp on two ranks: a table and a picture, in about two minutes
	OMP_NUM_THREADS=1 $(PY) examples/train.py -m strategy=ddp,zero1,zero2,zero3 trainer.devices=2 experiment=compare $(ARGS)

test: setup  ## run the tests (those that need a GPU are skipped where there is none)
	$(PY) -m pytest -n $(LANES) --dist loadfile --no-loadscope-reorder $(ARGS)

test-device: setup  ## run the tests where no device is the default one that the package could mean
	FOREIGN_DEVICE=meta $(PY) -m pytest -n $(LANES) --dist loadfile --no-loadscope-reorder $(ARGS)

test-kernels: setup  ## run the tests with the kernels of a processor without vector instructions, which round in another way
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 \
	    $(PY) -m pytest -n $(LANES) --dist loadfile --no-loadscope-reorder $(ARGS)

test-gpu: setup  ## run the tests that need a GPU
	$(PY) -m pytest -m gpu $(ARGS)

test-floors: $(FLOORS)/installed  ## run the tests of what users touch with the lowest versions that pyproject.toml allows
	$(FLOORS)/bin/python -m pytest $(FLOOR_TESTS) $(ARGS)

test-newest: $(NEWEST)/pyvenv.cfg  ## run the tests with the newest versions that pyproject.toml allows (some GB to download)
	$(NEWEST)/bin/python -m pip --disable-pip-version-check -qq install --upgrade --upgrade-strategy eager -e '.[$(EXTRAS)]'
	$(NEWEST)/bin/python -m pytest -n $(LANES) --dist loadfile --no-loadscope-reorder $(ARGS)

test-clients: $(CLIENTS)/installed  ## run published packages beside ddp, in an environment of their own
	$(CLIENTS)/bin/python -m pytest tests/clients $(ARGS)

lint: ruff format-check mypy ladder  ## check style, types and the ladder of imports

ruff: setup
	$(VENV)/bin/ruff check .

format-check: setup
	$(VENV)/bin/ruff format --check .

mypy: setup
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy benchmarks

ladder: setup
	$(VENV)/bin/lint-imports

bench: setup  ## time each stage beside ddp and other peers: a table, a CSV file and a picture
	OMP_NUM_THREADS=1 $(PY) benchmarks/step_time.py $(ARGS)

.PHONY: docs
docs: setup  ## build the documentation into build/site, and fail on any warning
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

trace: setup  ## draw one training step: what is computed, sent and copied, and what is hidden behind what
	OMP_NUM_THREADS=1 $(PY) benchmarks/trace.py $(ARGS)

constraints: setup  ## write constraints.txt from .venv (after upgrading packages in it)
	sed -n '/^#/p' constraints.txt > $(VENV)/header.txt
	$(PY) -m pip --disable-pip-version-check list --format=freeze --exclude pip --exclude lightning-zero \
	    | sed 's/+.*//' | cat $(VENV)/header.txt - > constraints.txt

clean:  ## remove the environment, caches and results
	rm -rf $(foreach one,$(VENV) $(FLOORS) $(NEWEST) $(CLIENTS),$(one) $(one).txt) build dist outputs multirun *.egg-info .*_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(VENV)/installed  ## create .venv with everything the other targets need

# Holds the two variables, so that changing one starts the environment afresh.
$(VENV).txt $(CLIENTS).txt: torch = $(TORCH)
$(FLOORS).txt: torch = $(FLOOR_TORCH)
$(VENV).txt $(FLOORS).txt $(CLIENTS).txt: FORCE
	@printf '%s\n' "$(PYTHON)" "$(torch)" | cmp -s - $@ || printf '%s\n' "$(PYTHON)" "$(torch)" > $@

# Torch first. It takes its dependencies from constraints.txt when it is the pinned one; another build brings its own.
$(VENV)/torch.txt: $(VENV).txt constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else \
	    "lightning_zero needs CPython 3.11 to 3.13; $(PYTHON) is %d.%d. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" % v)'
	$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) uninstall -y setuptools  # CPython 3.11 puts an old one there; torch or constraints.txt chooses
	$(PIP) install $(TORCH) $(if $(filter $(PINNED_TORCH),$(TORCH)),-c constraints.txt)
	$(PY) -m pip --disable-pip-version-check list --format=freeze --exclude pip > $@

# The rest, held to what torch brought, and to constraints.txt for everything else.
$(VENV)/installed: $(VENV)/torch.txt pyproject.toml
	@awk -F== '{ key = tolower($$1); gsub(/[_.]/, "-", key) } !(key in seen) { seen[key]; print }' \
	    $(VENV)/torch.txt constraints.txt > $(VENV)/constraints.txt
	$(PIP) install -c $(VENV)/constraints.txt setuptools
	$(PIP) install -c $(VENV)/constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $@

# "torch>=2.11,<2.16" becomes "torch==2.11". Torch brings its build for CUDA, some GB.
$(FLOORS)/installed: $(FLOORS).txt pyproject.toml
	$(PYTHON) -m venv --clear $(FLOORS)
	$(if $(FLOOR_TORCH),$(FLOORS)/bin/python -m pip --disable-pip-version-check -qq install $(FLOOR_TORCH))
	$(FLOORS)/bin/python -m pip --disable-pip-version-check -qq install $(RUNNERS) tensorboard \
	    $$($(PYTHON) -c 'import re, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	    wanted = project["dependencies"] + project["optional-dependencies"]["plots"]; \
	    lowest = [re.sub(r">=([\d.]+).*", r"==\1", one) for one in wanted]; \
	    print(*(one for one in lowest if not (one.startswith("torch==") and "$(FLOOR_TORCH)")))')
	@touch $@

# What is newest changes, so `make test-newest` upgrades it every time.
$(NEWEST)/pyvenv.cfg:
	$(PYTHON) -m venv --clear $(NEWEST)
	@$(NEWEST)/bin/python -m pip --disable-pip-version-check -qq uninstall -y setuptools

# Torch first and held, as these packages would take any, with its build for CUDA. What requirements.txt names is taken
# from there, everything else from constraints.txt.
$(CLIENTS)/installed: $(CLIENTS).txt pyproject.toml constraints.txt tests/clients/requirements.txt
	$(PYTHON) -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check -qq uninstall -y setuptools
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check -qq install $(TORCH) -c constraints.txt
	@awk '{ name = tolower($$0); sub(/[][<>=!~; ].*/, "", name); gsub(/[_.]/, "-", name) } \
	    FNR == NR { wanted[name]; next } !(name in wanted)' tests/clients/requirements.txt constraints.txt \
	    > $(CLIENTS)/constraints.txt
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check -qq install -c $(CLIENTS)/constraints.txt setuptools
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check -qq install -c $(CLIENTS)/constraints.txt \
	    --no-build-isolation -e . -r tests/clients/requirements.txt $(RUNNERS)
	@touch $@
