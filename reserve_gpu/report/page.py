"""The status as one page for browsers, which loads itself again; cron writes it for a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.errors import shown
from reserve_gpu.report.words import escape

if TYPE_CHECKING:
    from reserve_gpu.report.status import Status

RELOAD_S = 30
# The colour scheme is for what the browser draws itself: the bars of the memory.
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="{reload_s}">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ background: #ffffff; color: #1f2328; font: 15px/1.5 system-ui, sans-serif; margin: 1.5em }}
@media (prefers-color-scheme: dark) {{ body {{ background: #0d1117; color: #e6edf3 }} }}
</style>
</head>
<body>
{picture}
</body>
</html>"""


def page(status: Status) -> str:
    """The page. It needs nothing from elsewhere: no script, no style sheet, no picture."""
    title = escape(f"GPUs of {shown(status.host)}")
    return PAGE.format(reload_s=RELOAD_S, title=title, picture=status._repr_html_())
