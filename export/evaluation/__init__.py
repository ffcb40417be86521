# SPDX-License-Identifier: Apache-2.0
"""How good a model is, as a checkpoint and as the files made of it: one task a file."""
