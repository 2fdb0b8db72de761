# Everything is built into .venv. Run `make help` for what there is.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Nothing but the very files that requirements/ has the digests of, and nothing built from sources.
PINNED := --no-deps --require-hashes --only-binary :all:
# pip compiles all 22,000 modules one by one. A demo imports a fraction of them, which Python then compiles and keeps.
LATER := --no-compile
CONFIG ?= etc/appliance.toml
# Which tests the targets below run: a marker of pytest. `make test-unit CASES=` runs all.
CASES ?= not thorough
COVERED := tests/unit/scheduling
# Unit tests wait for a quarter of their time.
PROCESSES := $(shell echo $$(($$(env -u OMP_NUM_THREADS nproc) + 1)))

# Tests start many processes: what Python compiled for one is read by the next.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo demo-plain-pip serve deb check test test-unit test-coverage test-frontend test-engine test-system test-thorough test-deb test-top test-autopilot test-fit test-gpu gpu-lease gpu-dry test-clients test-fleet fuzz chaos docs pins lint format generate results results-quick clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.dev ## Install everything into .venv (torch for the CPU if pip finds it, else for CUDA)

# One stamp for each step, so that a second run has nothing to do.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The CPU build of torch if pip finds it, else the plain one, which is for CUDA and does not start without its
# libraries.
$(VENV)/.cpu: requirements/cpu.txt requirements/torch-cpu.txt requirements/torch-cuda.txt $(VENV)/.created
	@echo "installing 3 GB into $(VENV): this takes minutes, and pip prints nothing meanwhile"
	$(PIP) install -qq $(PINNED) $(LATER) -r requirements/cpu.txt
	@$(PIP) install -qq $(PINNED) $(LATER) -r requirements/torch-cpu.txt || { \
		echo "pip finds no CPU build of torch: fetching the CUDA build and its libraries, 3 GB more"; \
		$(PIP) install -qq $(PINNED) $(LATER) -r requirements/torch-cuda.txt; \
	}
	@touch $@

# Not among the other packages: appliance/platform/torchvision.py.
$(VENV)/.images: requirements/images.txt $(VENV)/.cpu
	rm -rf $(VENV)/image-libraries
	$(PIP) install -qq $(PINNED) $(LATER) --target $(VENV)/image-libraries -r requirements/images.txt
	@touch $@

$(VENV)/.appliance: pyproject.toml $(VENV)/.cpu $(VENV)/.images
	$(PIP) install -qq --no-deps --no-build-isolation -e .
	@touch $@

# An environment to work in is compiled whole, on all processors: not every user of it may write there, or has Python
# keep what it compiled. Packages ship templates and old sources that are no Python: they stay as they are.
$(VENV)/.dev: requirements/dev.txt $(VENV)/.appliance
	$(PIP) install -qq $(PINNED) $(LATER) -r requirements/dev.txt
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

demo: $(VENV)/.appliance ## Six models served from memory for two, outputs checked token by token
	$(BIN)/appliance demo --dir build/demo

demo-plain-pip: ## The demo where pip is as it ships: 6 GB into build/plain-pip; not part of `make test`
	env -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null $(MAKE) demo VENV=build/plain-pip

serve: $(VENV)/.appliance ## Run the daemon (CONFIG=etc/appliance.toml)
	$(BIN)/appliance serve --config $(CONFIG)

deb: $(VENV)/.appliance ## A Debian package in dist/ (docs/operations.md)
	$(BIN)/python packaging/build_deb.py

check: lint ## Lint, types and most unit tests, in seven minutes on two cores
	$(BIN)/python -m pytest -q -n $(PROCESSES) -m "not thorough" tests/unit

# Types are checked on one processor; the lab has the others meanwhile.
test: $(VENV)/.dev ## Lint and the tests that every change has to pass, in less than 20 minutes on two cores
	$(MAKE) --jobs 2 --output-sync=target lint results-quick
	$(MAKE) test-unit test-coverage test-frontend test-engine test-system

