# SPDX-License-Identifier: Apache-2.0
"""The embedded server: started, watched, restarted, replaced."""
