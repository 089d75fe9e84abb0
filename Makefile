# Everything runs in .venv, which the first target that needs it sets up; see .ci/setup.
# ARGS passes flags on:  make train ARGS="--steps 5"   make test ARGS="-k schedule"

ARGS =
PY = .venv/bin/python
SETUP = sh .ci/setup
# What constraints.txt is resolved with; the rest is whatever fits these.
PINS = jax==0.11.2 jaxlib==0.11.2 flax==0.12.10 orbax-checkpoint==0.12.8
JAX_NEXT = 'jax>=0.12,<0.13' 'jaxlib>=0.12,<0.13'
CUDA_PLUGIN = jax-cuda13-pjrt==0.11.2

.PHONY: help train test drills lint format cuda12 cuda13 assemble compile smoke-jax-next constraints clean

help: ## this list
	@sed -n 's/^\([a-z0-9][a-z0-9 -]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{printf "%-22s %s\n", $$1, $$2}'

train: .venv/.ready ## the main job: train a small Llama on 8 workers
	@$(PY) -m train.llama $(ARGS)

# Two processes, since a test is mostly one thread compiling; worksteal keeps cases that share compiled code together.
test: .venv/.ready ## the tests (ARGS="-n 0" for one process)
	@$(PY) -m pytest -n 2 --dist worksteal $(ARGS)

drills: .venv/.ready ## kill, damage and fill up runs of the command, and see that nothing is lost (ARGS="--kills 200")
	@$(PY) -m tests.drills $(ARGS)

lint: .venv/.ready-dev ## format, style, import contracts, types; what CI checks
	@$(PY) -m ruff format --check --output-format concise .
	@$(PY) -m ruff check .
	@.venv/bin/lint-imports --no-logo
	@$(PY) -m pyright

format: .venv/.ready-dev ## rewrite the files as lint wants them
	@$(PY) -m ruff check --fix-only --quiet .
	@$(PY) -m ruff format .

cuda12 cuda13: .venv/.ready ## add the GPU packages to .venv
	@$(SETUP) .venv $@ constraints.txt

assemble: build/cuda/.ready ## what the assembler makes of the Hopper kernels; needs no GPU
	@JAX_PLATFORMS=cpu $(PY) -m benchmarks.assemble $(ARGS)

compile: build/cuda/.ready ## what hides the messages of attention on 8 H200s; needs no GPU
	@JAX_PLATFORMS=cpu $(PY) -m benchmarks.compile $(ARGS)

smoke-jax-next: build/jax-next/.ready ## the attention's tests and two steps of the main job on jax 0.12
	@build/jax-next/bin/python -m pytest -n 2 --dist worksteal -q tests/test_distflash_attention.py $(ARGS)
	@rm -rf build/jax-next/run
	@build/jax-next/bin/python -m train.llama --mesh seq=8 --steps 2 --run-dir build/jax-next/run

constraints: ## resolve constraints.txt anew
	@rm -rf build/constraints
	@$(SETUP) build/constraints train,test,dev /dev/null $(PINS)
	@echo "# Exact versions of everything in [train,test,dev]; 'make constraints' writes this file." > build/constraints.txt
	@build/constraints/bin/python -m pip freeze --exclude-editable >> build/constraints.txt
	@mv build/constraints.txt constraints.txt

clean: ## remove environments, builds and caches; runs/ stays
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written after a whole set-up only.
.venv/.ready: pyproject.toml constraints.txt .ci/setup
	@$(SETUP) .venv train,test constraints.txt
	@touch $@

build/cuda/.ready: .venv/.ready
	@$(PY) -m pip install -qq --no-deps --upgrade --target build/cuda $(CUDA_PLUGIN)
	@touch $@

.venv/.ready-dev: .venv/.ready
	@$(SETUP) .venv dev constraints.txt
	@touch $@

build/jax-next/.ready: .venv/.ready
	@mkdir -p build
	@grep -Ev '^(jax|jaxlib)==' constraints.txt > build/constraints-jax-next.txt
	@BASE=.venv $(SETUP) build/jax-next test build/constraints-jax-next.txt $(JAX_NEXT)
	@touch $@

# A moved checkout, or one whose Python is gone, is set up again whatever the stamp says.
ifneq ($(shell test -x $(PY) && cat .venv/.checkout 2>/dev/null),$(shell cd . && pwd -P))
.PHONY: .venv/.ready
endif
