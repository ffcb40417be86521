# SPDX-License-Identifier: Apache-2.0
"""What all packages need: errors, files, limits, processes, the machine."""
