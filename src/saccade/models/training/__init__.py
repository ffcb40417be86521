# SPDX-License-Identifier: Apache-2.0
"""One training loop, and what each family brings to it."""
