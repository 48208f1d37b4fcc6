# Paceline's two commands are `make quickstart` and `make test`; `make help` lists the others.
# Everything is installed into .venv, pinned; a second run installs nothing.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?=
ARGS ?=
# The release of torch that is installed: `locked`, `existing` (PYTHON's own, which stays as it is) or a version; and the
# package index that has the right wheel of it, where pip's own has another.
TORCH ?= locked
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# An activated environment or a PYTHONPATH of the caller must not leak in; and where Python is told not to keep
# what it has compiled, each process of the tests would compile it once more.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONDONTWRITEBYTECODE

# Two files of tests at a time, those first that start processes; of the fast tests three, because many of them wait.
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10

.PHONY: help
help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: quickstart
quickstart: install ## Install, get the data, then train, analyse, export, serve and ask a small model
	@scripts/apt-install dataset-fashion-mnist
	@$(BIN)/python scripts/quickstart.py $(ARGS)

.PHONY: test
test: WORKERS = 3
test: install-dev test-packages ## Run the unit and integration tests, in minutes (ARGS="-k order" goes to pytest)
	@$(PYTEST) -m "not system and not slow" $(ARGS)

.PHONY: test-systems
test-systems: install-dev test-packages system-packages other-launchers ## Run the tests with real systems: Slurm, Ray, ...
	@$(PYTEST) -m "system and not slow" $(ARGS)

.PHONY: test-all
test-all: install-dev test-packages system-packages other-launchers $(VENV)/.horovod-tensorflow ## Run all tests
	@$(PYTEST) --cold --hypothesis-profile=long $(ARGS)

# Left out are the tests of systems that know nothing of torch.
.PHONY: test-torch
test-torch: ## Run the tests of what uses torch with another release: VERSION=2.11.0 PYTHON=python3.12
	@: $(or $(VERSION),$(error name the release of torch: make test-torch VERSION=2.11.0))
	@$(MAKE) --no-print-directory VENV=.venv-torch-$(VERSION) TORCH=$(VERSION) install-dev test-packages
	@$(subst $(VENV),.venv-torch-$(VERSION),$(PYTEST)) -m "(not system or matrix) and not slow" \
		tests/data tests/parallel tests/training tests/elastic tests/export \
		plugins/fine_tuning plugins/lightning plugins/lm plugins/more_strategies plugins/own_loop plugins/serving $(ARGS)

.PHONY: check
check: install-dev ## Check style, formatting, prose, sizes, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_prose.py
	$(BIN)/python scripts/package_size.py --check
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: install-dev ## Format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: bench
bench: install-dev ## Measure Paceline beside a hand-written DDP loop, Accelerate and Lightning
	@scripts/apt-install dataset-fashion-mnist
	@$(BIN)/python -m benchmarks train $(ARGS)

# On a GPU, by the Python that has its torch: PYTHON, else that of .venv, else python3. Nothing is installed: what this
# Python lacks comes from SITE, a folder of wheels or packages. STAND_IN=1 lets the CPU pretend to be a GPU.
GPU = $(or $(PYTHON),$(wildcard $(BIN)/python),python3) -m benchmarks.gpu $(@:-gpu=) $(if $(SITE),--site "$(SITE)") \
	$(if $(OUT),--out "$(OUT)") $(if $(STAND_IN),--stand-in) $(ARGS)

.PHONY: test-gpu bench-gpu
test-gpu: ## Prove on a GPU that training is exact there, in five minutes (SITE=wheels OUT=folder)
	@$(GPU)

bench-gpu: ## Measure on a GPU Paceline beside a loop by hand, in four minutes (SITE=wheels OUT=folder)
	@$(GPU)

.PHONY: chaos
chaos: install ## Train Fashion-MNIST under 50 faults, and prove that nothing is lost
	@scripts/apt-install dataset-fashion-mnist
	@$(BIN)/paceline chaos fashion-mnist --nproc 4 --faults 50 --kinds kill,stop,leave,join --seed 1 \
		--max-steps 400 $(ARGS)

.PHONY: fuzz
fuzz: install-dev ## Send damaged requests, packages, runs and options for some minutes (ARGS="--minutes 30")
	@$(BIN)/python -m tests.fuzz $(ARGS)

.PHONY: docs
docs: install-dev ## Build the documentation into site/ (ARGS=serve shows it while you write)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build --strict --quiet)

# Into an environment in which nothing is but what a user's has: torch, and the packages of run.lock.
.PHONY: dist
dist: install-dev ## Build wheel and sdist into dist/, and try both in an environment of their own
	@$(MAKE) --no-print-directory --always-make VENV=.venv-dist .venv-dist/.torch
	@.venv-dist/bin/python -m pip --disable-pip-version-check -qq install --no-deps --require-hashes -r requirements/run.lock
	@$(BIN)/python scripts/build_dist.py --python .venv-dist/bin/python
	@rm -rf .venv-dist

