# SPDX-License-Identifier: Apache-2.0
"""Second-order transformers: a trunk, and a head that reads class token and word tokens."""
