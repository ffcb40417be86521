# SPDX-License-Identifier: Apache-2.0
# Not the README's .venv: the tools and tested versions below would change what a user installed there.
VENV ?= .venv-make
PYTHON ?= python3
BIN := $(VENV)/bin
EXTRAS := export,cpu,serve,bench,explore,openai,rtx,trace,dev
STAMP := $(VENV)/.saccade-installed
TOOLS := build/supply-tools
DEPLOY_TOOLS := build/deploy-tools
DOCS_TOOLS := build/docs-tools

.PHONY: help demo docs test test-fast test-journeys check bench plugins plugins-tensorrt check-native \
	check-chaos check-deploy check-first-hour check-fuzz check-gpu check-killed check-mutations check-notebooks \
	check-real-size check-scale \
	check-supply check-wheel wheel

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

demo: $(STAMP) ## train, export, verify, serve and benchmark; prints a table and writes a report
	$(BIN)/saccade demo --out build/demo --force

docs: $(STAMP) $(DOCS_TOOLS)/.installed ## build the documentation site in build/docs/site and check its links
	$(BIN)/python docs_site/reference.py
	$(BIN)/python docs_site/notebooks.py
	NO_MKDOCS_2_WARNING=1 $(DOCS_TOOLS)/bin/mkdocs build --strict --clean
	$(BIN)/python docs_site/check_built.py

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
test: $(STAMP) ## run all tests except the journeys: up to ten minutes on two cores
	$(PYTEST) -m "not journey" $(PYTEST_ARGS)

test-journeys: $(STAMP) ## run whole journeys of users, which `make test` leaves out
	$(PYTEST) -m journey $(PYTEST_ARGS)

test-fast: $(STAMP) ## run the tests of `make test` that do not serve, train, export or compile
	$(PYTEST) -q -m "not slow and not journey" $(PYTEST_ARGS)

check: $(STAMP) ## run ruff, ruff format, mypy on the built wheel, print the measures of size and old figures, and look up advisories
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python prose/check.py
	$(BIN)/python tests/measures.py
	$(BIN)/python benchmarks/fresh.py
	rm -rf build/typecheck build/lib build/bdist.*
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w build/typecheck .
	$(BIN)/python -m zipfile -e build/typecheck/saccade_serving-*.whl build/typecheck/site
	cd build/typecheck && MYPYPATH=site ../../$(BIN)/python -m mypy \
		--config-file ../../pyproject.toml -p saccade -m saccade_serving
	$(MAKE) --no-print-directory check-supply

CHAOS ?= all
check-chaos: $(STAMP) ## inject faults into a running service, then soak it: over half an hour
	cd tests && $(abspath $(BIN))/python -m chaos $(CHAOS)

check-scale: $(VENV)/.saccade-scale-installed ## test clusters, object stores, proxies and Prometheus, and their faults
	$(BIN)/python -m pytest -q tests/scale/check_*.py

$(VENV)/.saccade-scale-installed: $(STAMP)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[bulk,scale]'
	@touch $@

bench: $(STAMP) ## measure for docs/benchmarks.md: fold, served against in-process, mixed load
	$(BIN)/python benchmarks/fold.py nac
	$(BIN)/python benchmarks/served.py
	$(BIN)/python benchmarks/mixed_load.py

plugins: $(STAMP) ## build the kernels for ONNX Runtime and torch in plugins/native/lib
	$(BIN)/python -m saccade.plugins.native.library --into plugins/native/lib

plugins-tensorrt: ## build the TensorRT plugins (needs nvcc and TENSORRT_INCLUDE_DIR=DIR)
	$(MAKE) -f plugins/native/tensorrt.mk TENSORRT_INCLUDE_DIR="$(TENSORRT_INCLUDE_DIR)"

check-deploy: $(STAMP) $(DEPLOY_TOOLS)/.installed ## run checkov on the manifests that kubectl and helm render from deploy
	CHECKOV="$(abspath $(DEPLOY_TOOLS))/bin/checkov" \
		$(BIN)/python -m pytest -q tests/serving/deployment/check_deploy.py

check-native: $(STAMP) ## fuzz the kernels under AddressSanitizer and UBSan
	$(BIN)/python -m pytest -q tests/plugins/native/check_fuzz.py

SANITIZER_TOOLS ?= memcheck racecheck initcheck synccheck
HARNESS := tests/plugins/native/harness_cases.py build/tensorrt/tensorrt_harness \
	plugins/native/lib/libsaccade_tensorrt.so
check-gpu: $(STAMP) plugins-tensorrt ## check the CUDA kernels on this machine's GPU, also under compute-sanitizer
	$(MAKE) -f plugins/native/tensorrt.mk cuda
	$(BIN)/python benchmarks/ops_gpu.py --check
	$(BIN)/python $(HARNESS)
	for tool in $(SANITIZER_TOOLS); do \
		compute-sanitizer --tool $$tool --error-exitcode 9 $(BIN)/python $(HARNESS) || exit 1; done

check-first-hour: $(STAMP) ## type README and quickstarts into a fresh clone with an empty home: an hour or more
	$(BIN)/python tests/first_hour.py --out benchmarks/results/first_hour.json

check-fuzz: $(STAMP) ## fuzz every file reader with 100,000 changed files: each must be read or refused
	$(BIN)/python tests/fuzz.py

check-real-size: $(STAMP) ## measure models of real sizes from their folder to the server: hours
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt transformers
	$(BIN)/python benchmarks/real_size.py

check-killed: $(STAMP) ## kill commands with three signals at 50 seeded moments, and fill 20 disks
	$(BIN)/python tests/killed/check.py --moments 50 --full 20 --out benchmarks/results/killed.json

check-mutations: $(STAMP) ## break lines of the core one by one and check that the tests notice
	$(BIN)/python tests/mutations.py --jobs 2 --out benchmarks/results/mutations.json

check-notebooks: $(STAMP) ## run the notebooks of docs (export, serve, measure): some minutes
	$(BIN)/python -m pytest -q tests/notebooks/check_notebooks.py

# If a service cannot be reached, this is reported but is not a failure.
check-supply: $(STAMP) ## look up known advisories of the pinned packages at PyPI and OSV
	-@$(MAKE) --no-print-directory -s $(TOOLS)/.installed
	$(BIN)/python supply_chain/advisories.py --program $(TOOLS)/bin/pip-audit

check-wheel: $(STAMP) ## build the wheel with its kernels twice and compare the bytes
	$(BIN)/python -m pytest -q tests/check_wheel.py

wheel: plugins $(TOOLS)/.installed ## build a wheel with the kernels, and its bill of materials, in dist
	wheel="$$($(BIN)/python supply_chain/wheel.py)" && echo "$$wheel" \
		&& $(BIN)/python supply_chain/sbom.py "$$wheel" --program $(TOOLS)/bin/cyclonedx-py

$(TOOLS)/.installed: supply_chain/tools.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install -q --no-compile -r supply_chain/tools.txt
	@touch $@

$(DEPLOY_TOOLS)/.installed: supply_chain/deploy_tools.txt
	$(PYTHON) -m venv $(DEPLOY_TOOLS)
	$(DEPLOY_TOOLS)/bin/python -m pip install -q --no-compile -r supply_chain/deploy_tools.txt
	@touch $@

$(DOCS_TOOLS)/.installed: docs_site/requirements.txt
	$(PYTHON) -m venv $(DOCS_TOOLS)
	$(DOCS_TOOLS)/bin/python -m pip install -q --no-compile -r docs_site/requirements.txt
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $(STAMP)
