# SPDX-License-Identifier: Apache-2.0
"""Jobs that follow a policy: their request parameters, checks and name."""

import hashlib
from collections.abc import Mapping

from saccade.core.errors import SaccadeError
from saccade.core.files import json_bytes
from saccade.serving.bulk.answers import AnswerForm
from saccade.serving.client.router_view import RouterView
from saccade.serving.repository.policies import ServedPolicy

ASKS = ("classify", "answer", "segment")  # answers of different variants can be compared
_PARAMETERS = ("policy", "max_risk", "strict")


def check_followed(parameters: Mapping[str, str], view: RouterView, form: AnswerForm) -> None:
    """Check that the named policy exists and that this kind of answer can follow one.

    Raises: SaccadeError if not.
    """
    name, risk = (parameters.get(key) for key in _PARAMETERS[:2])
    if name is None and risk is None:
        return
    view.require_policies()
    if name is not None and name not in view.policies:
        raise SaccadeError(
            f"--policy: found {name!r:.60}, expected a policy of {view.model}: "
            f"{', '.join(view.policies)}."
        )
    if form.ask not in ASKS:
        raise SaccadeError(
            f"--ask {form.ask} cannot follow a policy, because these answers of different variants "
            "cannot be compared. Drop the policy, or pass --ask classify."
        )
    if "slots" in parameters:
        raise SaccadeError(
            f"--slots {parameters['slots']} cannot be combined with a policy, which is certified "
            "for the number of slots of the training. Drop one of them."
        )


def without_policy(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of a request without those of the policy."""
    return {key: value for key, value in parameters.items() if key not in _PARAMETERS}


def policies_sha256(policies: tuple[ServedPolicy, ...]) -> str:
    """Return the hash of a repository's policies; empty if it has none."""
    if not policies:
        return ""
    return hashlib.sha256(json_bytes([policy.to_dict() for policy in policies])).hexdigest()


def answered_by(variant: str, parameters: Mapping[str, str]) -> str:
    """Return the variant or the policy of a job, in words."""
    if "policy" in parameters:
        return f"policy {parameters['policy']}"
    if "max_risk" in parameters:
        return f"the policy of risk {parameters['max_risk']}"
    return variant
