# make train   train on this machine          make test    run the tests
# make train JOB=image_classifier.py RUN="--num-workers 2" ARGS="--epochs 1"
#              another recipe, flags of ray-on-ecs run, and options of the recipe
# make check   lint, types, layers            make lock    update the lock files
# make audit   search the code for unsafe calls, and the locked packages for known vulnerabilities
# make image   build the image                make image-size    show its layers and their sizes
# make test-infra    test the Pulumi program, without installing Ray and PyTorch
# make emulate       create, change and destroy the stack on an emulated AWS; needs terraform
# make test-ray      run the other tests that need a Ray head, and a few that take long
# make test-faults   kill parts of a cluster during training
# make docker/.env       write a random token for the cluster of docker/compose.yaml
# make test-containers   test the image as containers: a head, two workers and an S3
# make site    build the documentation's site in site/; needs npm
# make bench   compare the training with a plain loop
# make drills  disturb training runs at random moments, N times in each way
# Everything is installed into .venv on the first call; PYTHON picks the interpreter (3.11 to 3.13 are tested,
# 3.14 is accepted). CONTAINER_ENGINE is docker or a compatible engine.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
JOB ?= ray_train_ddp.py
RUN ?=
FEW_EPOCHS = $(if $(filter image_classifier.py ray_train_ddp.py,$(JOB)),--epochs 3)
N ?= 10
CONTAINER_ENGINE ?= docker
BIN := $(VENV)/bin
INFRA := $(VENV)-infra
AUDIT := $(VENV)-audit
SITE := $(VENV)-site
# What draws diagrams; Material would load it from elsewhere.
MERMAID := mermaid-11.17.2
# The database of pip-audit.
ADVISORIES := https://pypi.org/pypi/pip/25.1/json
INFRA_TESTS := tests/infra tests/emulator $(addprefix tests/test_,$(addsuffix .py,contract deployer docs imports program))
PIP := python -m pip install --quiet
LOCK := docker/requirements.lock
COMPILE := $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --python-version 3.11

.PHONY: help train test check audit lock image image-size site bench drills emulate test-infra test-ray test-faults test-containers
help:
	@sed -n 's/^# \(make.*\)/\1/p' Makefile

train: $(VENV)/.train
	$(BIN)/ray-on-ecs run --local $(RUN) --working-dir training $(JOB) $(FEW_EPOCHS) $(ARGS)

# Where it is set, as in many containers, each of the tests' processes would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# In two lanes: see tests/conftest.py.
test: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses 2 $(ARGS)

test-infra: $(INFRA)/.test
	$(INFRA)/bin/python -m pytest $(INFRA_TESTS) $(ARGS)

# ARGS are the options of tests/emulator, which --help prints.
emulate: $(INFRA)/.test
	$(INFRA)/bin/python -u -m tests.emulator $(ARGS)

# Each of the two processes has its own Ray head.
test-ray: $(VENV)/.test
	$(BIN)/python -m pytest -m 'ray and not smoke and not fault and not container' --numprocesses 2 --dist loadfile $(ARGS)

test-faults: $(VENV)/.test
	$(BIN)/python -m pytest -m fault $(ARGS)

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check
	$(BIN)/shellcheck --severity=warning .ci/run .devcontainer/install infra/definitions/*.sh
	$(BIN)/lint-imports

# bandit fails at a finding of medium or high severity without a `# nosec` and its reason.
audit: $(AUDIT)/.audit
	$(AUDIT)/bin/bandit --quiet --recursive --severity-level medium ray_on_ecs infra training
	@if $(AUDIT)/bin/python -c 'import requests; requests.get("$(ADVISORIES)", timeout=20).raise_for_status()' 2>/dev/null; \
	then for file in $(LOCK) requirements.txt; do $(AUDIT)/bin/pip-audit --strict --disable-pip --require-hashes --requirement $$file || exit; done; \
	else echo "$(ADVISORIES) can't be reached: the locked packages were not searched for known vulnerabilities"; fi

# The Pulumi program shares an environment with Ray, and so the versions of what both need.
lock: $(VENV)/.test
	$(BIN)/$(PIP) uv
	$(COMPILE) --extra train --extra language --output-file $(LOCK) pyproject.toml
	$(COMPILE) --constraint $(LOCK) --output-file requirements.txt requirements.in

# The label says where the source came from, without a name or a token that the address may hold.
image:
	$(CONTAINER_ENGINE) build --platform linux/amd64 --file docker/Dockerfile --tag ray-on-ecs \
	  $(if $(PACKAGES),--build-arg PACKAGES="$(PACKAGES)") \
	  $(if $(PYTHON_IMAGE),--build-arg PYTHON_IMAGE="$(PYTHON_IMAGE)") \
	  $(if $(filter-out undefined,$(origin EFA_SOURCES)),--build-arg EFA_SOURCES="$(EFA_SOURCES)") \
	  --build-arg SOURCE="$$(git config --get remote.origin.url | sed 's#//[^/@]*@#//#' | grep . || echo ray-on-ecs)" .

docker/.env:
	@umask 077 && $(PYTHON) -c 'import secrets; print("RAY_AUTH_TOKEN=" + secrets.token_hex(32))' > $@

image-size: image $(VENV)/.train
	$(BIN)/python -m bench.image_size $(CONTAINER_ENGINE)

site: $(SITE)/.site
	MERMAID=$(SITE)/package/dist/mermaid.min.js NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict

bench: $(VENV)/.test
	$(BIN)/python -m bench $(ARGS)

drills: $(VENV)/.test
	$(BIN)/python -m drills -n $(N) $(ARGS)

test-containers: image $(VENV)/.test
	CONTAINER_ENGINE=$(CONTAINER_ENGINE) $(BIN)/python -m pytest -m container $(ARGS)

# What training runs on is installed from the lock that the image is built from. Python compiles its modules as they are
# imported, in ten seconds of the first training; all of them would take thirty.
$(VENV)/.train: $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; ok = (3, 11) <= v < (3, 15); sys.exit(None if ok else "make: Python %d.%d is not supported; use 3.11 to 3.14, as in make PYTHON=python3.13" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	@echo "installing Ray and PyTorch into $(VENV): some minutes and 6 GB, once"
	$(BIN)/$(PIP) --no-compile --require-hashes --requirement $(LOCK)
	$(BIN)/$(PIP) --no-deps --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.train requirements.txt
	$(BIN)/$(PIP) --upgrade 'pip>=25.1'  # the first with dependency groups
	$(BIN)/$(PIP) --require-hashes --requirement requirements.txt
	$(BIN)/$(PIP) --group dev
	@touch $@

$(INFRA)/.test: pyproject.toml requirements.txt
	$(PYTHON) -m venv $(INFRA)
	$(INFRA)/bin/$(PIP) --upgrade 'pip>=25.1'
	$(INFRA)/bin/$(PIP) --require-hashes --requirement requirements.txt
	$(INFRA)/bin/$(PIP) --group infra
	@touch $@

$(SITE)/.site: pyproject.toml Makefile
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/$(PIP) --upgrade 'pip>=25.1'
	$(SITE)/bin/$(PIP) --group site
	cd $(SITE) && npm pack --silent $(subst -,@,$(MERMAID)) && tar -xzf $(MERMAID).tgz package/dist/mermaid.min.js
	@touch $@

$(AUDIT)/.audit:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/$(PIP) bandit pip-audit
	@touch $@