.PHONY: lock
lock: ## Renew requirements/*.lock from pyproject.toml
	@python=$$(scripts/find-python $(PYTHON)) && PYTHON="$$python" scripts/lock

.PHONY: clean
clean: ## Remove .venv and everything that the tools made; runs/ is kept
	rm -rf $(VENV) site dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src plugins benchmarks tests scripts examples docs -name __pycache__ -type d -prune -exec rm -rf {} +

# --- installing: each stamp is newer than what it was installed from ---------------------------

.PHONY: install install-dev test-packages system-packages other-launchers
install: $(VENV)/.paceline ## Install Paceline into .venv
install-dev: $(VENV)/.dev ## Install Paceline and what its tests and checks need

# Fashion-MNIST; for torch.compile, a C++ compiler and the headers of this Python where it came without.
test-packages: $(VENV)/.dev
	@scripts/apt-install dataset-fashion-mnist g++ $$($(BIN)/python scripts/python_headers.py)

# For tests on several machines, ip, tc, firewalls, clocks that differ, an ssh server, etcd and a file system of the
# tests' own; a browser for the pages; a Slurm cluster with its accounting, and the command module of computing centres.
system-packages:
	@scripts/apt-install iproute2 nftables faketime openssh-client openssh-server etcd-server fuse3 chromium chromium-driver \
		slurm-wlm munge slurmdbd slurm-wlm-mysql-plugin mariadb-server-core mariadb-client-core \
		environment-modules

# Other people's launchers: MPICH, beside the Open MPI that is in the environment, and Horovod, which is built.
other-launchers: $(VENV)/.mpich $(VENV)/.horovod

# An environment whose torch was chosen otherwise is made again; the last word of the stamp says how.
CREATED := $(VENV)/.created$(if $(filter-out locked,$(TORCH)),-$(TORCH))
ifeq ($(TORCH),existing)
$(CREATED):
	@export PYTHONPATH='$(PYTHONPATH)' && python=$$(scripts/find-python --with-torch $(PYTHON)) && \
		echo "creating $(VENV) with $$python and its torch" && \
		rm -rf $(VENV) && "$$python" -m venv $(VENV) && scripts/share-torch "$$python" $(VENV)
	@touch $@
else
$(CREATED):
	@python=$$(scripts/find-python $(PYTHON)) && echo "creating $(VENV) with $$python" && \
		rm -rf $(VENV) && "$$python" -m venv $(VENV)
	@touch $@
endif

# torch comes first and alone: the machine's package index decides which wheel of it is right.
TORCH_locked := -r requirements/torch.txt
TORCH_existing := torch
INSTALL_TORCH := $(PIP) install $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') $(or $(TORCH_$(TORCH)),torch==$(TORCH))

# The lock is that of the locked torch: what another one requires itself, such as an older setuptools, wins. Whether all
# packages of an existing Python fit together is not ours to check.
CHECK_locked := $(BIN)/python -m pip --disable-pip-version-check check
CHECK_existing := $(INSTALL_TORCH) && $(BIN)/python -c "import paceline.torch_internals"
CHECK_INSTALLED := $(or $(CHECK_$(TORCH)),$(INSTALL_TORCH) && $(CHECK_locked))

$(VENV)/.torch: requirements/torch.txt $(CREATED)
	@echo "installing torch ($(TORCH))"
	@$(INSTALL_TORCH)
	@touch $@

$(VENV)/.paceline: pyproject.toml requirements/run.lock $(VENV)/.torch
	@echo "installing paceline"
	@$(PIP) install --no-deps --require-hashes -r requirements/run.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@$(CHECK_INSTALLED)
	@touch $@

$(VENV)/.dev: requirements/dev.lock $(VENV)/.paceline
	@echo "installing what the tests and checks need"
	@$(PIP) install --no-deps --require-hashes -r requirements/dev.lock
	@$(CHECK_INSTALLED)
	@touch $@

$(VENV)/.mpich: requirements/mpich.lock $(VENV)/.dev
	@$(PIP) install --no-deps --require-hashes --prefix $(VENV)/mpich -r requirements/mpich.lock
	@touch $@

# Where Horovod cannot be built its tests are skipped, with the reason, and tried again next time.
$(VENV)/.horovod: scripts/build-horovod requirements/horovod.lock requirements/horovod-build.lock $(VENV)/.dev | test-packages
	@if scripts/build-horovod; then touch $@; fi

$(VENV)/.horovod-tensorflow: requirements/horovod-tensorflow.lock $(VENV)/.horovod
	@if scripts/build-horovod --tensorflow $(VENV)/horovod-tensorflow; then touch $@; fi
