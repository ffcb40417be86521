// SPDX-License-Identifier: Apache-2.0
// A node of a session: checks its attributes when the session is made and its tensors at every
// run, then calls the C interface with the session's own threads. What is wrong becomes a status
// that names the op, the node, what was found and what is expected; nothing is ever thrown.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "onnxruntime_ops.hpp"

namespace saccade {
namespace {

struct Kernel {
    const ort::Api *api;
    bool shows_shapes;
    const Op *op;
    int dtype;
    Number value[Op::kMostAttributes];
    char node[200];  // a longer name is cut
};

// A message that is cut where it would be too long.
struct Text {
    char words[1024] = "";
    size_t used = 0;

    __attribute__((format(printf, 2, 3))) Text &add(const char *format, ...) {
        va_list arguments;
        va_start(arguments, format);
        const int wanted = std::vsnprintf(words + used, sizeof words - used, format, arguments);
        va_end(arguments);
        if (wanted > 0) used += size_t(wanted);
        if (used >= sizeof words) used = sizeof words - 1;
        return *this;
    }
    Text &add_shape(const Tensor &tensor) {
        add("[");
        for (size_t i = 0; i < tensor.rank; ++i)
            add(i == 0 ? "%lld" : ", %lld", static_cast<long long>(tensor.shape[i]));
        return add("]");
    }
};

Text about(const Kernel &kernel) {
    Text text;
    text.add("saccade::%s (node '%s'): ", kernel.op->name, kernel.node);
    return text;
}

ort::Status *failed(const Kernel &kernel, const Text &text,
                    ort::ErrorCode code = ort::kInvalidArgument) {
    return ort::CreateStatus(kernel.api)(code, text.words);
}

// Whether a call went well; what it says otherwise is of no use.
bool went_well(const ort::Api *api, ort::Status *status) {
    if (status != nullptr) ort::ReleaseStatus(api)(status);
    return status == nullptr;
}

enum class Kind { kAbsent, kReal, kWhole, kOther };

// The interface cannot list a node's attributes: each name is tried with every type.
Kind read_attribute(const ort::Api *api, const ort::KernelInfo *info, const char *name,
                    Number *number) {
    float real = 0;
    if (went_well(api, ort::KernelInfoGetAttribute_float(api)(info, name, &real))) {
        number->real = real;
        return Kind::kReal;
    }
    if (went_well(api, ort::KernelInfoGetAttribute_int64(api)(info, name, &number->whole))) {
        number->real = double(number->whole);
        return Kind::kWhole;
    }
    size_t size = 0;
    const bool other =
        went_well(api, ort::KernelInfoGetAttribute_string(api)(info, name, nullptr, &size)) ||
        went_well(api, ort::KernelInfoGetAttributeArray_float(api)(info, name, nullptr, &size)) ||
        went_well(api, ort::KernelInfoGetAttributeArray_int64(api)(info, name, nullptr, &size));
    return other ? Kind::kOther : Kind::kAbsent;
}

ort::Status *read_known(Kernel &kernel, const ort::KernelInfo *info) {
    for (size_t i = 0; i < kernel.op->attribute_count; ++i) {
        const Attribute &expected = kernel.op->attribute[i];
        Number &number = kernel.value[i];
        const Kind kind = read_attribute(kernel.api, info, expected.name, &number);
        if (kind == Kind::kAbsent) {
            // The default goes through float32 as a written attribute does.
            number = {float(expected.standard), int64_t(expected.standard)};
        } else if (kind == Kind::kOther || (kind == Kind::kWhole) != expected.is_whole) {
            const char *found = kind == Kind::kReal    ? "a float attribute"
                                : kind == Kind::kWhole ? "an integer attribute"
                                                       : "neither a float nor an integer";
            return failed(kernel, about(kernel).add("%s is %s, expected %s attribute, %s.",
                                                    expected.name, found,
                                                    expected.is_whole ? "an integer" : "a float",
                                                    expected.allowed));
        } else if (!expected.holds(number.real)) {
            Text text = about(kernel).add("%s is ", expected.name);
            if (expected.is_whole)
                text.add("%lld", static_cast<long long>(number.whole));
            else
                text.add("%g", number.real);
            return failed(kernel, text.add(", expected %s.", expected.allowed));
        }
    }
    return nullptr;
}

ort::Status *refuse_if_given(const Kernel &kernel, const ort::KernelInfo *info, const char *name) {
    for (size_t i = 0; i < kernel.op->attribute_count; ++i)
        if (std::strcmp(kernel.op->attribute[i].name, name) == 0) return nullptr;
    Number number;
    if (read_attribute(kernel.api, info, name, &number) == Kind::kAbsent) return nullptr;
    Text text = about(kernel).add("unknown attribute '%s'. It has: ", name);
    for (size_t i = 0; i < kernel.op->attribute_count; ++i)
        text.add(i == 0 ? "%s" : ", %s", kernel.op->attribute[i].name);
    return failed(kernel, text.add(kernel.op->attribute_count == 0 ? "none." : "."));
}

// Attributes of the other ops, and those that another library's op of this name has: any other
// unknown one cannot be seen.
ort::Status *refuse_foreign(const Kernel &kernel, const ort::KernelInfo *info) {
    for (const Op &other : kOps)
        for (size_t i = 0; i < other.attribute_count; ++i)
            if (ort::Status *wrong = refuse_if_given(kernel, info, other.attribute[i].name))
                return wrong;
    const char *const elsewhere[] = {"axis", "axes", "lambda", "weight", "tol", "max_iter", "eps"};
    for (const char *name : elsewhere)
        if (ort::Status *wrong = refuse_if_given(kernel, info, name)) return wrong;
    return nullptr;
}

void read_node_name(Kernel &kernel, const ort::KernelInfo *info) {
    size_t size = 0;
    if (!went_well(kernel.api, ort::KernelInfo_GetNodeName(kernel.api)(info, nullptr, &size)))
        return;
    char *name = static_cast<char *>(std::malloc(size + 1));
    if (name == nullptr) return;
    if (went_well(kernel.api, ort::KernelInfo_GetNodeName(kernel.api)(info, name, &size)))
        std::snprintf(kernel.node, sizeof kernel.node, "%s", name);
    std::free(name);
}

ort::Status *read_shape(const Kernel &kernel, const ort::Value *value, size_t index,
                        Tensor *tensor) {
    const ort::Api *api = kernel.api;
    if (kernel.shows_shapes) {
        ort::ElementType type;
        return ort::GetTensorElementTypeAndShapeDataReference(api)(value, &type, &tensor->shape,
                                                                   &tensor->rank);
    }
    ort::ShapeInfo *info = nullptr;
    if (ort::Status *wrong = ort::GetTensorTypeAndShape(api)(value, &info)) return wrong;
    ort::Status *wrong = ort::GetDimensionsCount(api)(info, &tensor->rank);
    if (wrong == nullptr && tensor->rank > kMostAxes)
        wrong = failed(kernel, about(kernel).add("input %s has %zu axes, expected at most %zu.",
                                                 kernel.op->input[index], tensor->rank,
                                                 kMostAxes));
    if (wrong == nullptr) wrong = ort::GetDimensions(api)(info, tensor->copied, tensor->rank);
    ort::ReleaseTensorTypeAndShapeInfo(api)(info);
    tensor->shape = tensor->copied;
    return wrong;
}

ort::Status *read_input(const Kernel &kernel, ort::KernelContext *context, size_t index,
                        Tensor *tensor) {
    const ort::Value *value = nullptr;
    if (ort::Status *wrong = ort::KernelContext_GetInput(kernel.api)(context, index, &value))
        return wrong;
    if (value == nullptr)
        return failed(kernel, about(kernel).add("input %s is missing, expected %s.",
                                                kernel.op->input[index], kernel.op->shapes));
    if (ort::Status *wrong = read_shape(kernel, value, index, tensor)) return wrong;
    void *data = nullptr;
    ort::Status *wrong =
        ort::GetTensorMutableData(kernel.api)(const_cast<ort::Value *>(value), &data);
    tensor->data = data;
    return wrong;
}

ort::Status *get_output(const Kernel &kernel, ort::KernelContext *context, size_t index,
                        const Tensor &like, size_t axes, void **data) {
    ort::Value *value = nullptr;
    if (ort::Status *wrong = ort::KernelContext_GetOutput(kernel.api)(context, index, like.shape,
                                                                      axes, &value))
        return wrong;
    if (value == nullptr)
        return failed(kernel, about(kernel).add("output %zu has no name, expected %zu outputs.",
                                                index, kernel.op->outputs()));
    return ort::GetTensorMutableData(kernel.api)(value, data);
}

bool fits(const Op &op, const Tensor *inputs, size_t index) {
    const Tensor &first = inputs[0], &second = inputs[1];
    if (index == 0) return first.rank >= op.axes;
    if (!op.has_sizes())
        return second.rank == 1 && second.shape[0] == first.shape[first.rank - 1];
    return second.rank + 1 == first.rank && second.shape[second.rank - 1] == 2 &&
           std::memcmp(first.shape, second.shape, (first.rank - 2) * sizeof(int64_t)) == 0;
}

ort::Status *bad_shape(const Kernel &kernel, const Tensor *inputs, size_t index) {
    Text text = about(kernel);
    for (size_t i = 0; i <= index; ++i)
        text.add(i == 0 ? "input %s has shape " : ", input %s ", kernel.op->input[i])
            .add_shape(inputs[i]);
    return failed(kernel, text.add(", expected %s.", kernel.op->shapes));
}

ort::Status *bad_sizes(const Kernel &kernel, const Buffers &buffers) {
    const int64_t *size = static_cast<const int64_t *>(buffers.second);
    int64_t i = 0;
    while (i + 1 < buffers.count && size[0] >= 0 && size[0] <= buffers.m && size[1] >= 0 &&
           size[1] <= buffers.n)
        ++i, size += 2;
    return failed(kernel, about(kernel).add("sizes of grid %lld are [%lld, %lld], expected 0 to "
                                            "%lld and 0 to %lld.",
                                            static_cast<long long>(i),
                                            static_cast<long long>(size[0]),
                                            static_cast<long long>(size[1]),
                                            static_cast<long long>(buffers.m),
                                            static_cast<long long>(buffers.n)));
}

struct Loop {
    const ort::Api *api;
    ort::KernelContext *context;
};

// The session's threads; on the calling one where the runtime refuses.
void in_session(void *state, void (*task)(void *argument, size_t index), size_t count,
                void *argument) {
    const Loop &loop = *static_cast<const Loop *>(state);
    const auto parallel_for = ort::KernelContext_ParallelFor(loop.api);
    if (went_well(loop.api, parallel_for(loop.context, task, count, 0, argument))) return;
    for (size_t i = 0; i < count; ++i) task(argument, i);
}

}  // namespace

ort::Status *create_kernel(const ort::CustomOp *op, const ort::Api *api,
                           const ort::KernelInfo *info, void **created) {
    const RegisteredOp &registered = *reinterpret_cast<const RegisteredOp *>(op);
    void *memory = std::malloc(sizeof(Kernel));
    if (memory == nullptr) return ort::CreateStatus(api)(ort::kFail, "saccade: out of memory");
    Kernel *kernel = new (memory)
        Kernel{api, registered.shows_shapes, registered.op, registered.type, {}, ""};
    read_node_name(*kernel, info);
    ort::Status *wrong = read_known(*kernel, info);
    if (wrong == nullptr) wrong = refuse_foreign(*kernel, info);
    if (wrong != nullptr)
        std::free(kernel);
    else
        *created = kernel;
    return wrong;
}

ort::Status *run_kernel(void *state, ort::KernelContext *context) {
    const Kernel &kernel = *static_cast<const Kernel *>(state);
    const Op &op = *kernel.op;
    Tensor inputs[2];
    for (size_t i = 0; i < op.inputs(); ++i) {
        if (ort::Status *wrong = read_input(kernel, context, i, &inputs[i])) return wrong;
        if (!fits(op, inputs, i)) return bad_shape(kernel, inputs, i);
    }
    const Tensor &first = inputs[0];
    const size_t leading = first.rank - op.axes;
    Buffers buffers{first.data, op.inputs() == 2 ? inputs[1].data : nullptr, nullptr, nullptr, 1,
                    op.axes == 2 ? first.shape[leading] : 1, first.shape[first.rank - 1]};
    for (size_t i = 0; i < leading; ++i)
        if (__builtin_mul_overflow(buffers.count, first.shape[i], &buffers.count))
            return failed(kernel, about(kernel).add("input %s cannot be counted.", op.input[0]));
    void *error = nullptr;
    ort::Status *wrong = get_output(kernel, context, 0, first, first.rank, &buffers.answer);
    if (wrong == nullptr && op.has_error())
        wrong = get_output(kernel, context, 1, first, leading, &error);
    if (wrong != nullptr) return wrong;
    buffers.error = static_cast<float *>(error);

    Loop loop{kernel.api, context};
    const saccade_pool pool{&loop, in_session};
    const int code = op.run(kernel.dtype, buffers, kernel.value, &pool);
    if (code == SACCADE_OK) return nullptr;
    if (code == SACCADE_BAD_SIZES) return bad_sizes(kernel, buffers);
    return failed(kernel, about(kernel).add("%s.", saccade_status(code)), ort::kFail);
}

void destroy_kernel(void *kernel) { std::free(kernel); }

}  // namespace saccade
