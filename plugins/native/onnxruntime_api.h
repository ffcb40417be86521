// SPDX-License-Identifier: Apache-2.0
// The part of ONNX Runtime's C interface that a library of custom ops needs, as of version 1.17:
// its package brings no headers. The table of functions is only ever appended to, so a function is
// its place in the table; onnxruntime_check.cpp compares all of this with the real header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace saccade {
namespace ort {

// The interface that is asked for: the oldest that knows shape inference and parallel loops.
constexpr uint32_t kApiVersion = 17;
constexpr const char *kOldestRuntime = "1.17";
// GetTensorElementTypeAndShapeDataReference may be called from 1.24 on, everything else always.
constexpr int kShapeReferenceSince = 24;

// The runtime's own objects, never looked into.
struct Status;
struct KernelInfo;
struct KernelContext;
struct ShapeContext;
struct ShapeInfo;
struct Value;
struct Domain;
struct SessionOptions;

enum ErrorCode { kFail = 1, kInvalidArgument = 2, kRuntimeException = 6 };
enum ElementType { kFloat32 = 1, kInt64 = 7, kFloat16 = 10, kFloat64 = 11 };
enum Characteristic { kRequired = 0 };
enum MemoryType { kDefaultMemory = 0 };

constexpr int kTableSize = 415;

struct Api {
    void (*functions[kTableSize])();
};

struct ApiBase {
    const Api *(*GetApi)(uint32_t version);
    const char *(*GetVersionString)();
};

// What the runtime calls to learn about an op and to run it.
struct CustomOp {
    uint32_t version;
    void *(*CreateKernel)(const CustomOp *, const Api *, const KernelInfo *);
    const char *(*GetName)(const CustomOp *);
    const char *(*GetExecutionProviderType)(const CustomOp *);
    ElementType (*GetInputType)(const CustomOp *, size_t index);
    size_t (*GetInputTypeCount)(const CustomOp *);
    ElementType (*GetOutputType)(const CustomOp *, size_t index);
    size_t (*GetOutputTypeCount)(const CustomOp *);
    void (*KernelCompute)(void *kernel, KernelContext *);
    void (*KernelDestroy)(void *kernel);
    Characteristic (*GetInputCharacteristic)(const CustomOp *, size_t index);
    Characteristic (*GetOutputCharacteristic)(const CustomOp *, size_t index);
    MemoryType (*GetInputMemoryType)(const CustomOp *, size_t index);
    int (*GetVariadicInputMinArity)(const CustomOp *);
    int (*GetVariadicInputHomogeneity)(const CustomOp *);
    int (*GetVariadicOutputMinArity)(const CustomOp *);
    int (*GetVariadicOutputHomogeneity)(const CustomOp *);
    Status *(*CreateKernelV2)(const CustomOp *, const Api *, const KernelInfo *, void **kernel);
    Status *(*KernelComputeV2)(void *kernel, KernelContext *);
    Status *(*InferOutputShapeFn)(const CustomOp *, ShapeContext *);
    int (*GetStartVersion)(const CustomOp *);
    int (*GetEndVersion)(const CustomOp *);
};

// place in the table, result, name, arguments; a Status that is not null says what went wrong and
// is the caller's to release.
#define SACCADE_ORT_FUNCTIONS(X)                                                                   \
    X(0, Status *, CreateStatus, (int code, const char *message))                                  \
    X(26, Status *, CreateCustomOpDomain, (const char *name, Domain **))                           \
    X(27, Status *, CustomOpDomain_Add, (Domain *, const CustomOp *))                              \
    X(28, Status *, AddCustomOpDomain, (SessionOptions *, Domain *))                               \
    X(51, Status *, GetTensorMutableData, (Value *, void **))                                      \
    X(59, Status *, SetDimensions, (ShapeInfo *, const int64_t *, size_t count))                   \
    X(61, Status *, GetDimensionsCount, (const ShapeInfo *, size_t *count))                        \
    X(62, Status *, GetDimensions, (const ShapeInfo *, int64_t *, size_t count))                   \
    X(63, Status *, GetSymbolicDimensions, (const ShapeInfo *, const char **, size_t count))       \
    X(57, Status *, CreateTensorTypeAndShapeInfo, (ShapeInfo **))                                  \
    X(65, Status *, GetTensorTypeAndShape, (const Value *, ShapeInfo **))                          \
    X(85, Status *, KernelInfoGetAttribute_float, (const KernelInfo *, const char *, float *))     \
    X(86, Status *, KernelInfoGetAttribute_int64, (const KernelInfo *, const char *, int64_t *))   \
    X(87, Status *, KernelInfoGetAttribute_string,                                                 \
      (const KernelInfo *, const char *, char *, size_t *))                                        \
    X(90, Status *, KernelContext_GetInput, (const KernelContext *, size_t, const Value **))       \
    X(91, Status *, KernelContext_GetOutput,                                                       \
      (KernelContext *, size_t, const int64_t *, size_t count, Value **))                          \
    X(93, void, ReleaseStatus, (Status *))                                                         \
    X(99, void, ReleaseTensorTypeAndShapeInfo, (ShapeInfo *))                                      \
    X(162, Status *, KernelInfoGetAttributeArray_float,                                            \
      (const KernelInfo *, const char *, float *, size_t *))                                       \
    X(163, Status *, KernelInfoGetAttributeArray_int64,                                            \
      (const KernelInfo *, const char *, int64_t *, size_t *))                                     \
    X(244, Status *, KernelInfo_GetNodeName, (const KernelInfo *, char *, size_t *))               \
    X(268, Status *, ShapeInferContext_GetInputTypeShape,                                          \
      (const ShapeContext *, size_t, ShapeInfo **))                                                \
    X(270, Status *, ShapeInferContext_SetOutputTypeShape,                                         \
      (const ShapeContext *, size_t, const ShapeInfo *))                                           \
    X(271, Status *, SetSymbolicDimensions, (ShapeInfo *, const char **, size_t count))            \
    X(274, Status *, KernelContext_ParallelFor,                                                    \
      (const KernelContext *, void (*)(void *, size_t), size_t total, size_t batches, void *))     \
    X(414, Status *, GetTensorElementTypeAndShapeDataReference,                                    \
      (const Value *, ElementType *, const int64_t **, size_t *count))

// CreateStatus(api) is the function itself: CreateStatus(api)(kFail, "...").
#define SACCADE_ORT_DECLARE(place, result, name, arguments)                                        \
    typedef result(*name##_type) arguments;                                                        \
    inline name##_type name(const Api *api) {                                                      \
        static_assert(place < kTableSize, "the table ends before it");                             \
        return reinterpret_cast<name##_type>(api->functions[place]);                               \
    }
SACCADE_ORT_FUNCTIONS(SACCADE_ORT_DECLARE)
#undef SACCADE_ORT_DECLARE

}  // namespace ort
}  // namespace saccade
