// SPDX-License-Identifier: Apache-2.0
// Drives every plugin of libsaccade_tensorrt through its interface, as TensorRT would, without
// TensorRT: found by its creator, made from fields, serialised and made again, asked for shapes,
// formats and workspace, attached to a context, and on a GPU queued on a stream and replayed from
// a captured graph, with the answers compared element by element.
//   tensorrt_harness LIBRARY CASES [--no-gpu] [--registry LIBRARY_OF_TENSORRT]
// CASES is a folder that tests/native/harness_cases.py writes. With --registry the creators come
// from the plugin registry of that library, which loads LIBRARY itself.
#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "harness_case.hpp"

using namespace nvinfer1;

namespace {

// An axis of a shape expression: a constant, or a symbol that is told apart by its address.
class Axis final : public IDimensionExpr, public apiv::VDimensionExpr {
  public:
    Axis(bool constant, int64_t size) : constant_(constant), size_(size) { mImpl = this; }
    bool isConstant() const override { return constant_; }
    int64_t getConstantValue() const override { return size_; }
    bool isSizeTensor() const override { return false; }
    int64_t size() const { return size_; }

  private:
    bool constant_;
    int64_t size_;
};

class Builder final : public IExprBuilder, public apiv::VExprBuilder {
  public:
    Builder() { mImpl = this; }
    const IDimensionExpr *constant(int64_t value) override { return new Axis(true, value); }
    const IDimensionExpr *operation(DimensionOperation, const IDimensionExpr &first,
                                    const IDimensionExpr &) override {
        return &first;
    }
    const IDimensionExpr *declareSizeTensor(int32_t, const IDimensionExpr &opt,
                                            const IDimensionExpr &) override {
        return &opt;
    }
};

std::vector<IPluginCreatorInterface *> creators_of(const char *library, const char *registry) {
    int32_t count = 0;
    IPluginCreatorInterface *const *found = nullptr;
    if (registry != nullptr) {
        void *tensorrt = dlopen(registry, RTLD_NOW | RTLD_GLOBAL);
        check(tensorrt != nullptr, "dlopen of TensorRT: %s", dlerror());
        auto *get = reinterpret_cast<IPluginRegistry *(*)()>(dlsym(tensorrt, "getPluginRegistry"));
        check(get != nullptr, "getPluginRegistry is not in %s", registry);
        check(get()->loadLibrary(library) != nullptr, "the registry did not load %s", library);
        found = get()->getAllCreators(&count);
    } else {
        void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
        check(handle != nullptr, "dlopen: %s", dlerror());
        auto *get = reinterpret_cast<IPluginCreatorInterface *const *(*)(int32_t &)>(
            dlsym(handle, "getCreators"));
        check(get != nullptr, "getCreators is not in %s", library);
        found = get(count);
    }
    return {found, found + count};
}

IPluginCreatorV3One *creator_of(const std::vector<IPluginCreatorInterface *> &all,
                                const std::string &op) {
    for (IPluginCreatorInterface *each : all) {
        if (std::strcmp(each->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE") != 0) continue;
        auto *creator = static_cast<IPluginCreatorV3One *>(each);
        if (op == creator->getPluginName()) return creator;
    }
    check(false, "no creator of %s", op.c_str());
    return nullptr;
}

IPluginV3 *create(IPluginCreatorV3One &creator, const std::vector<PluginField> &fields,
                  TensorRTPhase phase) {
    const PluginFieldCollection collection{int32_t(fields.size()), fields.data()};
    return creator.createPlugin("node", &collection, phase);
}

template <class Capability>
Capability &capability(IPluginV3 &plugin, PluginCapabilityType type, const char *kind) {
    IPluginCapability *found = plugin.getCapabilityInterface(type);
    check(found != nullptr && std::strcmp(found->getInterfaceInfo().kind, kind) == 0,
          "capability %s is missing", kind);
    return *static_cast<Capability *>(found);
}

IPluginV3OneBuild &build_of(IPluginV3 &plugin) {
    return capability<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD,
                                         "PLUGIN_V3ONE_BUILD");
}

IPluginV3OneRuntime &runtime_of(IPluginV3 &plugin) {
    return capability<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME,
                                           "PLUGIN_V3ONE_RUNTIME");
}

// From the case's fields to an engine's bytes and back.
IPluginV3 *created_and_restored(IPluginCreatorV3One &creator, const Case &given) {
    std::vector<PluginField> fields;
    for (const Field &each : given.fields) fields.push_back(each.as_plugin_field());
    IPluginV3 *first = create(creator, fields, TensorRTPhase::kBUILD);
    check(first != nullptr, "createPlugin refused the fields");
    auto &core = capability<IPluginV3OneCore>(*first, PluginCapabilityType::kCORE,
                                              "PLUGIN_V3ONE_CORE");
    check(given.op == core.getPluginName(), "the plugin's name is %s", core.getPluginName());
    check(std::strcmp(core.getPluginVersion(), "1") == 0 && *core.getPluginNamespace() == 0,
          "version or namespace is not what the ONNX parser looks for");

    const PluginFieldCollection *kept = runtime_of(*first).getFieldsToSerialize();
    check(kept->nbFields == creator.getFieldNames()->nbFields, "not all fields are serialised");
    std::vector<std::vector<char>> bytes;
    std::vector<PluginField> again;
    for (int i = 0; i < kept->nbFields; ++i) {
        const PluginField &each = kept->fields[i];
        const size_t size = each.type == PluginFieldType::kINT64 ? 8 : 4;
        bytes.emplace_back(static_cast<const char *>(each.data),
                           static_cast<const char *>(each.data) + size);
        again.emplace_back(each.name, nullptr, each.type, each.length);
        for (const Field &asked : given.fields)
            if (asked.name == each.name)
                check(asked.equals(each), "field %s was serialised as another value", each.name);
    }
    for (size_t i = 0; i < again.size(); ++i) again[i].data = bytes[i].data();
    delete first;
    IPluginV3 *restored = create(creator, again, TensorRTPhase::kRUNTIME);
    check(restored != nullptr, "createPlugin refused its own serialised fields");
    return restored;
}

void check_shapes(IPluginV3OneBuild &build, const Case &given) {
    Builder builder;
    std::vector<DimsExprs> in(given.inputs.size()), out(given.outputs.size());
    for (size_t t = 0; t < in.size(); ++t) {
        in[t].nbDims = given.inputs[t].dims.nbDims;
        // The first axis is the batch, which a network does not know; v0 has none.
        for (int i = 0; i < in[t].nbDims; ++i)
            in[t].d[i] = new Axis(i > 0 || in[t].nbDims == 1, given.inputs[t].dims.d[i]);
    }
    check(build.getOutputShapes(in.data(), int32_t(in.size()), nullptr, 0, out.data(),
                                int32_t(out.size()), builder) == 0,
          "getOutputShapes refused the shapes");
    for (size_t t = 0; t < out.size(); ++t) {
        const Dims &expected = given.outputs[t].dims;
        check(out[t].nbDims == expected.nbDims, "output %zu has rank %d, expected %d", t,
              out[t].nbDims, expected.nbDims);
        for (int i = 0; i < expected.nbDims; ++i)
            check(static_cast<const Axis *>(out[t].d[i])->size() == expected.d[i],
                  "output %zu has another axis %d", t, i);
    }
    std::vector<DataType> types(out.size()), given_types;
    for (const Tensor &each : given.inputs) given_types.push_back(each.type);
    check(build.getOutputDataTypes(types.data(), int32_t(types.size()), given_types.data(),
                                   int32_t(given_types.size())) == 0,
          "getOutputDataTypes failed");
    for (size_t t = 0; t < types.size(); ++t)
        check(types[t] == given.outputs[t].type, "output %zu has another type", t);
}

void check_formats(IPluginV3OneBuild &build, const Case &given,
                   std::vector<DynamicPluginTensorDesc> tensors) {
    const int32_t inputs = int32_t(given.inputs.size()), outputs = int32_t(given.outputs.size());
    check(build.getNbOutputs() == outputs, "getNbOutputs is %d", build.getNbOutputs());
    for (int32_t i = 0; i < inputs + outputs; ++i) {
        const auto supported = [&] {
            return build.supportsFormatCombination(i, tensors.data(), inputs, outputs);
        };
        check(supported(), "tensor %d is not supported", int(i));
        const PluginTensorDesc asked = tensors[i].desc;
        tensors[i].desc.type = DataType::kINT8;
        check(!supported(), "tensor %d may be int8", int(i));
        tensors[i].desc = asked;
        tensors[i].desc.format = TensorFormat::kCHW4;
        check(!supported(), "tensor %d may have another layout", int(i));
        tensors[i].desc = asked;
    }
}

void run_case(const std::vector<IPluginCreatorInterface *> &all, const Case &given, bool gpu) {
    IPluginV3 *plugin = created_and_restored(*creator_of(all, given.op), given);
    IPluginV3OneBuild &build = build_of(*plugin);
    check_shapes(build, given);
    const auto in = given.described(given.inputs), out = given.described(given.outputs);
    auto both = in;
    both.insert(both.end(), out.begin(), out.end());
    check_formats(build, given, both);
    const int32_t inputs = int32_t(in.size()), outputs = int32_t(out.size());
    check(build.configurePlugin(in.data(), inputs, out.data(), outputs) == 0, "configurePlugin");
    const size_t workspace = build.getWorkspaceSize(in.data(), inputs, out.data(), outputs);

    IPluginV3 *copy = plugin->clone();
    delete plugin;
    IPluginV3 *attached = runtime_of(*copy).attachToContext(nullptr);
    delete copy;
    IPluginV3OneRuntime &runtime = runtime_of(*attached);
    std::vector<PluginTensorDesc> in_desc, out_desc;
    for (const auto &each : in) in_desc.push_back(each.desc);
    for (const auto &each : out) out_desc.push_back(each.desc);
    check(runtime.onShapeChange(in_desc.data(), inputs, out_desc.data(), outputs) == 0,
          "onShapeChange");
    if (gpu) {
        DeviceRun run(given, workspace);
        const auto enqueue = [&](cudaStream_t stream) {
            return runtime.enqueue(in_desc.data(), out_desc.data(), run.inputs(), run.outputs(),
                                   run.workspace(), stream);
        };
        run.directly(enqueue);
        run.from_graph(enqueue);
    }
    delete attached;
}

// What does not fit is refused with a message and a code, not with a crash.
void check_refusals(IPluginCreatorV3One &creator) {
    std::fprintf(stderr, "messages that are expected of %s:\n", creator.getPluginName());
    const float number = 1;
    const PluginField unknown("lamb", &number, PluginFieldType::kFLOAT32, 1);
    check(create(creator, {unknown}, TensorRTPhase::kBUILD) == nullptr, "took a field lamb");
    if (creator.getFieldNames()->nbFields > 0) {
        const float negative = -1;
        const PluginField wrong(creator.getFieldNames()->fields[0].name, &negative,
                                PluginFieldType::kFLOAT32, 1);
        check(create(creator, {wrong}, TensorRTPhase::kBUILD) == nullptr, "took a value of -1");
    }
    IPluginV3 *plugin = create(creator, {}, TensorRTPhase::kBUILD);
    check(plugin != nullptr, "refused to use its defaults");
    Builder builder;
    DimsExprs in[3]{}, out[3]{};
    check(build_of(*plugin).getOutputShapes(in, 1, nullptr, 0, out, 3, builder) != 0,
          "took one scalar for three outputs");
    delete plugin;
}

}  // namespace

int main(int count, char **arguments) {
    current_case() = "tensorrt_harness";
    check(count >= 3, "usage: tensorrt_harness LIBRARY CASES [--no-gpu] [--registry LIBRARY]");
    bool gpu = true;
    const char *registry = nullptr;
    for (int i = 3; i < count; ++i) {
        if (std::strcmp(arguments[i], "--no-gpu") == 0) gpu = false;
        if (std::strcmp(arguments[i], "--registry") == 0 && i + 1 < count)
            registry = arguments[++i];
    }
    const auto all = creators_of(arguments[1], registry);
    const std::vector<Case> cases = read_cases(arguments[2]);
    check(!cases.empty(), "no cases in %s", arguments[2]);
    int devices = 0;
    check(!gpu || (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0),
          "no GPU here: give --no-gpu to check everything but the answers");
    std::string checked;
    for (const Case &each : cases) {
        if (checked != each.op) check_refusals(*creator_of(all, each.op));
        checked = each.op;
        current_case() = each.op + " " + each.name;
        run_case(all, each, gpu);
    }
    std::printf("%zu cases passed%s\n", cases.size(), gpu ? "" : " (nothing was queued: --no-gpu)");
    return 0;
}
