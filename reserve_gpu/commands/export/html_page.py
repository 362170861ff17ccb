"""A status, or a report, as one page for browsers; cron writes it for a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render.phrases import escape

if TYPE_CHECKING:
    from reserve_gpu.render.pictures import Shown

# The colour scheme is for what the browser draws itself: the bars of the memory.
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


def page(seen: Shown, about: str) -> str:
    """Return the page. It needs nothing from elsewhere: no script, no style sheet, no picture.

    about: what it shows, for its title.
    """
    title = escape(f"{about} of {sanitize(seen.host)}")
    return PAGE.format(title=title, picture=seen.picture()._repr_html_())
