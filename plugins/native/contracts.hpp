// SPDX-License-Identifier: Apache-2.0
// What contract.py of each op declares; written by python -m saccade.plugins.native.contracts.
#pragma once

#include "contract.hpp"

namespace saccade {

constexpr OpContract kSparsemax{
    "Sparsemax", "X [... n]", {"X", nullptr}, "T", "T", 1, 0,
    {}};
constexpr OpContract kTVMax{
    "TVMax", "Z [... h w]", {"Z", nullptr}, "T", "Tf", 2, 3,
    {{"lam", false, 0.01, "a finite number >= 0", 0, HUGE_VAL, false, false},
{"tolerance", false, 1e-06, "a finite number > 0", 0, HUGE_VAL, true, false},
{"max_iterations", true, 2000, "a whole number >= 1", 1, HUGE_VAL, false, false}}};
constexpr OpContract kMaskedTVMax{
    "MaskedTVMax", "Z [... h w], sizes [... 2]", {"Z", "sizes"}, "Ti", "Tf", 2, 3,
    {{"lam", false, 0.01, "a finite number >= 0", 0, HUGE_VAL, false, false},
{"tolerance", false, 1e-06, "a finite number > 0", 0, HUGE_VAL, true, false},
{"max_iterations", true, 2000, "a whole number >= 1", 1, HUGE_VAL, false, false}}};
constexpr OpContract kSvPN{
    "SvPN", "Q [... m n]", {"Q", nullptr}, "T", "T", 2, 1,
    {{"alpha", false, 0.5, "a number in (0, 1]", 0, 1, true, false}}};
constexpr OpContract kSvPNFast{
    "SvPNFast", "Q [... m n], v0 [n]", {"Q", "v0"}, "TT", "T", 2, 4,
    {{"alpha", false, 0.5, "a number in (0, 1]", 0, 1, true, false},
{"singular_values", true, 1, "a whole number >= 0 (0: all)", 0, HUGE_VAL, false, false},
{"iterations", true, 1, "a whole number >= 1", 1, HUGE_VAL, false, false},
{"epsilon", false, 1e-05, "a finite number >= 0", 0, HUGE_VAL, false, false}}};

}  // namespace saccade
