# SPDX-License-Identifier: Apache-2.0
"""One converter per source: the keys of its checkpoints as tables, its JSON as dataclasses."""
