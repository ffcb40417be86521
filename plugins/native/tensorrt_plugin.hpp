// SPDX-License-Identifier: Apache-2.0
// One class for the five plugins: what TensorRT asks when it builds an engine and when it runs it.
// Nothing here throws; what fails answers a code other than 0, after a message.
#pragma once

#include <new>

#include "tensorrt_ops.hpp"

namespace saccade {
namespace tensorrt {

using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IDimensionExpr;

// TensorRT's ONNX parser looks for a plugin of the node's type, version "1" and no namespace
// unless the node has attributes that say otherwise; the node's domain plays no part.
constexpr const char *kVersion = "1";
constexpr const char *kNamespace = "";

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuildV2,
                     public nvinfer1::IPluginV3OneRuntime {
  public:
    Plugin(const OpShell &op, const Values &values) noexcept : op_(op), values_(values) {}

    nvinfer1::IPluginCapability *getCapabilityInterface(
        nvinfer1::PluginCapabilityType type) noexcept override {
        switch (type) {
            case nvinfer1::PluginCapabilityType::kCORE:
                return static_cast<nvinfer1::IPluginV3OneCore *>(this);
            case nvinfer1::PluginCapabilityType::kBUILD:
                return static_cast<nvinfer1::IPluginV3OneBuildV2 *>(this);
            case nvinfer1::PluginCapabilityType::kRUNTIME:
                return static_cast<nvinfer1::IPluginV3OneRuntime *>(this);
        }
        return nullptr;
    }

    nvinfer1::IPluginV3 *clone() noexcept override {
        Plugin *copy = new (std::nothrow) Plugin(op_, values_);
        if (copy != nullptr) copy->recorder_ = recorder_;
        return copy;
    }

    const char *getPluginName() const noexcept override { return op_.name; }
    const char *getPluginVersion() const noexcept override { return kVersion; }
    const char *getPluginNamespace() const noexcept override { return kNamespace; }

    int32_t getNbOutputs() const noexcept override { return int(op_.outputs()); }

    int32_t configurePlugin(const DynamicPluginTensorDesc *in, int32_t inputs,
                            const DynamicPluginTensorDesc *, int32_t outputs) noexcept override {
        return counted(inputs, outputs) && ranks_fit(in[0].desc.dims, inputs > 1 ? &in[1].desc.dims
                                                                                : nullptr)
                   ? 0
                   : 1;
    }

    int32_t getOutputDataTypes(DataType *types, int32_t outputs, const DataType *in,
                               int32_t inputs) const noexcept override {
        if (!counted(inputs, outputs)) return 1;
        for (int i = 0; i < outputs; ++i)
            types[i] = op_.output_types[i] == 'T' ? in[0] : DataType::kFLOAT;
        return 0;
    }

    int32_t getOutputShapes(const DimsExprs *in, int32_t inputs, const DimsExprs *, int32_t,
                            DimsExprs *out, int32_t outputs,
                            nvinfer1::IExprBuilder &) noexcept override {
        if (!counted(inputs, outputs)) return 1;
        const Dims first = constant_dims(in[0]);
        const Dims second = inputs > 1 ? constant_dims(in[1]) : Dims{};
        if (!ranks_fit(first, inputs > 1 ? &second : nullptr)) return 1;
        out[0] = in[0];
        // One error a grid: the leading axes.
        if (outputs > 1) {
            out[1] = in[0];
            out[1].nbDims -= op_.item_rank();
        }
        return 0;
    }

    bool supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc *tensors,
                                   int32_t inputs, int32_t outputs) noexcept override {
        if (!counted(inputs, outputs) || position < 0 || position >= inputs + outputs) return false;
        const PluginTensorDesc &asked = tensors[position].desc;
        if (asked.format != nvinfer1::TensorFormat::kLINEAR) return false;
        const char letter =
            position < inputs ? op_.input_types[position] : op_.output_types[position - inputs];
        if (letter == 'f') return asked.type == DataType::kFLOAT;
        if (letter == 'i') return asked.type == DataType::kINT64;
        if (position > 0) return asked.type == tensors[0].desc.type;
        return asked.type == DataType::kFLOAT || asked.type == DataType::kHALF;
    }

