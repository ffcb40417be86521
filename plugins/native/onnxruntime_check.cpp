// SPDX-License-Identifier: Apache-2.0
// Compares onnxruntime_api.h with the real header, while it compiles and only then:
//   c++ -std=c++17 -fsyntax-only -I<folder of onnxruntime_c_api.h> onnxruntime_check.cpp
#include <onnxruntime_c_api.h>

#include "onnxruntime_api.h"

namespace {

using namespace saccade;

// The sizes of a function's result and arguments, in order, as one number.
template <class Result, class... Arguments>
constexpr uint64_t form(Result (*)(Arguments...)) {
    uint64_t all = 1;
    const size_t sizes[] = {sizeof(Result), sizeof(Arguments)...};
    for (size_t each : sizes) all = all * 17 + each;
    return all;
}

template <class... Arguments>
constexpr uint64_t form(void (*)(Arguments...)) {
    uint64_t all = 2;
    const size_t sizes[] = {sizeof(Arguments)...};
    for (size_t each : sizes) all = all * 17 + each;
    return all;
}

#define CHECK_FUNCTION(place, result, name, arguments)                                             \
    static_assert(offsetof(OrtApi, name) == place * sizeof(void *), #name " is elsewhere");        \
    static_assert(form(decltype(OrtApi::name)(nullptr)) == form(ort::name##_type(nullptr)),        \
                  #name " has other arguments");
SACCADE_ORT_FUNCTIONS(CHECK_FUNCTION)

#define CHECK_MEMBER(name)                                                                         \
    static_assert(offsetof(OrtCustomOp, name) == offsetof(ort::CustomOp, name), #name);            \
    static_assert(form(decltype(OrtCustomOp::name)(nullptr)) ==                                    \
                      form(decltype(ort::CustomOp::name)(nullptr)),                                \
                  #name " has other arguments");
CHECK_MEMBER(CreateKernel)
CHECK_MEMBER(GetName)
CHECK_MEMBER(GetExecutionProviderType)
CHECK_MEMBER(GetInputType)
CHECK_MEMBER(GetInputTypeCount)
CHECK_MEMBER(GetOutputType)
CHECK_MEMBER(GetOutputTypeCount)
CHECK_MEMBER(KernelCompute)
CHECK_MEMBER(KernelDestroy)
CHECK_MEMBER(GetInputCharacteristic)
CHECK_MEMBER(GetOutputCharacteristic)
CHECK_MEMBER(GetInputMemoryType)
CHECK_MEMBER(GetVariadicInputMinArity)
CHECK_MEMBER(GetVariadicInputHomogeneity)
CHECK_MEMBER(GetVariadicOutputMinArity)
CHECK_MEMBER(GetVariadicOutputHomogeneity)
CHECK_MEMBER(CreateKernelV2)
CHECK_MEMBER(KernelComputeV2)
CHECK_MEMBER(InferOutputShapeFn)
CHECK_MEMBER(GetStartVersion)
CHECK_MEMBER(GetEndVersion)

static_assert(ORT_API_VERSION >= ort::kApiVersion, "the header is older than what is asked for");
static_assert(offsetof(OrtApiBase, GetApi) == offsetof(ort::ApiBase, GetApi), "GetApi");
static_assert(offsetof(OrtApiBase, GetVersionString) == offsetof(ort::ApiBase, GetVersionString),
              "GetVersionString");
static_assert(int(ORT_FAIL) == ort::kFail, "ORT_FAIL");
static_assert(int(ORT_INVALID_ARGUMENT) == ort::kInvalidArgument, "ORT_INVALID_ARGUMENT");
static_assert(int(ORT_RUNTIME_EXCEPTION) == ort::kRuntimeException, "ORT_RUNTIME_EXCEPTION");
static_assert(int(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) == ort::kFloat32, "float32");
static_assert(int(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64) == ort::kInt64, "int64");
static_assert(int(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16) == ort::kFloat16, "float16");
static_assert(int(ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE) == ort::kFloat64, "float64");
static_assert(int(INPUT_OUTPUT_REQUIRED) == ort::kRequired, "required");
static_assert(int(OrtMemTypeDefault) == ort::kDefaultMemory, "memory");

}  // namespace
