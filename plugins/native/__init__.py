# SPDX-License-Identifier: Apache-2.0
"""Native code: the C interface of the kernels, its libraries, and how Python finds them."""
