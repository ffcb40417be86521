# SPDX-License-Identifier: Apache-2.0
"""Code that runs inside the server. It imports numpy, Pillow and a runtime, but not saccade."""
