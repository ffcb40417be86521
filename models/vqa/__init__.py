# SPDX-License-Identifier: Apache-2.0
"""A network that answers questions on images, and shows where it looked."""
