// SPDX-License-Identifier: Apache-2.0
// A contract.py for C++: what an op is called, takes and answers, and what its attributes may be.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>
#include <initializer_list>

namespace saccade {

struct Attribute {
    const char *name;
    bool is_whole;
    double standard;
    const char *allowed;  // in words, for messages
    double least, most;
    bool above, below;  // `least` itself, `most` itself is out

    bool holds(double value) const {
        return std::isfinite(value) && (above ? value > least : value >= least) &&
               (below ? value < most : value <= most);
    }
};

struct OpContract {
    static constexpr size_t kMostAttributes = 4;

    const char *name;
    const char *shapes;  // of the inputs, for messages
    const char *input[2];
    // One letter a tensor: T of the first input's type, f float32, i int64.
    const char *input_types, *output_types;
    size_t axes;  // of the first input, after the leading ones
    size_t attribute_count;
    Attribute attribute[kMostAttributes];

    size_t inputs() const { return std::strlen(input_types); }
    size_t outputs() const { return std::strlen(output_types); }
    bool has_sizes() const { return input_types[1] == 'i'; }  // a second input of grids' sizes
    bool has_error() const { return output_types[1] == 'f'; }  // a second output, float32 [...]
    // Whether the attributes, in the contract's order, are in their ranges.
    bool allows(std::initializer_list<double> values) const {
        const Attribute *next = attribute;
        for (const double value : values)
            if (!(next++)->holds(value)) return false;
        return true;
    }
};

}  // namespace saccade
