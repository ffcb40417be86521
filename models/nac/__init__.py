# SPDX-License-Identifier: Apache-2.0
"""Neural Attentive Circuits: attentive modules with learned functions and learned links."""
