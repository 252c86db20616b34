# One target for each thing that a developer or CI does. Needs python3 (3.10+), make and a Python
# package index; everything else is installed into .venv, again whenever pyproject.toml or
# constraints.txt changes.

.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq install --constraint constraints.txt
PULL := $(VENV)/bin/octavo pull smollm2
# Each process computes on one thread; the tests of a file share its models, so they stay together.
WORKERS ?= 2
# A process that dies ends the run and names its test: a replacement would run into the same test,
# and xdist may wait for ever for one that has nothing left to do.
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
SOURCES := src tests benchmarks scripts examples

.PHONY: help demo serve test test-slow test-netns test-arm fuzz lint format docs build wheel package-check bench serving clients \
	startup gpu-check report clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.bench ## 48 chat prompts at once, then the same with static batching
	@$(PULL)
	@$(PY) -m benchmarks.demo

serve: $(VENV)/.dev ## the embedded model over HTTP, on port 8000
	@$(PULL)
	@$(VENV)/bin/octavo serve smollm2

test: lint ## lint, types, and the fast tests; two machines as network namespaces where root allows
	@$(PULL)
	@$(PYTEST) -m "not slow and not netns"
	@$(PY) -m pytest -q -m "netns and not slow" -rs tests/engine/test_ray_launcher_netns.py

test-slow: $(VENV)/.dev ## the slow tests
	@$(PULL)
	@$(PY) -m pytest -m slow

test-netns: $(VENV)/.dev ## two machines as two network namespaces, with Ray; needs root and iproute2
	@$(PY) -m pytest -m netns -rs

test-arm: $(VENV)/.dev ## the CPU's kernels on an emulated Arm processor; needs root, qemu-user and debootstrap
	@$(PY) -m scripts.arm $(ARGS)

fuzz: $(VENV)/.dev ## 10,000 malformed files of each kind; COUNT=... for another number
	@PYTHONPATH=.:tests $(PY) -m tests.fuzz.run --count $(or $(COUNT),10000)

lint: $(VENV)/.dev ## ruff (rules and format) and mypy (strict)
	@$(PY) -m ruff check --quiet $(SOURCES)
	@$(PY) -m ruff format --check --quiet $(SOURCES) \
		|| { echo "run 'make format'" >&2; exit 1; }
	@$(PY) -m mypy --no-error-summary
	@$(PY) -m mypy --no-error-summary --explicit-package-bases scripts benchmarks examples

format: $(VENV)/.dev ## format the sources
	@$(PY) -m ruff check --quiet --fix $(SOURCES)
	@$(PY) -m ruff format --quiet $(SOURCES)

docs: $(VENV)/.dev ## regenerate docs/tree.md, docs/flags.md and the table of docs/from-vllm.md
	@$(PY) -m scripts.docs --write

wheel: $(VENV)/.dev ## the wheel with kernels that are compiled for common processors, in dist/
	@$(PY) -m scripts.shipped_kernels && $(PY) -m hatchling build -t wheel; status=$$?; \
	$(PY) -m scripts.shipped_kernels --remove; exit $$status

build: $(VENV)/.dev ## the wheel and the sdist, in dist/
	@$(PY) -m hatchling build

package-check: $(VENV)/.dev ## install the package in an empty environment and use it; ARGS="--sdist --minimum"
	@$(PY) -m scripts.package_check $(ARGS)

bench: $(VENV)/.bench ## workloads W1 to W4 against static batching; saves rows
	@$(PULL)
	@$(PY) -m benchmarks.run --save

serving: $(VENV)/.bench ## start, overhead, many clients and an engine crash over HTTP; saves rows
	@$(PULL)
	@$(PY) -m benchmarks.serving --save

clients: $(VENV)/.dev ## third-party clients: OpenAI's and Anthropic's, agents' libraries, litellm, guidellm, schemathesis
	@$(PULL)
	@$(PY) -m tests.clients.run

startup: $(VENV)/.bench ## import time, --help, start to first token; saves a row
	@$(PULL)
	@$(PY) -m benchmarks.startup --save

gpu-check: ## on a machine with an NVIDIA GPU: what is right, and how fast it is; see docs/gpu.md
	@$(PYTHON) -m benchmarks.gpu $(ARGS)

report: $(VENV)/.dev ## lines of code per folder, and the longest functions
	@$(PY) -m scripts.report

clean: ## remove the environment, caches and build products
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Octavo needs Python 3.10 or newer; set PYTHON=..." >&2; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.python
	@echo "installing octavo and the development tools (a few minutes the first time)"
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.bench: pyproject.toml constraints.txt | $(VENV)/.python
	@echo "installing octavo and the benchmark dependencies (a few minutes the first time)"
	@$(PIP) --editable '.[bench]'
	@touch $@
