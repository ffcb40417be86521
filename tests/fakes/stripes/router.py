# SPDX-License-Identifier: Apache-2.0
"""The router's side of stripes: `negative` in a request turns white into black."""

import numpy as np
from plain_family import PlainFamily, whole


class Family(PlainFamily):
    """Pictures whose sign the router draws."""

    parameters = ("negative",)

    def read(self, route, role, given, parameters):
        if "negative" not in parameters:
            return {}
        return {"negative": whole("negative", parameters["negative"], 0, 1)}

    def fill(self, route, ticket, inputs):
        if "sign" not in inputs:
            sign = -1.0 if ticket.parameters.get("negative") else 1.0
            inputs["sign"] = np.full((ticket.rows, 1), sign, np.float32)
