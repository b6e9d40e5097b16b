# Each target sets up what it needs of .venv by itself; a second run finds it there.  TORCH is what pip is asked for.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Not compiled: most of what comes along is never imported, and what is compiles when it is.
PIP := $(BIN)/python -m pip install --no-compile --disable-pip-version-check --retries 10 --timeout 60
TORCH ?= torch==2.13.0
TESTS ?= tests
unexport PYTHONDONTWRITEBYTECODE  # each of the tests' processes would compile torch anew

.PHONY: demo test test-floor lint format docs plots site bench dist hub clean

# The demo wants torch and three small packages, and runs from the checkout.
demo: .venv/demo
	$(BIN)/python -m headloss demo

# The lint runs beside the last two downloads, which it needs nothing of.
test:
	$(MAKE) --jobs=2 lint .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS)

# The oldest torch that we support, with its triton, in an environment of its own; what is not there is skipped.
test-floor: .venv-floor/ready
	OMP_NUM_THREADS=1 .venv-floor/bin/python -m pytest -n 2 --dist worksteal $(TESTS)

lint: .venv/trainers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What the documents take from the code: losses, plans, measurements.
docs: .venv/ready
	$(BIN)/python docs/build.py

# Pictures of the committed measurements.
plots: .venv/ready
	$(BIN)/python benchmarks/plots.py

# The documents as a site.
site: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open build/site/index.html; with the search: python3 -m http.server -d build/site, then http://localhost:8000"

bench: .venv/ready
	$(BIN)/python benchmarks/cpu_losses.py

# A wheel and an sdist of the last commit, in dist/, with a long description that a package index can show.
dist: .venv/ready
	rm -rf build/source dist && mkdir -p build/source dist
	git archive HEAD | tar x -C build/source
	$(BIN)/python docs/long_description.py build/source
	cd build/source && $(CURDIR)/$(BIN)/python -c "from setuptools import build_meta as b; \
		b.build_sdist('$(CURDIR)/dist'); b.build_wheel('$(CURDIR)/dist')" > $(CURDIR)/build/dist.log
	ls -l dist

# The package in the layout of Hugging Face `kernels`, in build/hub: get_local_kernel(Path("build/hub")).
hub: .venv/ready
	$(BIN)/python docs/hub_kernel.py build/hub

clean:
	rm -rf .venv .venv-floor build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# One step a stamp, so that a broken download resumes where it stopped.
.venv/created:
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	touch $@

.venv/torch: .venv/created
	$(PIP) $(TORCH)
	touch $@

.venv/demo: .venv/torch
	$(PIP) typer rich matplotlib
	touch $@

# Triton has no wheels for some platforms; everything but its own tests works without.
.venv/triton: .venv/demo
	$(PIP) --upgrade pip "setuptools>=77" wheel
	$(PIP) triton || echo "triton could not be installed; continuing without it"
	touch $@

# Versions stand in pyproject.toml, at the extra `dev`.
DEV = $$($(BIN)/python -c "import tomllib; \
	print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['dev'])")
.venv/tools: .venv/triton
	$(PIP) $(DEV)
	touch $@

# The trainers that the adapters are tested with (brings transformers, accelerate, datasets); their tests skip without.
.venv/trainers: .venv/tools
	$(PIP) trl==1.16.0 $(TORCH) || echo "trl could not be installed; continuing without it"
	touch $@

