# SPDX-License-Identifier: Apache-2.0
"""Read pages of metrics with the parser of Prometheus' client library."""

import urllib.request
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

Numbers = Callable[..., float]


def page_of(url: str) -> str:
    """Return the page at a URL."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def types_in(page: str) -> dict[str, str]:
    """Return every family with its type; each may occur only once."""
    families = list(text_string_to_metric_families(page))
    types = {family.name: family.type for family in families}
    assert len(types) == len(families)
    return types


def numbers_in(page: str) -> Numbers:
    """Return a function of name and labels that sums the matching samples."""
    samples = [
        sample for family in text_string_to_metric_families(page) for sample in family.samples
    ]
    keys = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples]
    assert len(set(keys)) == len(keys), "a sample occurs twice on the page"

    def number(name: str, **labels: str) -> float:
        values = [
            sample.value
            for sample in samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert values, f"no {name} {labels}"
        return sum(values)

    return number
