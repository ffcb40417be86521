# SPDX-License-Identifier: Apache-2.0
"""Model repositories: the folders that a server loads, and the checks to run beforehand."""
