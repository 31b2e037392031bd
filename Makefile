# One word per task. Needs make and Python 3.11 or newer; everything else goes into .venv.
#   make quickstart    train the first example
#   make test          the tests            (ARGS="-m slow" and the like are passed on)
#   make test-programs those that run the programs of docs/, examples/ and paper_repro/
#   make test-kills    a hundred kills at random moments, each resumed (a quarter hour)
#   make test-processes  jobs of two and three processes (ten minutes)
#   make test-limits   plans of above 1 GB under a limit of the system's (ten minutes)
#   make test-lowered  a hundred runs whose memory is taken away (half an hour)
#   make bench         a step beside the other ways of writing it (a quarter of an hour)
#   make bench-loop    what the loop around the programs costs (ten minutes)
#   make bench-fastest does "fastest" find the fastest microbatch? (ten minutes)
#   make bench-growth  time against passes, planning against size (a quarter of an hour)
#   make bench-streaming  data on disk against data in memory (ten minutes)
#   make bench-gpu     the step and the plan's truth on a GPU, if there is one (8 minutes)
#   make bench-plan    are plans true, and the best? (35 minutes; ARGS=--resume goes on)
#   make bench-plan-live  a hundred plans, each run under a real limit (half an hour)
#   make test-properties  the property tests with thousands of draws (an hour)
#   make bench-exact   gradients of every loss against the whole batch's (five minutes)
#   make bench-coupled a contrastive step beside plain accumulation (five minutes)
#   make bench-noise   what noise_scale=True costs (three minutes)
#   make bench-elastic a run on changing machines beside one undisturbed (three minutes)
#   make bench-scale   1.3B parameters on up to 2,048 devices, on paper (a quarter hour)
#   make check         lint, format, types, import directions, the documentation
#   make docs          build the documentation into site/ (strict)
#   make dist          build wheel and sdist, try both in fresh environments
#   make changelog     news/ into CHANGELOG.md for the version in pyproject.toml
#   make format        let ruff rewrite what it can
#   make lock          remake requirements/*.txt from pyproject.toml (UPGRADE=1: newest)
#   make clean         remove .venv and everything the tools left

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ARGS ?=
UPGRADE ?=

.PHONY: test-programs test-processes bench-elastic bench-scale bench-growth bench-streaming bench-gpu bench-loop bench-fastest quickstart test test-kills test-limits test-lowered bench bench-plan bench-plan-live check docs dist \
  changelog format lock clean

quickstart: $(VENV)/.run
	$(BIN)/python examples/quickstart.py

PYTEST = $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

test: $(VENV)/.dev
	$(PYTEST) -m "not slow and not gpu and not program" $(ARGS)

test-programs: $(VENV)/.dev
	$(PYTEST) -m "program and not slow and not gpu" $(ARGS)

test-kills: $(VENV)/.dev
	$(BIN)/python tests/kills.py $(ARGS)

test-processes: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow tests/test_processes.py tests/test_devices.py \
	  tests/test_shard_optimizer.py $(ARGS)

test-limits: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow tests/test_real_limit.py $(ARGS)

test-lowered: $(VENV)/.dev
	$(BIN)/python tests/lowered.py --write $(ARGS)

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/steps.py $(ARGS)

bench-loop: $(VENV)/.dev
	$(BIN)/python benchmarks/loop.py $(ARGS)

bench-fastest: $(VENV)/.dev
	$(BIN)/python benchmarks/fastest.py $(ARGS)

bench-growth: $(VENV)/.dev
	$(BIN)/python benchmarks/growth.py $(ARGS)

bench-streaming: $(VENV)/.dev
	$(BIN)/python benchmarks/streaming.py $(ARGS)

bench-gpu: $(VENV)/.dev
	$(BIN)/python benchmarks/gpu.py $(ARGS)

bench-plan: $(VENV)/.dev
	$(BIN)/python benchmarks/plan.py peak best $(ARGS)

bench-plan-live: $(VENV)/.dev
	$(BIN)/python benchmarks/plan.py live $(ARGS)

.PHONY: test-properties bench-exact bench-coupled bench-noise bench-elastic bench-scale

test-properties: $(VENV)/.dev
	$(BIN)/python tests/properties.py $(ARGS)

bench-exact: $(VENV)/.dev
	$(BIN)/python benchmarks/exact.py $(ARGS)

bench-coupled: $(VENV)/.dev
	$(BIN)/python benchmarks/coupled.py $(ARGS)

bench-noise: $(VENV)/.dev
	$(BIN)/python benchmarks/noise_scale.py $(ARGS)

bench-elastic: $(VENV)/.dev
	$(BIN)/python benchmarks/elastic.py --figure docs/elastic.svg $(ARGS)

bench-scale: $(VENV)/.dev
	$(BIN)/python benchmarks/scale.py --figure docs/scale.svg $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --warnings
	$(BIN)/python -m pytest --quiet tests/test_layers.py
	$(BIN)/python -m pytest --quiet -m slow tests/test_typing.py
	$(MAKE) --no-print-directory docs

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

dist: $(VENV)/.dev
	$(BIN)/python tests/dist.py $(ARGS)

changelog: $(VENV)/.dev
	$(BIN)/python -m towncrier build --yes --version "$$($(BIN)/python -c \
	  'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')"

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Two environments in one folder: .dev holds all that .run does, at the same versions.
# A stamp is older than its lock when the lock has changed, and then it is installed anew.
$(VENV)/.run $(VENV)/.dev: $(VENV)/.%: requirements/%.txt pyproject.toml | $(VENV)/pyvenv.cfg
	$(INSTALL) --require-hashes -r $<
	$(INSTALL) --no-deps --no-build-isolation --no-index --editable .
	touch $@

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "eqaccum needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# No address of a package index may get into a lock: it must work with anyone's pip.
PIP_COMPILE = $(BIN)/pip-compile --quiet --generate-hashes --strip-extras --allow-unsafe \
  --no-header --no-emit-options --no-emit-index-url --no-emit-trusted-host \
  --no-emit-find-links $(if $(UPGRADE),--upgrade) --build-deps-for editable

lock: | $(VENV)/pyvenv.cfg
	$(INSTALL) pip-tools==7.6.2
	$(PIP_COMPILE) --extra examples -o requirements/run.txt pyproject.toml
	$(PIP_COMPILE) --extra test --extra check --extra docs -c requirements/run.txt \
	  -o requirements/dev.txt pyproject.toml

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
