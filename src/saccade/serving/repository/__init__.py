# SPDX-License-Identifier: Apache-2.0
"""Model repositories: folders that a Triton server loads, and the checks before it does."""
