# SPDX-License-Identifier: Apache-2.0
"""The parity gate: every exported file against the float64 model, before anyone serves it."""