test-thorough: $(VENV)/.dev ## All the tests that `make test` leaves out, in about an hour: further cases, other families
	$(MAKE) CASES=thorough test-unit test-frontend test-engine test-system

test-unit: $(VENV)/.dev ## Fast tests, no engine; those of the scheduling machine are test-coverage's
	$(BIN)/python -m pytest -q -n $(PROCESSES) -m "$(CASES)" $(COVERED:%=--ignore=%) tests/unit

test-coverage: $(VENV)/.dev ## The scheduling machine's own tests cover every branch of it
	$(BIN)/python -m pytest -q -n auto $(COVERED) \
		--cov=appliance.scheduling --cov-branch --cov-fail-under=100

test-frontend: $(VENV)/.dev ## vLLM's front half in a front end, over a stand-in core
	$(BIN)/python -m pytest -q -n auto --maxprocesses 2 --dist loadfile -m "$(CASES)" tests/frontend

# In two runs, as what vLLM keeps of each model that was built adds up to more than there is.
test-engine: $(VENV)/.dev ## Memory and engines on real vLLM
	$(BIN)/python -m pytest -q -n auto --maxprocesses 2 --dist loadfile --no-loadscope-reorder \
		-m "$(CASES)" tests/engine/test_[a-l]*.py --durations=8
	$(BIN)/python -m pytest -q -n auto --maxprocesses 2 --dist loadfile --no-loadscope-reorder \
		-m "$(CASES)" tests/engine/test_[m-z]*.py --durations=8

test-gpu: $(VENV)/.dev ## What needs a real GPU; not part of `make test` (docs/gpu.md)
	$(BIN)/python -m pytest -q tests/gpu
	$(BIN)/python -m pytest -q tests/gpu_engines

gpu-lease: $(VENV)/.dev ## The calls with which a borrowed GPU measures everything (docs/gpu.md)
	$(BIN)/python benchmarks/gpu_lease.py

GPU_DRY := build/gpu-dry/venv

$(GPU_DRY)/.created: requirements/gpu.txt requirements/gpu-dry.txt pyproject.toml
	$(PYTHON) -m venv $(GPU_DRY)
	$(GPU_DRY)/bin/pip install -qq $(PINNED) -r requirements/gpu.txt
	$(GPU_DRY)/bin/pip install -qq $(PINNED) -r requirements/gpu-dry.txt
	$(GPU_DRY)/bin/pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

gpu-dry: $(GPU_DRY)/.created ## The CUDA side on a driver that computes nothing: 9 GB into build/; not in CI
	$(GPU_DRY)/bin/python benchmarks/gpu_dry.py --out build/gpu-dry/out --json build/gpu-dry/summary.json

# Three at a time: two leave a sixth of two processors unused.
test-system: $(VENV)/.dev ## The whole appliance
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "$(CASES)" \
		tests/system --ignore tests/system/test_deb.py --ignore tests/system/test_web.py \
		--ignore tests/system/test_dashboard.py --ignore tests/system/test_autopilot.py \
		--ignore tests/system/test_fit_boxes.py --durations=12

test-autopilot: $(VENV)/.dev ## A daemon that corrects a wrong policy; alone on the machine: it weighs what it measures
	$(BIN)/python -m pytest -q -rP -p no:xdist tests/system/test_autopilot.py

test-fit: $(VENV)/.dev ## What `appliance fit` says of ten configurations happens on real daemons; prints the table of docs/sizing.md
	$(BIN)/python -m pytest -q -rA -n 2 tests/system/test_fit.py tests/system/test_fit_boxes.py

test-deb: $(VENV)/.dev ## The Debian package, from installation to purge; needs root and dpkg
	$(BIN)/python -m pytest -q tests/system/test_deb.py

test-top: $(VENV)/.dev ## The dashboard in a terminal and in a browser; needs tmux and Chromium
	$(BIN)/python -m pytest -q -p no:xdist tests/system/test_dashboard.py tests/system/test_web.py

