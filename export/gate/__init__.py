# SPDX-License-Identifier: Apache-2.0
"""The parity gate: compare every exported file with the float64 model before it is served."""
