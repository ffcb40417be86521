# SPDX-License-Identifier: Apache-2.0
# Build libsaccade_tensorrt.so from the CUDA kernels and TensorRT's headers:
#   make -f plugins/native/tensorrt.mk TENSORRT_INCLUDE_DIR=/path/to/TensorRT/include
# Build only the kernels, without TensorRT, for benchmarks/ops_gpu.py:
#   make -f plugins/native/tensorrt.mk cuda
# CUDA_ARCHITECTURES="89" builds for only one architecture, seven times faster.
.DELETE_ON_ERROR:
.PHONY: tensorrt cuda harness

HERE := $(dir $(lastword $(MAKEFILE_LIST)))
BUILD ?= $(HERE)../../../../build/tensorrt
LIBRARY := $(HERE)lib/libsaccade_tensorrt.so
NVCC ?= nvcc
PYTHON ?= python3
CUDA_ARCHITECTURES ?= 75 80 86 89 90 100 120
NEWEST := $(lastword $(CUDA_ARCHITECTURES))
GENCODE := $(foreach each,$(CUDA_ARCHITECTURES),-gencode arch=compute_$(each),code=sm_$(each)) \
	-gencode arch=compute_$(NEWEST),code=compute_$(NEWEST)
NVCCFLAGS := -std=c++17 -O3 -Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra
# The CUDA runtime is linked statically, and its symbols are not exported.
LINK := -shared -cudart static -Xlinker --exclude-libs=ALL -Xlinker --no-undefined
KERNELS := $(wildcard $(HERE)cuda_* $(HERE)contract*.hpp) $(HERE)saccade_ops.h \
	$(wildcard $(HERE)../*/*.cuh)
# Only in a checkout.
HARNESS := $(wildcard $(HERE)../../../../tests/plugins/native/tensorrt_harness.cpp \
	$(HERE)../../../../tests/plugins/native/harness_case.hpp)
NVCC_PATH := $(shell command -v $(NVCC) 2>/dev/null)

ifeq ($(NVCC_PATH),)
$(error nvcc is not on PATH. Install the CUDA toolkit (12.8 or newer supports every architecture \
	in the list) and pass NVCC=/path/to/bin/nvcc)
endif
ifneq ($(MAKECMDGOALS),cuda)
ifeq ($(wildcard $(TENSORRT_INCLUDE_DIR)/NvInferRuntime.h),)
$(error NvInferRuntime.h is not in TENSORRT_INCLUDE_DIR='$(TENSORRT_INCLUDE_DIR)'. Pass the \
	folder of TensorRT's headers (10.7 or newer): make plugins-tensorrt TENSORRT_INCLUDE_DIR=DIR)
endif
endif

tensorrt: $(LIBRARY) $(if $(HARNESS),harness)
cuda: $(BUILD)/libsaccade_cuda.so
harness: $(BUILD)/tensorrt_harness

# The compiler's report of registers and spills is kept next to the object, for the test of spills.
$(BUILD)/cuda_ops.o: $(HERE)cuda_ops.cu $(KERNELS)
	@mkdir -p $(BUILD)
	$(NVCC) $(NVCCFLAGS) -Xptxas -v --threads 0 $(GENCODE) -c $< -o $@ 2>$(BUILD)/ptxas.log || \
		{ cat $(BUILD)/ptxas.log >&2; exit 1; }
	@$(PYTHON) $(HERE)spills.py $(BUILD)/ptxas.log

$(BUILD)/tensorrt_library.o: $(HERE)tensorrt_library.cpp \
		$(wildcard $(HERE)tensorrt_*.hpp $(HERE)contract*.hpp) \
		$(HERE)cuda_ops.h $(HERE)saccade_ops.h
	@mkdir -p $(BUILD)
	$(NVCC) $(NVCCFLAGS) -isystem $(TENSORRT_INCLUDE_DIR) -c $< -o $@

$(LIBRARY): $(BUILD)/cuda_ops.o $(BUILD)/tensorrt_library.o
	@mkdir -p $(dir $@)
	$(NVCC) $(LINK) $^ -o $@.part
	@mv $@.part $@
	@echo $@

$(BUILD)/libsaccade_cuda.so: $(BUILD)/cuda_ops.o
	$(NVCC) $(LINK) $^ -o $@
	@echo $@

$(BUILD)/tensorrt_harness: $(HARNESS) | $(LIBRARY)
	$(NVCC) $(NVCCFLAGS) -isystem $(TENSORRT_INCLUDE_DIR) -cudart static $(filter %.cpp,$^) -o $@ -ldl
	@echo $@
