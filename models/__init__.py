# SPDX-License-Identifier: Apache-2.0
"""Model architectures, their weights, and the data they are trained on."""
