"""Parse the metrics for Prometheus."""

from __future__ import annotations

import re

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
            assert key not in found, "the same series is there twice"
            found[key] = sample.value
    assert found
    assert re.search("[^\n]\n$", text)  # the collector refuses a last line without a line break
    return found


def values(series: Series, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Return the values of one metric by these labels."""
    return {
        tuple(dict(key)[label] for label in labels): value
        for (metric, key), value in series.items()
        if metric == name
    }
