# SPDX-License-Identifier: Apache-2.0
"""The registry's line for a family of the tests, in processes that are started with this folder."""

from saccade.models.families import FAMILIES

FAMILIES["stripes"] = "fakes.stripes"
