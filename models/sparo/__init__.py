# SPDX-License-Identifier: Apache-2.0
"""SPARO: an image and a text tower whose codes are made of separately attended slots."""
