// SPDX-License-Identifier: Apache-2.0
// A case of the plugin harness: fields, tensors, and its run on the device. The file cases.txt has
// one word-separated line a thing:
//   case OP NAME / field NAME float|int VALUE / input TYPE AXES... : FILE
//   output TYPE AXES... : EXPECTED ALLOWED / end
// Files are raw little-endian; EXPECTED and ALLOWED hold float64, element by element.
#pragma once

#include <NvInferRuntime.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

inline std::string &current_case() {
    static std::string name;
    return name;
}

__attribute__((format(printf, 2, 3))) inline void check(bool holds, const char *format, ...) {
    if (holds) return;
    std::fprintf(stderr, "%s: ", current_case().c_str());
    va_list arguments;
    va_start(arguments, format);
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::fprintf(stderr, "\n");
    std::exit(1);
}

inline void check_cuda(cudaError_t status, const char *what) {
    check(status == cudaSuccess, "%s: %s", what, cudaGetErrorString(status));
}

// As the ONNX parser passes attributes: float32 or int32.
struct Field {
    std::string name;
    bool whole;
    float real;
    int32_t integer;

    nvinfer1::PluginField as_plugin_field() const {
        return whole ? nvinfer1::PluginField(name.c_str(), &integer,
                                             nvinfer1::PluginFieldType::kINT32, 1)
                     : nvinfer1::PluginField(name.c_str(), &real,
                                             nvinfer1::PluginFieldType::kFLOAT32, 1);
    }
    bool equals(const nvinfer1::PluginField &field) const {
        return whole ? *static_cast<const int64_t *>(field.data) == integer
                     : *static_cast<const float *>(field.data) == real;
    }
};

struct Tensor {
    nvinfer1::DataType type;
    nvinfer1::Dims dims{};
    std::vector<char> data;  // of an input
    std::vector<double> expected, allowed;

    size_t count() const {
        size_t product = 1;
        for (int i = 0; i < dims.nbDims; ++i) product *= size_t(dims.d[i]);
        return product;
    }
    size_t bytes() const {
        switch (type) {
            case nvinfer1::DataType::kHALF: return 2 * count();
            case nvinfer1::DataType::kINT64: return 8 * count();
            default: return 4 * count();
        }
    }
};

struct Case {
    std::string op, name;
    std::vector<Field> fields;
    std::vector<Tensor> inputs, outputs;

    // Dynamic in the first axis, with the case's own size as the largest.
    std::vector<nvinfer1::DynamicPluginTensorDesc> described(const std::vector<Tensor> &of) const {
        std::vector<nvinfer1::DynamicPluginTensorDesc> all;
        for (const Tensor &each : of) {
            nvinfer1::DynamicPluginTensorDesc desc{};
            desc.desc.dims = desc.min = desc.max = desc.opt = each.dims;
            desc.desc.type = each.type;
            desc.desc.format = nvinfer1::TensorFormat::kLINEAR;
            all.push_back(desc);
        }
        return all;
    }
};

inline std::vector<char> read_file(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    check(bool(file), "cannot read %s", path.c_str());
    return {std::istreambuf_iterator<char>(file), {}};
}

inline std::vector<double> read_doubles(const std::string &path) {
    const std::vector<char> bytes = read_file(path);
    std::vector<double> values(bytes.size() / sizeof(double));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(double));
    return values;
}

inline Tensor read_tensor(std::istringstream &line, const std::string &folder, bool input) {
    Tensor tensor;
    std::string word;
    line >> word;
    tensor.type = word == "float16" ? nvinfer1::DataType::kHALF
                  : word == "int64" ? nvinfer1::DataType::kINT64
                                    : nvinfer1::DataType::kFLOAT;
    while (line >> word && word != ":") tensor.dims.d[tensor.dims.nbDims++] = std::stoll(word);
    line >> word;
    if (input) {
        tensor.data = read_file(folder + "/" + word);
        check(tensor.data.size() == tensor.bytes(), "%s has another size", word.c_str());
    } else {
        tensor.expected = read_doubles(folder + "/" + word);
        line >> word;
        tensor.allowed = read_doubles(folder + "/" + word);
        check(tensor.expected.size() == tensor.count() && tensor.allowed.size() == tensor.count(),
              "%s has another size", word.c_str());
    }
    return tensor;
}

inline std::vector<Case> read_cases(const std::string &folder) {
    std::ifstream file(folder + "/cases.txt");
    check(bool(file), "cannot read %s/cases.txt", folder.c_str());
    std::vector<Case> cases;
    for (std::string text; std::getline(file, text);) {
        std::istringstream line(text);
        std::string kind, word;
        line >> kind;
        if (kind == "case") {
            cases.emplace_back();
            line >> cases.back().op >> cases.back().name;
        } else if (kind == "field") {
            Field field{};
            double value = 0;
            line >> field.name >> word >> value;
            field.whole = word == "int";
            field.real = float(value);
            field.integer = int32_t(value);
            cases.back().fields.push_back(field);
        } else if (kind == "input") {
            cases.back().inputs.push_back(read_tensor(line, folder, true));
        } else if (kind == "output") {
            cases.back().outputs.push_back(read_tensor(line, folder, false));
        }
    }
    return cases;
}

