"""Helpers of tests: export."""

from __future__ import annotations

import re
from html.parser import HTMLParser

# -- for Prometheus --------------------------------------------------------------------------------

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def metrics(text: str) -> Series:
    """Return the samples, as the Prometheus project's own parser reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    found: Series = {}
    for family in text_string_to_metric_families(text):
        assert re.fullmatch(r"reserve_gpu_[a-z_]+", family.name)
        assert (family.type, bool(family.documentation)) == ("gauge", True)
        for sample in family.samples:
            key = sample.name.removeprefix("reserve_gpu_"), tuple(sorted(sample.labels.items()))
            assert key not in found, "a series stands there twice"
            found[key] = sample.value
    assert found
    assert re.search("[^\n]\n$", text)  # the collector refuses a file without an end of line
    return found


def values(series: Series, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Return the values of one metric, by these labels."""
    return {
        tuple(dict(key)[label] for label in labels): value
        for (metric, key), value in series.items()
        if metric == name
    }


# -- for a browser ---------------------------------------------------------------------------------


class Tags(HTMLParser):
    """What elements a page has, with their attributes, and what its text is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data
