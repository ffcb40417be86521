# SPDX-License-Identifier: Apache-2.0
"""The floor: operations, errors and files; knows nothing of models."""
