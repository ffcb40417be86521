// SPDX-License-Identifier: Apache-2.0
// libsaccade_tensorrt: the creators of the five plugins, and the two functions by which TensorRT's
// plugin registry finds them. It links no TensorRT library: everything is virtual functions.
#include "tensorrt_plugin.hpp"

namespace {

using namespace saccade::tensorrt;

class Creator final : public nvinfer1::IPluginCreatorV3One {
  public:
    explicit Creator(const OpShell &op) noexcept : op_(op) {
        for (size_t i = 0; i < op.attribute_count; ++i)
            fields_[i] = PluginField(op.attribute[i].name, nullptr, type_of(op.attribute[i]), 1);
        collection_ = {int32_t(op.attribute_count), fields_};
    }

    const char *getPluginName() const noexcept override { return op_.name; }
    const char *getPluginVersion() const noexcept override { return kVersion; }
    const char *getPluginNamespace() const noexcept override { return kNamespace; }
    const PluginFieldCollection *getFieldNames() noexcept override { return &collection_; }

    // The fields of a node of an ONNX file, or those that an engine has kept; null after a message.
    nvinfer1::IPluginV3 *createPlugin(const char *, const PluginFieldCollection *given,
                                      nvinfer1::TensorRTPhase) noexcept override {
        Values values;
        if (!values.read(op_, given)) return nullptr;
        return new (std::nothrow) Plugin(op_, values);
    }

  private:
    const OpShell &op_;
    PluginField fields_[OpShell::kMostAttributes];
    PluginFieldCollection collection_{};
};

Creator creators[kOpCount] = {Creator(kOps[0]), Creator(kOps[1]), Creator(kOps[2]),
                              Creator(kOps[3]), Creator(kOps[4])};

}  // namespace

extern "C" {

SACCADE_EXPORT nvinfer1::IPluginCreatorInterface *const *getCreators(int32_t &count) {
    static nvinfer1::IPluginCreatorInterface *const all[kOpCount] = {
        &creators[0], &creators[1], &creators[2], &creators[3], &creators[4]};
    count = kOpCount;
    return all;
}

SACCADE_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder *finder) { logger_finder = finder; }

}  // extern "C"