test-clients: $(VENV)/.appliance build/clients/.made build/aider/.made build/openwebui/.made build/clients-js/.made ## Clients that others wrote; fetches 4 GB once, needs Chromium; not part of `make test`
	build/clients/bin/python -m pytest -c tests/clients/pytest.ini --rootdir . \
		--confcutdir tests/clients tests/clients

# Environments of their own: what clients need is not what the appliance needs. One package of theirs
# is there as a source alone.
build/%/.made: requirements/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -qq --no-deps --require-hashes -r $<
	@touch $@

build/clients-js/.made: tests/clients/package.json tests/clients/package-lock.json
	mkdir -p $(@D)
	cp $^ $(@D)
	npm ci --prefix $(@D) --silent --no-audit --no-fund
	@touch $@

FLEET := build/fleet

$(FLEET)/.made: requirements/fleet.txt pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -qq $(PINNED) -r $<
	$(@D)/bin/python -m pip --disable-pip-version-check install -qq --no-deps --no-build-isolation -e .
	@touch $@

test-fleet: $(VENV)/.appliance $(FLEET)/.made ## Three daemons and three Ray nodes; fetches 190 MB once; not part of `make test`
	$(FLEET)/bin/python -m pytest -c tests/fleet/pytest.ini --rootdir . \
		--confcutdir tests/fleet tests/fleet

fuzz: $(VENV)/.dev ## Requests made from the OpenAPI document, then spoilt ones, 10 minutes of each
	$(BIN)/python -m tests.fuzz.by_document --seconds 600
	$(BIN)/python -m tests.fuzz.by_bytes --seconds 600

chaos: $(VENV)/.dev ## Everything goes wrong for 20 minutes under load (docs/operations.md)
	$(BIN)/python -m tests.chaos --minutes 20

# An environment of its own: what makes the site is not what the appliance needs.
DOCS := build/docs

$(DOCS)/venv/.made: requirements/docs.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -qq $(PINNED) -r $<
	@touch $@

$(DOCS)/node/.made: packaging/site/package.json packaging/site/package-lock.json
	mkdir -p $(@D)
	cp $^ $(@D)
	npm ci --prefix $(@D) --silent --no-audit --no-fund --ignore-scripts
	@touch $@

docs: $(DOCS)/venv/.made $(DOCS)/node/.made ## These documents as a site in build/docs/site; fetches 250 MB once, needs npm; not in CI
	NO_MKDOCS_2_WARNING=1 $(DOCS)/venv/bin/mkdocs build
	$(PYTHON) packaging/site/site_check.py $(DOCS)/site

pins: build/pins/.made ## Write the hashes of requirements/, after a change of a version in it
	$(PYTHON) packaging/pins.py build/pins/bin/uv

lint: $(VENV)/.dev ## Style, types, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.prose

format: $(VENV)/.dev ## Rewrite the sources in the house's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: $(VENV)/.dev ## Write the files that come from the schema, the hooks, the metrics and vLLM, and the pictures
	$(BIN)/appliance config sample > etc/appliance.toml
	$(BIN)/appliance config docs > docs/configuration.md
	$(BIN)/appliance policy docs > docs/hooks.md
	$(BIN)/python -m appliance.cli.docs.metrics > docs/metrics.md
	$(BIN)/python -m appliance.cli.docs.states docs/architecture.md
	$(BIN)/python -m appliance.frontend.openapi > appliance/api/openapi/inference.json
	mkdir -p build
	$(BIN)/python -m appliance.frontend.known_models > build/known_models.json
	mv build/known_models.json appliance/checkpoints/known_models.json
	$(BIN)/python -m tests.pictures

results: $(VENV)/.dev ## Play the papers' tables in the lab and write benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.papers

results-quick: $(VENV)/.dev ## A few of their cells are still as committed
	$(BIN)/python -m benchmarks.papers --quick

clean: ## Remove .venv and everything built
	rm -rf $(VENV) build .coverage .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
