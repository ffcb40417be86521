# SPDX-License-Identifier: Apache-2.0
"""The bundled server: start it, supervise it, restart it, replace it."""
