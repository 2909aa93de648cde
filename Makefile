# Everything a newcomer runs. Each target makes what it needs; nothing is installed outside .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Which Kubernetes the end-to-end tests and the benchmarks run on, as in `make e2e K8S=1.30.14`; the newest by default.
K8S ?=
# Half of their time these tests wait for somebody, so several files run at once, each process on a control plane of its own.
E2E_WORKERS ?= 2
# Which of them: `make e2e TESTS="not one_version"` leaves out what is the same on every version.
TESTS ?=
# For how long `make chaos` goes on at the least, and until how many objects were tried to be created.
CHAOS_SECONDS ?= 600
CREATES ?= 0
# For how long `make playground` goes on; without end by default.
SECONDS ?=
# Until an image is published, there is only the one that `make image` builds.
IMAGE_OR_OURS = $(or $(IMAGE),vcuda-quota:0.1.0)
# The repository whose releases krew downloads the plugin from.
REPOSITORY ?= https://github.com/OWNER/vcuda-quota
ASSETS = assets=$$(tests/e2e/build-control-plane $(K8S)) && KUBEBUILDER_ASSETS=$$assets

.PHONY: help demo playground test fuzz e2e chaos reread bench scale screenshots reference chart install-yaml lock image release docs lint format clean

help:  ## Show the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-11s %s\n", $$1, $$2}'

$(VENV)/installed: setup.cfg pyproject.toml requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[server,test,dev]'
	touch $@

demo: $(VENV)/installed  ## Run the webhook on this machine and send the example pods through it
	$(BIN)/python -m examples.demo

playground: $(VENV)/installed  ## Run a control plane with simulated GPU nodes, this system, and teams that use it, until Ctrl-C or for SECONDS=60
	@$(BIN)/python -m examples.playground $(if $(SECONDS),--seconds $(SECONDS))

test: $(VENV)/installed  ## Run the unit and integration tests (a few minutes)
	$(BIN)/pytest

fuzz: $(VENV)/installed  ## Send the webhook what no caller should, and let everything befall reservations, for ten minutes each; `test` takes a slice
	FUZZ_SECONDS=600 $(BIN)/pytest tests/integration/test_fuzz_*.py -s
	MACHINE_EXAMPLES=3000 $(BIN)/pytest tests/unit/test_reservation_machine.py tests/unit/test_running_machine.py --timeout 3600

e2e: $(VENV)/installed  ## Run the tests against a real control plane, building it once; K8S=1.30.14 for another version than the newest
	$(ASSETS) $(BIN)/pytest tests/e2e -m "not chaos and not reread$(if $(TESTS), and ($(TESTS)))" -n $(E2E_WORKERS) --dist loadfile --no-loadscope-reorder --durations 10

chaos: $(VENV)/installed  ## Let every part fail again and again under load, with tenants attacking, and count what is stored: for ten minutes, or longer, as in CREATES=100000
	$(ASSETS) CHAOS_SECONDS=$(CHAOS_SECONDS) CHAOS_CREATES=$(CREATES) $(BIN)/pytest tests/e2e -m chaos -s

reread: $(VENV)/installed  ## Wait for the API server to take up a new client certificate by itself (six minutes)
	$(ASSETS) $(BIN)/pytest tests/e2e/test_client_certificates.py -m reread

bench: $(VENV)/installed  ## Measure what a pod costs with us, beside webhooks that do nothing and beside none, and our parts
	$(ASSETS) $(BIN)/python -m bench

scale: $(VENV)/installed  ## Measure the controller and the webhook beside 50,000 stored pods, 50,000 claims, 5,000 slices and 5,000 nodes
	$(ASSETS) $(BIN)/python -m bench scale
	$(BIN)/python -m bench discover

screenshots: $(VENV)/installed  ## Take the pictures of the usage page under docs/, with Debian's chromium
	$(BIN)/python -m tools.screenshots

reference: $(VENV)/installed  ## Write docs/reference.md from the code
	$(BIN)/python -m tools.reference

$(VENV)/docs-installed: setup.cfg $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

chart: $(VENV)/installed  ## Write the templates of the Helm chart from the kustomize base and components
	$(ASSETS) $(BIN)/python -m tools.chart

install-yaml: $(VENV)/installed  ## Write build/install.yaml for `kubectl apply -f`; IMAGE=REGISTRY/vcuda-quota:TAG, and COMPONENTS="hami cert-manager" or NAMES="--system-namespace=gpu" for more
	$(ASSETS) $(BIN)/python -m tools.install_yaml --image $(IMAGE_OR_OURS) $(addprefix --component ,$(COMPONENTS)) $(NAMES) --output build/install.yaml

$(VENV)/lock-installed: setup.cfg $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[lock]'
	touch $@

# No index and no host is written into the files. Without UPGRADE=--upgrade, versions that still fit stay as they are.
COMPILE = env -u PIP_FIND_LINKS CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/pip-compile --quiet --generate-hashes --strip-extras --no-emit-options $(UPGRADE)

lock: $(VENV)/lock-installed  ## Write the lock files of the image from setup.cfg; UPGRADE=--upgrade for the newest versions
	$(COMPILE) --extra server --output-file requirements.lock setup.cfg
	$(COMPILE) --only-build-deps --all-build-deps --allow-unsafe --output-file requirements-build.lock setup.cfg

image:  ## Build the image with docker or podman: IMAGE=REGISTRY/vcuda-quota:0.1.0, and PUSH=yes to push it
	@engine=$$(command -v docker || command -v podman) || { echo 'make image needs docker or podman, and finds neither' >&2; exit 1; }; \
	"$$engine" build --tag "$(IMAGE_OR_OURS)" . $(if $(PUSH),&& "$$engine" push "$(IMAGE_OR_OURS)")

$(VENV)/release-installed: setup.cfg $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[release]'
	touch $@

release: $(VENV)/release-installed  ## Write the files of a release into dist: VERSION=0.1.0 IMAGE=REGISTRY/vcuda-quota:0.1.0 REPOSITORY=https://…
	$(ASSETS) $(BIN)/python -m tools.release --version "$(VERSION)" --image $(or $(IMAGE),vcuda-quota:$(VERSION)) --repository "$(REPOSITORY)"

docs: $(VENV)/docs-installed  ## Build the documentation as a static site in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(VENV)/installed  ## Check style, types and layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.house --check

format: $(VENV)/installed  ## Put the code in order
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## Remove what the targets made
	rm -rf $(VENV) *.egg-info build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
