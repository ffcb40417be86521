// SPDX-License-Identifier: Apache-2.0
// Attributes as TensorRT carries them: fields read from whatever number type they come in, and the
// messages about those that do not fit the contract.
#pragma once

#include <NvInferRuntime.h>

#include <atomic>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "contracts.hpp"

namespace saccade {
namespace tensorrt {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

// Given by whoever loads the library; null until then.
inline std::atomic<nvinfer1::ILoggerFinder *> logger_finder{nullptr};

// Says what is wrong: through TensorRT's logger where the library was given one, and to the error
// recorder of an execution context; without both, to standard error.
__attribute__((format(printf, 2, 3))) inline void report(nvinfer1::IErrorRecorder *recorder,
                                                         const char *format, ...) noexcept {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    nvinfer1::ILoggerFinder *finder = logger_finder.load();
    nvinfer1::ILogger *logger = finder == nullptr ? nullptr : finder->findLogger();
    if (logger != nullptr) logger->log(nvinfer1::ILogger::Severity::kERROR, text);
    if (recorder != nullptr) recorder->reportError(nvinfer1::ErrorCode::kINVALID_ARGUMENT, text);
    if (logger == nullptr && recorder == nullptr) std::fprintf(stderr, "%s\n", text);
}

inline PluginFieldType type_of(const Attribute &attribute) {
    return attribute.is_whole ? PluginFieldType::kINT64 : PluginFieldType::kFLOAT32;
}

// The values of an op's fields in the order of its rules, and the memory that TensorRT reads them
// from when it writes an engine.
class Values {
  public:
    // False after a message if a field is unknown or breaks its rule.
    bool read(const OpContract &op, const PluginFieldCollection *given) noexcept {
        rules_ = op.attribute;
        count_ = int(op.attribute_count);
        for (int i = 0; i < count_; ++i) number_[i] = rules_[i].standard;
        const int fields = given == nullptr ? 0 : given->nbFields;
        for (int i = 0; i < fields; ++i)
            if (!take(op.name, given->fields[i])) return false;
        return true;
    }

    double operator[](int index) const noexcept { return number_[index]; }
    int64_t whole(int index) const noexcept { return int64_t(number_[index]); }

    const PluginFieldCollection *serialized() noexcept {
        for (int i = 0; i < count_; ++i) {
            if (rules_[i].is_whole)
                stored_[i].whole = int64_t(number_[i]);
            else
                stored_[i].real = float(number_[i]);
            fields_[i] = PluginField(rules_[i].name, &stored_[i], type_of(rules_[i]), 1);
        }
        collection_ = {count_, fields_};
        return &collection_;
    }

  private:
    bool take(const char *op, const PluginField &field) noexcept {
        const char *name = field.name == nullptr ? "" : field.name;
        for (int i = 0; i < count_; ++i) {
            if (std::strcmp(rules_[i].name, name) != 0) continue;
            double value = 0;
            if (!number_of(field, value)) {
                report(nullptr,
                       "saccade::%s: field %s has type %d and %d values, expected one number.", op,
                       name, int(field.type), int(field.length));
                return false;
            }
            if (!rules_[i].holds(value) || (rules_[i].is_whole && value != std::floor(value))) {
                report(nullptr, "saccade::%s: %s is %g, expected %s.", op, name, value,
                       rules_[i].allowed);
                return false;
            }
            number_[i] = value;
            return true;
        }
        report(nullptr, "saccade::%s: unknown field '%s'. It has: %s%s%s%s%s%s%s.", op, name,
               text_of(0, "no fields"), comma(1), text_of(1, ""), comma(2), text_of(2, ""),
               comma(3), text_of(3, ""));
        return false;
    }

    const char *text_of(int i, const char *otherwise) const {
        return i < count_ ? rules_[i].name : otherwise;
    }
    const char *comma(int i) const { return i < count_ ? ", " : ""; }

    template <class T>
    static double first_of(const PluginField &field) {
        T value;
        std::memcpy(&value, field.data, sizeof value);
        return double(value);
    }

    // TensorRT's parser gives float32 and int32; other callers give what they have.
    static bool number_of(const PluginField &field, double &value) noexcept {
        if (field.data == nullptr || field.length != 1) return false;
        switch (field.type) {
            case PluginFieldType::kFLOAT32: value = first_of<float>(field); return true;
            case PluginFieldType::kFLOAT64: value = first_of<double>(field); return true;
            case PluginFieldType::kINT32: value = first_of<int32_t>(field); return true;
            case PluginFieldType::kINT64: value = double(first_of<int64_t>(field)); return true;
            default: return false;
        }
    }

    const Attribute *rules_ = nullptr;
    int count_ = 0;
    double number_[OpContract::kMostAttributes] = {};
    union {
        float real;
        int64_t whole;
    } stored_[OpContract::kMostAttributes] = {};
    PluginField fields_[OpContract::kMostAttributes];
    PluginFieldCollection collection_{};
};

}  // namespace tensorrt
}  // namespace saccade
