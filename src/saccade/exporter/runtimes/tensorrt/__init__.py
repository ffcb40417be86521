# SPDX-License-Identifier: Apache-2.0
"""An artefact folder becomes engines, each in a process of its own, its types proved first."""