// Buffers of a case on the device; behind the workspace lie bytes that must stay as they are.
class DeviceRun {
  public:
    DeviceRun(const Case &given, size_t workspace) : given_(given), workspace_bytes_(workspace) {
        check_cuda(cudaStreamCreate(&stream_), "cudaStreamCreate");
        for (const Tensor &each : given.inputs) {
            inputs_.push_back(allocated(each.bytes()));
            check_cuda(cudaMemcpy(inputs_.back(), each.data.data(), each.bytes(),
                                  cudaMemcpyHostToDevice), "copy of an input");
        }
        for (const Tensor &each : given.outputs) outputs_.push_back(allocated(each.bytes()));
        workspace_ = allocated(workspace + kGuard);
        check_cuda(cudaMemset(workspace_, 0xA5, workspace + kGuard), "cudaMemset");
    }
    ~DeviceRun() {
        for (void *each : inputs_) cudaFree(each);
        for (void *each : outputs_) cudaFree(each);
        cudaFree(workspace_);
        cudaStreamDestroy(stream_);
    }
    DeviceRun(const DeviceRun &) = delete;
    DeviceRun &operator=(const DeviceRun &) = delete;

    void *const *inputs() const { return inputs_.data(); }
    void *const *outputs() const { return outputs_.data(); }
    void *workspace() const { return workspace_bytes_ == 0 ? nullptr : workspace_; }

    template <class Enqueue>
    void directly(const Enqueue &enqueue) {
        spoil();
        check(enqueue(stream_) == 0, "enqueue failed");
        compare("queued");
    }

    // A capture fails if enqueue allocates or waits.
    template <class Enqueue>
    void from_graph(const Enqueue &enqueue) {
        cudaGraph_t graph;
        cudaGraphExec_t ready;
        check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "capture");
        check(enqueue(stream_) == 0, "enqueue failed in a capture");
        check_cuda(cudaStreamEndCapture(stream_, &graph), "end of the capture");
        check_cuda(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
        for (int replay = 0; replay < 2; ++replay) {
            spoil();
            check_cuda(cudaGraphLaunch(ready, stream_), "cudaGraphLaunch");
            compare("replayed");
        }
        cudaGraphExecDestroy(ready);
        cudaGraphDestroy(graph);
    }

  private:
    static constexpr size_t kGuard = 256;

    static void *allocated(size_t bytes) {
        void *data = nullptr;
        check_cuda(cudaMalloc(&data, bytes == 0 ? 16 : bytes), "cudaMalloc");
        return data;
    }

    void spoil() {
        for (size_t t = 0; t < outputs_.size(); ++t)
            check_cuda(cudaMemset(outputs_[t], 0x5A, given_.outputs[t].bytes()), "cudaMemset");
        // The stream does not wait for the default one by itself in every mode.
        check_cuda(cudaDeviceSynchronize(), "before the run");
    }

    void compare(const char *how) {
        check_cuda(cudaStreamSynchronize(stream_), "the kernel");
        for (size_t t = 0; t < outputs_.size(); ++t) {
            const Tensor &tensor = given_.outputs[t];
            std::vector<char> found(tensor.bytes());
            check_cuda(cudaMemcpy(found.data(), outputs_[t], found.size(), cudaMemcpyDeviceToHost),
                       "copy of an output");
            for (size_t i = 0; i < tensor.count(); ++i) {
                const double value = element(tensor, found.data(), i);
                const double expected = tensor.expected[i];
                const bool same = std::isnan(expected)
                                      ? std::isnan(value)
                                      : std::fabs(value - expected) <= tensor.allowed[i];
                check(same, "%s: output %zu, element %zu is %.9g, expected %.9g within %.3g", how,
                      t, i, value, expected, tensor.allowed[i]);
            }
        }
        std::vector<unsigned char> guard(kGuard);
        check_cuda(cudaMemcpy(guard.data(), static_cast<char *>(workspace_) + workspace_bytes_,
                              kGuard, cudaMemcpyDeviceToHost), "copy of the guard");
        for (unsigned char each : guard)
            check(each == 0xA5, "%s: wrote behind the workspace", how);
    }

    static double element(const Tensor &tensor, const char *data, size_t i) {
        if (tensor.type == nvinfer1::DataType::kHALF) {
            __half value;
            std::memcpy(&value, data + 2 * i, 2);
            return double(__half2float(value));
        }
        float value;
        std::memcpy(&value, data + 4 * i, 4);
        return double(value);
    }

    const Case &given_;
    size_t workspace_bytes_;
    cudaStream_t stream_ = nullptr;
    std::vector<void *> inputs_, outputs_;
    void *workspace_ = nullptr;
};
