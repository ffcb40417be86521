# SPDX-License-Identifier: Apache-2.0
"""Certified policies as a table for a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from saccade.exporter.policy.certify import NotCertified
from saccade.exporter.policy.policy import Policy, PolicyFile

if TYPE_CHECKING:
    from rich.console import Group


def rendered(content: PolicyFile | None, refused: Sequence[NotCertified]) -> "Group":
    """Return a row per policy, then what was not certified and why."""
    from rich.console import Group
    from rich.text import Text

    parts: list[object] = [] if content is None else [_table(content)]
    parts += [Text(line, "red") for line in map(refusal, refused)]
    return Group(*parts)  # type: ignore[arg-type]


def _table(content: PolicyFile) -> object:
    from rich import box
    from rich.table import Table

    loss = "answers other than the full model's"
    if content.against == "labels":
        loss = "loss of accuracy against the full model"
    elif content.min_ari is not None:
        loss = f"segmentations with an ARI below {content.min_ari:g} to the full model's"
    tested = content.samples - content.learn
    samples = f"{tested:,} of {content.samples:,} samples of {content.data}"
    if content.choose_data is not None:
        samples = f"{tested:,} samples of {content.data}, chosen on {content.learn:,} others"
    table = Table(
        title=f"{loss}: certified on {samples}",
        box=box.SIMPLE,
        padding=(0, 1),
        caption=(
            f"Traffic like this data loses at most the risk, with {100 * content.confidence:g} % "
            "confidence. Observed: what these samples lost. Bound: that with a margin for luck. "
            f"Speed: as measured on {content.device}, {content.runtime}."
        ),
        caption_justify="left",
    )
    table.add_column("policy", no_wrap=True)
    table.add_column("chain: share of the samples that end there")
    for heading in ("risk", "observed", "bound", "times the full\nmodel's speed"):
        table.add_column(heading, justify="right")
    for policy in content.policies:
        table.add_row(
            policy.name,
            _chain(policy),
            *(f"{100 * share:.2f} %" for share in (policy.risk, policy.observed, policy.bound)),
            f"{policy.full_seconds / policy.seconds:.1f}",
        )
    return table


def _chain(policy: Policy) -> str:
    return "\n".join(f"{step.variant}: {step.share:.0%}" for step in policy.steps)


def refusal(one: NotCertified) -> str:
    """Return why no policy of a risk was certified, and what to do."""
    if one.bound <= one.risk:
        return (
            f"risk {one.risk:g}: the cheapest chain that meets it is not faster than the full "
            "model, as measured in frontier.json. If that was measured on a busy machine, measure "
            "again with `saccade bench`; otherwise pass a larger --risk, or export smaller budgets."
        )
    start = (
        f"risk {one.risk:g}: not certified for anything cheaper than the full model. The bound "
        f"reached is {one.bound:.4f}"
    )
    if one.samples is None:
        return f"{start}, and no number of such samples would do. Pass a larger --risk."
    return f"{start}; {one.samples:,} samples would do. Pass more data, or a larger --risk."
