# SPDX-License-Identifier: Apache-2.0
"""Slot attention, plain or equivariant: a picture taken apart into slots and painted again."""
