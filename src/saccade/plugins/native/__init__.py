# SPDX-License-Identifier: Apache-2.0
"""Native code: the kernels' C interface, its libraries, and how Python finds them."""
