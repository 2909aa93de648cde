# All commands of a developer. Each target creates what it needs, and installs nothing outside .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The version of Kubernetes for end-to-end tests and benchmarks, for example `make e2e K8S=1.30.14`; by default the newest.
K8S ?=
# Tests wait for much of the time, so several files run at once. Each process of `make e2e` has its own control plane.
WORKERS ?= 2
# The selected tests: `make e2e TESTS="not one_version"` leaves out those with the same result on every version.
TESTS ?=
# `make chaos` ends after at least so many seconds and so many attempts to create an object.
CHAOS_SECONDS ?= 600
CREATES ?= 0
# For how long `make playground` goes on; without end by default.
SECONDS ?=
# Until an image is published, there is only the one that `make image` builds.
IMAGE_OR_OURS = $(or $(IMAGE),vcuda-quota:0.1.0)
ASSETS = assets=$$(tests/e2e/build-control-plane $(K8S)) && KUBEBUILDER_ASSETS=$$assets
KUSTOMIZE = kustomize=$$(tests/e2e/build-tools kustomize) && PATH=$$kustomize:$$PATH

.PHONY: help demo playground check test fuzz e2e chaos real operators reread bench scale screenshots reference chart install-yaml lock image image-tar release docs lint format clean

help:  ## Show the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-11s %s\n", $$1, $$2}'

PIP = $(BIN)/pip install --quiet --disable-pip-version-check

# What the programs need, at the locked versions. `make demo` needs no more, and this takes less time than the rest.
$(VENV)/programs-installed: setup.cfg pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11 …")'
	@echo 'Installing vcuda quota into $(VENV). This is necessary only once, and takes about a minute.'
	@began=$$(date +%s) && \
	echo '  1. a virtual environment of Python' && $(PYTHON) -m venv $(VENV) && \
	echo "  2. $$(grep -c == requirements.lock) packages of requirements.lock" && $(PIP) --require-hashes --requirement requirements.lock && \
	echo '  3. the programs of this directory' && $(PIP) --no-deps --editable . && \
	echo "Installed in $$(($$(date +%s) - began)) s."
	@touch $@

$(VENV)/installed: $(VENV)/programs-installed
	$(PIP) --editable '.[server,test,dev]'
	touch $@

demo: $(VENV)/programs-installed  ## Run the webhook on this machine and send the example pods through it
	@$(BIN)/python -m examples.demo

playground: $(VENV)/installed  ## Run a control plane with simulated GPU nodes, this system, and teams that use it, until Ctrl-C or for SECONDS=60
	@$(BIN)/python -m examples.playground $(if $(SECONDS),--seconds $(SECONDS))

check: lint  ## Run lint and the fast tests, in under four minutes; for each commit
	$(BIN)/pytest -m "not slow" -n $(WORKERS) --dist loadfile

test: $(VENV)/installed  ## Run all unit and integration tests, in under ten minutes; before each push
	$(BIN)/pytest -n $(WORKERS) --dist loadfile

fuzz: $(VENV)/installed  ## Send the webhook malformed input, and reservations any fault, for ten minutes each; `test` does a small part
	FUZZ_SECONDS=600 $(BIN)/pytest tests/integration/test_fuzz_*.py -s
	MACHINE_EXAMPLES=3000 $(BIN)/pytest tests/unit/test_reservation_machine.py tests/unit/test_running_machine.py tests/unit/test_team_machine.py --timeout 3600
	MODEL_WALKS=2000 $(BIN)/pytest tests/unit/test_team_model.py --timeout 3600

e2e: $(VENV)/installed  ## Run the tests on a real control plane, which is built once; K8S=1.30.14 for another version than the newest
	$(ASSETS) $(BIN)/pytest tests/e2e -m "not chaos and not reread and not operators$(if $(TESTS), and ($(TESTS)))" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 10

chaos: $(VENV)/installed  ## Kill and suspend every part under load and attacks, and count what is stored, for ten minutes; CREATES=100000 for longer
	$(ASSETS) CHAOS_SECONDS=$(CHAOS_SECONDS) CHAOS_CREATES=$(CREATES) $(BIN)/pytest tests/e2e -m chaos -s

real: $(VENV)/installed  ## Install the chart on a node with a kubelet and containers, and make its parts fail; needs root, containerd and runc. TESTS=ci for a part
	K8S=$(K8S) tests/real/run tests/real -s -m "real$(if $(TESTS), and ($(TESTS)))"

