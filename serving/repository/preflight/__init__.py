# SPDX-License-Identifier: Apache-2.0
"""What makes a server fail late, found before one is started: `saccade preflight`."""