    size_t getWorkspaceSize(const DynamicPluginTensorDesc *in, int32_t,
                            const DynamicPluginTensorDesc *, int32_t) const noexcept override {
        return op_.workspace(extent_of(in[0].max, op_.item_rank()));
    }

    int32_t onShapeChange(const PluginTensorDesc *in, int32_t inputs, const PluginTensorDesc *,
                          int32_t outputs) noexcept override {
        return counted(inputs, outputs) &&
                       ranks_fit(in[0].dims, inputs > 1 ? &in[1].dims : nullptr)
                   ? 0
                   : 1;
    }

    int32_t enqueue(const PluginTensorDesc *in, const PluginTensorDesc *, const void *const *inputs,
                    void *const *outputs, void *workspace, cudaStream_t stream) noexcept override {
        const int status = op_.enqueue(Call{in, inputs, outputs, workspace, stream}, values_);
        if (status != 0)
            report(recorder_, "saccade::%s: the kernel was not queued: CUDA error %d (%s).",
                   op_.name, status, cudaGetErrorString(cudaError_t(status)));
        return status;
    }

    nvinfer1::IPluginV3 *attachToContext(
        nvinfer1::IPluginResourceContext *context) noexcept override {
        Plugin *copy = static_cast<Plugin *>(clone());
        if (copy != nullptr && context != nullptr) copy->recorder_ = context->getErrorRecorder();
        return copy;
    }

    const nvinfer1::PluginFieldCollection *getFieldsToSerialize() noexcept override {
        return values_.serialized();
    }

  private:
    static Dims constant_dims(const DimsExprs &from) noexcept {
        Dims dims{};
        dims.nbDims = from.nbDims;
        for (int i = 0; i < from.nbDims; ++i)
            dims.d[i] = from.d[i]->isConstant() ? from.d[i]->getConstantValue() : -1;
        return dims;
    }

    bool counted(int32_t inputs, int32_t outputs) const noexcept {
        if (inputs == int(op_.inputs()) && outputs == int(op_.outputs())) return true;
        report(recorder_, "saccade::%s: %d inputs and %d outputs, expected %d and %d: %s.",
               op_.name, int(inputs), int(outputs), int(op_.inputs()), int(op_.outputs()),
               op_.shapes);
        return false;
    }

    // Whether the axes fit each other; -1 is an axis that is not known yet.
    bool ranks_fit(const Dims &first, const Dims *second) const noexcept {
        if (first.nbDims >= op_.item_rank() && (second == nullptr || second_fits(first, *second)))
            return true;
        char found[2][96] = {};
        text_of(first, found[0], sizeof found[0]);
        if (second != nullptr) text_of(*second, found[1], sizeof found[1]);
        report(recorder_, "saccade::%s: inputs have shapes %s %s, expected %s.", op_.name,
               found[0], found[1], op_.shapes);
        return false;
    }

    bool second_fits(const Dims &first, const Dims &second) const noexcept {
        const auto same = [](int64_t a, int64_t b) { return a < 0 || b < 0 || a == b; };
        if (!op_.has_sizes())
            return second.nbDims == 1 && same(second.d[0], first.d[first.nbDims - 1]);
        const int leading = first.nbDims - op_.item_rank();
        if (second.nbDims != leading + 1 || !same(second.d[leading], 2)) return false;
        for (int i = 0; i < leading; ++i)
            if (!same(first.d[i], second.d[i])) return false;
        return true;
    }

    static void text_of(const Dims &dims, char *text, size_t size) noexcept {
        size_t used = size_t(std::snprintf(text, size, "["));
        for (int i = 0; i < dims.nbDims && used + 24 < size; ++i)
            used += size_t(std::snprintf(text + used, size - used, i ? " %lld" : "%lld",
                                         static_cast<long long>(dims.d[i])));
        std::snprintf(text + used, size - used, "]");
    }

    const OpShell &op_;
    Values values_;
    nvinfer1::IErrorRecorder *recorder_ = nullptr;
};

}  // namespace tensorrt
}  // namespace saccade
