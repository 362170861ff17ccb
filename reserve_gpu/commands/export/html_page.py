"""Render a status or a report as a standalone HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render.phrases import escape

if TYPE_CHECKING:
    from reserve_gpu.render.pictures import Shown

# `color-scheme` sets the colors of elements that the browser draws itself, such as memory bars.
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ background: #ffffff; color: #1f2328; font: 15px/1.5 system-ui, sans-serif; margin: 1em }}
h1 {{ font-size: 1.3em; margin: 0 0 0.5em }}
@media (prefers-color-scheme: dark) {{ body {{ background: #0d1117; color: #e6edf3 }} }}
@media (max-width: 30em) {{ body {{ margin: 0.5em; font-size: 13px }} }}
</style>
</head>
<body>
<h1>{title}</h1>
{picture}
</body>
</html>"""


def page(content: Shown, about: str) -> str:
    """Return a standalone HTML page, which loads no scripts, style sheets, or images.

    Args:
        content: The status or report to render.
        about: The title's subject, such as `GPUs`.
    """
    title = escape(f"{about} of {sanitize(content.host)}")
    return PAGE.format(title=title, picture=content.picture()._repr_html_())