# Stacks that want a GPU or pin an older torch: without their dependencies, beside the environment, a few megabytes each.
# What the adapters meet of them runs on a CPU (tests/integrations/test_real_trainers.py, which skips without).
BESIDE = $(PIP) --no-deps --target .venv/stacks
.venv/stacks/ready: .venv/trainers
	$(BESIDE) --python-version 3.12 --only-binary=:all: megatron-core==0.19.2 || $(BESIDE) megatron-core==0.16.1 || echo "megatron-core could not be installed; continuing without it"
	$(BESIDE) torchtitan==0.3.0 spmd_types==0.2.3 torchdata==0.11.0 tyro docstring_parser tensorboard absl-py protobuf \
		|| echo "torchtitan could not be installed; continuing without it"
	$(BESIDE) peft==0.21.2 || echo "peft could not be installed; continuing without it"
	$(BESIDE) liger-kernel==0.8.5 || echo "liger-kernel could not be installed; continuing without it"
	$(BESIDE) verl==0.9.1 tensordict==0.15.3 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3 codetiming orjson pyvers \
		cloudpickle || echo "verl could not be installed; continuing without it"
	mkdir -p .venv/stacks && touch $@

# In a folder of their own, for Transformers changes its ways where it finds DeepSpeed.
LAUNCHERS = $(PIP) --no-deps --target .venv/launchers
.venv/launchers/ready: .venv/trainers
	$(LAUNCHERS) lightning==2.6.6 lightning-utilities torchmetrics || echo "lightning could not be installed; continuing without it"
	DS_BUILD_OPS=0 $(LAUNCHERS) --no-build-isolation deepspeed==0.19.8 hjson py-cpuinfo einops msgpack \
		|| echo "deepspeed could not be installed; continuing without it"
	mkdir -p .venv/launchers && touch $@

.venv/ready: .venv/stacks/ready .venv/launchers/ready pyproject.toml
	$(PIP) --no-build-isolation --no-deps --editable .
	touch $@

# On x86_64 this torch comes with CUDA, which it will not start without: 3 GB to load, 7 GB on the disk.  Its triton's
# interpreter needs a numpy that still makes a number of an array of one.
FLOOR := .venv-floor/bin/python -m pip install --no-compile --disable-pip-version-check --retries 10 --timeout 60
.venv-floor/torch:
	test -x .venv-floor/bin/pip || $(PYTHON) -m venv .venv-floor
	$(FLOOR) torch==2.8.0
	touch $@

.venv-floor/triton: .venv-floor/torch
	$(FLOOR) triton==3.4.0 || echo "triton could not be installed; continuing without it"
	touch $@

.venv-floor/ready: .venv-floor/triton pyproject.toml
	$(FLOOR) "numpy<2.4" pytest pytest-xdist pytest-timeout hypothesis typer rich "setuptools>=77" wheel
	$(FLOOR) --no-build-isolation --no-deps --editable .
	touch $@

# What takes long, on demand: each writes a file of benchmarks/results.  JOBS faults at a time.  DEVICE=cuda on a GPU.
.PHONY: mutants properties soak long-run cold-start suite gpu-bench
JOBS ?= 2
DEVICE ?= cpu
MINUTES ?= 10
EXAMPLES ?= 200

mutants: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m proof.mutants --jobs $(JOBS)

properties: .venv/ready
	EXAMPLES=$(EXAMPLES) PROPERTIES=properties OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/properties --slow -o timeout=3000

soak: .venv/ready
	$(BIN)/python -m proof.soak --minutes $(MINUTES) --device $(DEVICE)

long-run: .venv/ready
	$(BIN)/python -m proof.long_run --device $(DEVICE)

cold-start: .venv/ready
	$(BIN)/python -m proof.cold_start --device $(DEVICE)

suite: .venv/ready
	$(BIN)/python -m benchmarks.suite --device $(DEVICE)
	$(if $(filter cpu,$(DEVICE)),$(BIN)/python -m benchmarks.every_loss)

# On a CUDA device: the kernels against the speed of memory, what a call costs the host, heads against their GEMMs.
gpu-bench: .venv/ready
	$(BIN)/python benchmarks/gpu_kernels.py
	$(BIN)/python benchmarks/gpu_visit.py
	$(BIN)/python benchmarks/gpu_visit.py --overhead
	$(BIN)/python benchmarks/gpu_teachers.py
	$(BIN)/python benchmarks/gpu_linear.py
	$(BIN)/python benchmarks/gpu_product.py