operators: $(VENV)/installed  ## Run operators of other projects beside this system: KubeRay, Karpenter; builds them once
	operators=$$(tests/e2e/build-tools operators) && $(ASSETS) OPERATORS=$$operators $(BIN)/pytest tests/e2e/test_operators.py -m operators

reread: $(VENV)/installed  ## Wait until the API server loads a new client certificate by itself (six minutes)
	$(ASSETS) $(BIN)/pytest tests/e2e/test_client_certificates.py -m reread

bench: $(VENV)/installed  ## Measure the cost of a pod with our webhook, with idle webhooks and with none, and of our parts
	$(ASSETS) $(BIN)/python -m bench

scale: $(VENV)/installed  ## Measure the controller and the webhook with 50,000 stored pods, 50,000 claims, 5,000 slices and 5,000 nodes
	$(ASSETS) $(BIN)/python -m bench scale
	$(BIN)/python -m bench discover

screenshots: $(VENV)/installed  ## Take the screenshots of the usage page for docs/, with Debian's chromium
	$(BIN)/python -m tools.screenshots

reference: $(VENV)/installed  ## Write docs/reference.md from the code
	$(BIN)/python -m tools.reference

$(VENV)/docs-installed: setup.cfg $(VENV)/installed
	$(PIP) --editable '.[docs]'
	touch $@

chart: $(VENV)/installed  ## Write the templates of the Helm chart from the kustomize base and components
	$(BIN)/python -m tools.policies
	$(KUSTOMIZE) $(BIN)/python -m tools.chart

install-yaml: $(VENV)/installed  ## Write build/install.yaml for `kubectl apply -f`; IMAGE=REGISTRY/vcuda-quota:TAG, and COMPONENTS="hami cert-manager" or NAMES="--system-namespace=gpu" for more
	$(KUSTOMIZE) $(BIN)/python -m tools.install_yaml --image $(IMAGE_OR_OURS) $(addprefix --component ,$(COMPONENTS)) $(NAMES) --output build/install.yaml

$(VENV)/lock-installed: setup.cfg $(VENV)/installed
	$(PIP) --editable '.[lock]'
	touch $@

# No index and no host is written into the files. Without UPGRADE=--upgrade, versions that still fit stay as they are.
COMPILE = env -u PIP_FIND_LINKS CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/pip-compile --quiet --generate-hashes --strip-extras --no-emit-options $(UPGRADE)

lock: $(VENV)/lock-installed  ## Write the lock files of the image from setup.cfg; UPGRADE=--upgrade for the newest versions
	$(COMPILE) --extra server --output-file requirements.lock setup.cfg
	$(COMPILE) --only-build-deps --all-build-deps --allow-unsafe --output-file requirements-build.lock setup.cfg

image:  ## Build the image with docker, podman or buildah: IMAGE=REGISTRY/vcuda-quota:0.1.0, and PUSH=yes to push it
	@engine=$$(command -v docker || command -v podman || command -v buildah) || { echo 'make image needs docker, podman or buildah. Install one of them, for example: apt-get install buildah' >&2; exit 1; }; \
	"$$engine" build $(if $(BASE),--build-arg "BASE=$(BASE)") --tag "$(IMAGE_OR_OURS)" . $(if $(PUSH),&& "$$engine" push "$(IMAGE_OR_OURS)")

image-tar: $(VENV)/installed  ## Build the image with buildah into build/image.tar, and test it (needs root); BASE=IMAGE for another base than Debian's Python
	$(BIN)/python -m tools.image $(if $(BASE),--base "$(BASE)")
	$(BIN)/pytest tests/image

$(VENV)/release-installed: setup.cfg $(VENV)/installed
	$(PIP) --editable '.[release]'
	touch $@

release: $(VENV)/release-installed  ## Write the files of a release into dist: VERSION=0.1.0 IMAGE=REGISTRY/vcuda-quota:0.1.0
	$(KUSTOMIZE) $(BIN)/python -m tools.release --version "$(VERSION)" --image $(or $(IMAGE),vcuda-quota:$(VERSION))

docs: $(VENV)/docs-installed  ## Build the documentation as a static site in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(VENV)/installed  ## Check style, types and layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.house --check

format: $(VENV)/installed  ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## Remove everything that the targets created
	rm -rf $(VENV) *.egg-info build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
