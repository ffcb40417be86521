// SPDX-License-Identifier: Apache-2.0
// libsaccade_onnxruntime's entry point: registers every op of domain `saccade`, once a type.
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "onnxruntime_ops.hpp"

namespace saccade {
namespace {

constexpr ort::ElementType kTypes[] = {ort::kFloat32, ort::kFloat16, ort::kFloat64};
constexpr size_t kTypeCount = sizeof kTypes / sizeof kTypes[0];

const RegisteredOp &of(const ort::CustomOp *op) {
    return *reinterpret_cast<const RegisteredOp *>(op);
}

// Whether every axis is a number or has a name; an unnamed unknown one cannot be handed on, since
// the runtime would take two of them for equal.
bool is_known(const ort::Api *api, const ort::ShapeInfo *info, int64_t *shape,
              const char **names, size_t rank) {
    ort::Status *wrong = ort::GetDimensions(api)(info, shape, rank);
    if (wrong == nullptr) wrong = ort::GetSymbolicDimensions(api)(info, names, rank);
    if (wrong != nullptr) {
        ort::ReleaseStatus(api)(wrong);
        return false;
    }
    for (size_t i = 0; i < rank; ++i)
        if (shape[i] < 0 && names[i][0] == '\0') return false;
    return true;
}

ort::Status *set_error_shape(const ort::Api *api, ort::ShapeContext *context,
                             const int64_t *shape, const char **names, size_t rank) {
    ort::ShapeInfo *error = nullptr;
    if (ort::Status *wrong = ort::CreateTensorTypeAndShapeInfo(api)(&error)) return wrong;
    ort::Status *wrong = ort::SetDimensions(api)(error, shape, rank);
    if (wrong == nullptr) wrong = ort::SetSymbolicDimensions(api)(error, names, rank);
    if (wrong == nullptr)
        wrong = ort::ShapeInferContext_SetOutputTypeShape(api)(context, 1, error);
    ort::ReleaseTensorTypeAndShapeInfo(api)(error);
    return wrong;
}

// Shapes that do not fit are left for the run to refuse: the runtime ignores this status.
ort::Status *infer_shapes(const ort::CustomOp *custom, ort::ShapeContext *context) {
    const ort::Api *api = of(custom).api;
    const Op &op = *of(custom).op;
    ort::ShapeInfo *first = nullptr;  // the runtime's own
    int64_t shape[kMostAxes];
    const char *names[kMostAxes];
    size_t rank = 0;
    ort::Status *wrong = ort::ShapeInferContext_GetInputTypeShape(api)(context, 0, &first);
    if (wrong == nullptr) wrong = ort::GetDimensionsCount(api)(first, &rank);
    if (wrong == nullptr && rank >= op.axes && rank <= kMostAxes &&
        is_known(api, first, shape, names, rank)) {
        wrong = ort::ShapeInferContext_SetOutputTypeShape(api)(context, 0, first);
        if (wrong == nullptr && op.has_error())
            wrong = set_error_shape(api, context, shape, names, rank - op.axes);
    }
    if (wrong != nullptr) ort::ReleaseStatus(api)(wrong);
    return nullptr;
}

ort::CustomOp interface() {
    ort::CustomOp op{};
    op.version = ort::kApiVersion;
    op.GetName = [](const ort::CustomOp *self) { return of(self).op->name; };
    op.GetExecutionProviderType = [](const ort::CustomOp *) -> const char * { return nullptr; };
    op.GetInputType = [](const ort::CustomOp *self, size_t index) {
        return index == 1 && of(self).op->has_sizes() ? ort::kInt64 : of(self).type;
    };
    op.GetInputTypeCount = [](const ort::CustomOp *self) { return of(self).op->inputs(); };
    op.GetOutputType = [](const ort::CustomOp *self, size_t index) {
        return index == 0 ? of(self).type : ort::kFloat32;
    };
    op.GetOutputTypeCount = [](const ort::CustomOp *self) { return of(self).op->outputs(); };
    op.GetInputCharacteristic = [](const ort::CustomOp *, size_t) { return ort::kRequired; };
    op.GetOutputCharacteristic = op.GetInputCharacteristic;
    op.GetInputMemoryType = [](const ort::CustomOp *, size_t) { return ort::kDefaultMemory; };
    const auto none = [](const ort::CustomOp *) { return 0; };
    op.GetVariadicInputMinArity = op.GetVariadicInputHomogeneity = none;
    op.GetVariadicOutputMinArity = op.GetVariadicOutputHomogeneity = none;
    op.CreateKernelV2 = create_kernel;
    op.KernelComputeV2 = run_kernel;
    op.KernelDestroy = destroy_kernel;
    op.InferOutputShapeFn = infer_shapes;
    op.GetStartVersion = [](const ort::CustomOp *) { return 1; };
    op.GetEndVersion = [](const ort::CustomOp *) { return 1; };
    return op;
}

// What one runtime was given. It must outlive every session, so it is never taken back, and the
// library is linked so that it stays loaded.
struct Registration {
    const ort::Api *api;
    ort::Domain *domain;
    RegisteredOp ops[kOpCount * kTypeCount];
};

// A process holds one runtime, or two where a program and a Python package bring their own.
Registration registrations[4];
std::atomic_flag busy = ATOMIC_FLAG_INIT;

struct Turn {
    Turn() {
        while (busy.test_and_set(std::memory_order_acquire)) {
        }
    }
    ~Turn() { busy.clear(std::memory_order_release); }
};

// The second number of a version: 31 of "1.31.1".
int minor_version(const char *version) {
    char *rest = nullptr;
    const long major = std::strtol(version, &rest, 10);
    if (major != 1) return major > 1 ? 1000 : 0;
    return *rest == '.' ? int(std::strtol(rest + 1, nullptr, 10)) : 0;
}

ort::Status *fill(Registration &mine, const ort::Api *api, bool shows_shapes) {
    ort::Domain *domain = nullptr;
    if (ort::Status *wrong = ort::CreateCustomOpDomain(api)("saccade", &domain)) return wrong;
    RegisteredOp *next = mine.ops;
    for (const Op &op : kOps) {
        for (const ort::ElementType type : kTypes) {
            *next = {interface(), api, shows_shapes, &op, type};
            if (ort::Status *wrong = ort::CustomOpDomain_Add(api)(domain, &next->interface))
                return wrong;
            ++next;
        }
    }
    mine.domain = domain;
    mine.api = api;
    return nullptr;
}

ort::Status *register_ops(ort::SessionOptions *options, const ort::Api *api,
                          const char *version) {
    const bool shows_shapes = minor_version(version) >= ort::kShapeReferenceSince;
    const Turn turn;
    for (Registration &each : registrations) {
        if (each.api == nullptr)
            if (ort::Status *wrong = fill(each, api, shows_shapes)) return wrong;
        if (each.api == api) return ort::AddCustomOpDomain(api)(options, each.domain);
    }
    return ort::CreateStatus(api)(
        ort::kFail, "libsaccade_onnxruntime: this process holds more than 4 runtimes.");
}

}  // namespace
}  // namespace saccade

extern "C" SACCADE_EXPORT saccade::ort::Status *RegisterCustomOps(
    saccade::ort::SessionOptions *options, const saccade::ort::ApiBase *base) {
    using namespace saccade;
    const char *version = base->GetVersionString();
    if (const ort::Api *api = base->GetApi(ort::kApiVersion))
        return register_ops(options, api, version);
    char words[160];
    std::snprintf(words, sizeof words,
                  "libsaccade_onnxruntime: this ONNX Runtime is %s, expected %s or newer.",
                  version, ort::kOldestRuntime);
    const ort::Api *oldest = base->GetApi(1);
    return oldest == nullptr ? nullptr : ort::CreateStatus(oldest)(ort::kFail, words);
}
