"""The page of `reserve-gpu report` in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.export import html_page
from tests.support.lab import CHROMIUM, FLAGS
from tests.support.report import REPORT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.needs("browser")
@pytest.mark.skipif(not CHROMIUM, reason="needs Debian's chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_in_a_browser(tmp_path: Path, scheme: str) -> None:
    """The page does not scroll sideways, and its colors follow the color scheme."""
    from playwright.sync_api import sync_playwright

    path = tmp_path / "report.html"
    path.write_text(html_page.page(REPORT, "GPU-hours"), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        for width in (340, 1000):
            context = browser.new_context(
                color_scheme=scheme, viewport={"width": width, "height": 600}
            )
            page = context.new_page()
            failed: list[object] = []
            page.on("pageerror", lambda error, seen=failed: seen.append(error))
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            text = page.evaluate("getComputedStyle(document.body).color")
            assert text == ("rgb(31, 35, 40)" if scheme == "light" else "rgb(230, 237, 243)")
            assert failed == []
        browser.close()
