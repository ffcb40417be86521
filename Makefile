# SPDX-License-Identifier: Apache-2.0
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
EXTRAS := export,cpu,serve,bench,rtx,dev
STAMP := $(VENV)/.saccade-installed

.PHONY: help demo test check bench plugins plugins-tensorrt check-native check-fuzz wheel

help: ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

demo: $(STAMP) ## train, export, verify, serve and benchmark; ends with a table and a report
	$(BIN)/saccade demo --out build/demo --force

test: $(STAMP) ## the whole test suite
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: $(STAMP) ## ruff, ruff format, mypy on the built wheel
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typecheck build/lib build/bdist.*
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w build/typecheck .
	$(BIN)/python -m zipfile -e build/typecheck/saccade-*.whl build/typecheck/site
	cd build/typecheck && MYPYPATH=site ../../$(BIN)/python -m mypy \
		--config-file ../../pyproject.toml -p saccade

bench: $(STAMP) ## the figures of the README: fold, served against in-process, mixed load
	$(BIN)/python benchmarks/fold.py nac
	$(BIN)/python benchmarks/served.py
	$(BIN)/python benchmarks/mixed_load.py

plugins: $(STAMP) ## the kernels for ONNX Runtime and torch, into plugins/native/lib
	$(BIN)/python -m saccade.plugins.native.library --into plugins/native/lib

plugins-tensorrt: ## the TensorRT plugins (nvcc): make plugins-tensorrt TENSORRT_INCLUDE_DIR=...
	$(MAKE) -f plugins/native/tensorrt.mk TENSORRT_INCLUDE_DIR="$(TENSORRT_INCLUDE_DIR)"

check-native: $(STAMP) ## fuzz the kernels under AddressSanitizer and UBSan
	$(BIN)/python -m pytest -q tests/native/check_fuzz.py

check-fuzz: $(STAMP) ## change sound files of every reader 100,000 times: read or refused
	$(BIN)/python benchmarks/fuzz_readers.py

wheel: plugins ## a wheel for this platform with the kernels built in, into dist
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist \
		--config-settings=--build-option=--plat-name=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_platform().replace('-', '_'))") .

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $(STAMP)
