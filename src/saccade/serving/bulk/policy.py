# SPDX-License-Identifier: Apache-2.0
"""A job that follows a policy: what is asked of the router, and what it is called."""

import hashlib
from collections.abc import Mapping

from saccade.errors import SaccadeError
from saccade.files import json_bytes
from saccade.serving.bulk.answers import Form
from saccade.serving.client.router_view import RouterView
from saccade.serving.repository.policies import ServedPolicy

ASKS = ("classify", "answer")  # of which a variant's answer is one of several classes
_PARAMETERS = ("policy", "max_risk", "strict")


def check_followed(parameters: Mapping[str, str], view: RouterView, form: Form) -> None:
    """The policy that is named exists, and what is asked can follow one.

    Raises: SaccadeError otherwise.
    """
    name, risk = (parameters.get(key) for key in _PARAMETERS[:2])
    if name is None and risk is None:
        return
    view.require_policies()
    if name is not None and name not in view.policies:
        raise SaccadeError(
            f"--policy is {name!r:.60}, {view.model} has {', '.join(view.policies)}. Name one of "
            "them."
        )
    if form.ask not in ASKS:
        raise SaccadeError(
            f"--ask {form.ask} cannot follow a policy: what different variants answer cannot be "
            "compared. Leave the policy out, or pass --ask classify."
        )


def without_policy(parameters: Mapping[str, str]) -> dict[str, str]:
    """The other parameters of a request."""
    return {key: value for key, value in parameters.items() if key not in _PARAMETERS}


def policies_sha256(policies: tuple[ServedPolicy, ...]) -> str:
    """Hash of the policies of a repository; empty where it has none."""
    if not policies:
        return ""
    return hashlib.sha256(json_bytes([policy.to_dict() for policy in policies])).hexdigest()


def answered_by(variant: str, parameters: Mapping[str, str]) -> str:
    """Who answers, for a reader: the variant, or the policy."""
    if "policy" in parameters:
        return f"policy {parameters['policy']}"
    if "max_risk" in parameters:
        return f"the policy of risk {parameters['max_risk']}"
    return variant
