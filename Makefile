# Every target makes its own environment in .venv when there is none, or when pyproject.toml or the pins changed.
#   make test PY=python3     uses the Python given, as it is, and creates nothing (a GPU machine with its own torch)
#   make setup PYTHON=python3.12 VENV=.venv312
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
# JOBS=0 runs the tests in one process.
# Each worker takes neighbors, which share imports, proofs and fixtures, until it steals from the other at the end.
WORKERS := $(if $(filter 0,$(JOBS)),,-n $(JOBS) --dist worksteal)
PROFILE ?= ci
# Of `make gpu`: where results go, and which of checks, kernels, training, models, merge, all.
OUT ?= gpu-results
CHUNK ?= all
SELECT ?=
# QUICK=1 leaves to the nightly job the longest examples of the gallery, and the run of every benchmark.
QUICK ?=
# Python keeps the bytecode of what is imported; to compile all that is installed takes as long as to install it.
LAZY := $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
# Of `make site`.
PORT ?= 8000

ifeq ($(origin PY), command line)
READY :=
# Nothing is installed for PY, so both source roots have to be on the path.
export PYTHONPATH := $(CURDIR):$(CURDIR)/backends:$(PYTHONPATH)
export ASV_PYTHONPATH := $(PYTHONPATH)
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick coverage lint format types docs site bench bench-check gpu mutations clean

help:
	@echo "make setup | demo | test | quick | coverage | lint | format | types | docs | site | bench | bench-check | gpu | mutations"

setup: $(READY)

# torch goes first and alone: that way an index with a CPU build of this version supplies it before anything asks for torch.
$(VENV)/.ready: pyproject.toml requirements/constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes the first time)"
	$(VENV)/bin/python -m pip install -qq $(LAZY) "$$(grep '^torch==' requirements/constraints.txt)"
	$(VENV)/bin/python -m pip install -qq $(LAZY) -c requirements/constraints.txt -e '.[triton,plots,tensorboard,dev,docs]'
	touch $@

# Without an environment yet, one for the demo alone: torch's CPU build and matplotlib.
ifneq ($(READY),)
ifeq ($(wildcard $(READY)),)
demo: PY := .venv-demo/bin/python
demo: .venv-demo/.ready
else
demo: $(READY)
endif
endif
demo:
	$(PY) -m dpcore demo --out demo

.venv-demo/.ready: pyproject.toml requirements/constraints.txt
	test -x .venv-demo/bin/python || $(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python -m pip install $(LAZY) "$$(grep '^torch==' requirements/constraints.txt)"
	.venv-demo/bin/python -m pip install $(LAZY) -c requirements/constraints.txt -e '.[torch,plots]'
	touch $@

# Workers share the cores, so each computes with one thread.
test: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(WORKERS) --durations=10 --hypothesis-profile=$(PROFILE) $(SELECT)

quick: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(WORKERS) -m "not slow" --hypothesis-profile=dev

# All tests once more, slower, with the lines that none of them runs.
coverage: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(WORKERS) --hypothesis-profile=$(PROFILE) $(SELECT) \
		--cov --cov-report=term:skip-covered --cov-report=xml

# Breaks copies of the tree, piece by piece, and names the tests that notice (mutations.json); ONLY="in the kernel" chooses some by name.
mutations: $(READY)
	$(PY) tests/run_mutations.py $(if $(filter 0,$(JOBS)),,--workers $(JOBS)) $(if $(ONLY),"$(ONLY)")

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -c "from importlinter.cli import lint_imports_command as run; run()" --no-logo
	$(PY) -m mypy
	$(PY) -W 'ignore:Unknown section' -m numpydoc lint $$(git ls-files 'dpcore/*.py' 'backends/*.py')

types: $(READY)
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Executes the gallery, on one core; then every link and picture must be there. Without a network.
docs: $(READY)
	rm -rf docs/_build/html
	OMP_NUM_THREADS=1 MPLBACKEND=Agg $(PY) -m sphinx -W --keep-going -q -b html -d docs/_build/doctrees \
		$(if $(QUICK),-D 'sphinx_gallery_conf.filename_pattern=/plot_(?!4_|5_|10_)') docs docs/_build/html
	$(PY) docs/check_site.py docs/_build/html

# With a browser, where there is one, at the widths of a phone and of a desktop; then served until Ctrl-C.
site: docs
	$(PY) docs/check_site.py docs/_build/html --browser
	@echo "the site is at http://localhost:$(PORT); Ctrl-C ends it"
	$(PY) -m http.server $(PORT) --bind 127.0.0.1 --directory docs/_build/html

# Results of `bench` are kept under the commit they were measured at; `bench-check` only shows that every benchmark runs, at
# its smaller sizes, and fails where the compiler makes more than 5 % more of a kernel than is recorded, or a private step
# costs more plain ones.
bench: $(READY)
	cd asv_benchmarks && $(abspath $(PY)) -m asv machine --yes >/dev/null
	cd asv_benchmarks && $(abspath $(PY)) -m asv run --python=same --set-commit-hash "$$(git rev-parse HEAD)"

bench-check: $(READY)
	cd asv_benchmarks && $(abspath $(PY)) -m asv machine --yes >/dev/null
	cd asv_benchmarks && $(abspath $(PY)) -m asv check --python=same
	$(if $(QUICK),,cd asv_benchmarks && DPCORE_BENCH_CHECK=1 $(abspath $(PY)) -m asv run --quick --python=same \
		--show-stderr --launch-method forkserver --bench '^(?!static\.)')
	$(PY) asv_benchmarks/static.py
	$(PY) asv_benchmarks/cpu_ratios.py

# The first half hour on a GPU machine: checks, then measurements, in chunks of at most eight minutes. Without a GPU all of it
# runs in small form through the interpreter. One chunk at a time: make gpu PY=python3 CHUNK=kernels OUT=results
gpu: $(READY)
	$(PY) -m asv_benchmarks.gpu --out "$(OUT)" --chunk $(CHUNK)

clean:
	rm -rf $(VENV) build dist docs/_build docs/gallery docs/api .coverage coverage.xml mutations.json .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
