# SPDX-License-Identifier: Apache-2.0
"""The user's labeled samples: listed once in any of their formats, read one by one."""
