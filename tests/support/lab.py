"""A real JupyterLab on a simulated machine, and a notebook in a real browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tests.support.machine import LIMIT_S, program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from playwright.sync_api import Browser, Locator, Page

    from tests.support.machine import Machine

LIMIT_MS = LIMIT_S * 1000
CHROMIUM = program("chromium")
FLAGS = (
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SETTINGS: dict[str, dict[str, Any]] = {
    "apputils-extension/themes": {"adaptive-theme": True},  # light or dark as in the browser
    "apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "notebook-extension/tracker": {
        "windowingMode": "none",
        "codeCellConfig": {"lineNumbers": False},
    },
}
THEMES = ("light", "dark")
NOTHING: Mapping[str, str] = MappingProxyType({})


class Lab:
    """A JupyterLab server; its kernels load the extension as after `reserve-gpu setup`.

    Args:
        prefix: The start of the command, such as setpriv for another user.
        program: `jupyterlab`, or `notebook`.
        options: Further options of the server.
        environ: Further variables.
    """

    def __init__(
        self,
        machine: Machine,
        *prefix: str,
        program: str = "jupyterlab",
        options: Sequence[str] = (),
        environ: Mapping[str, str] = NOTHING,
    ) -> None:
        self.folder = machine.home / "work"
        places = {
            name: str(machine.home / place)
            for name, place in (
                ("JUPYTER_CONFIG_DIR", "config"),
                ("JUPYTER_DATA_DIR", "data"),
                ("JUPYTER_RUNTIME_DIR", "runtime"),
                ("JUPYTERLAB_SETTINGS_DIR", "settings"),
                ("JUPYTERLAB_WORKSPACES_DIR", "workspaces"),
            )
        }
        self._runtime = Path(places["JUPYTER_RUNTIME_DIR"])
        self._log = machine.folder / "lab.log"
        self._write_settings(Path(places["JUPYTERLAB_SETTINGS_DIR"]), machine.home)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", program, "--no-browser", "--allow-root",
                 "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0",
                 "--JupyterNotebookApp.expose_app_in_browser=True",
                 "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None",
                 "--LabApp.extension_manager=readonly", *options],
                env=machine.environ(**places, **environ), cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log, stderr=log,
            )  # fmt: skip

    def _write_settings(self, settings: Path, home: Path) -> None:
        self.folder.mkdir()
        for name, values in SETTINGS.items():
            path = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        profile = home / ".ipython" / "profile_default"
        profile.mkdir(parents=True)
        (profile / "ipython_config.py").write_text(
            "c.InteractiveShellApp.extensions.append('reserve_gpu')\n"
        )

    @property
    def pid(self) -> int:
        """Return the pid of the server, without a prefix."""
        return self._process.pid

    def url(self, path: str = "lab") -> str:
        """Return the address for a browser, when the server answers."""
        address, token = self.address()
        return f"{address}{path}?token={token}"

    def address(self) -> tuple[str, str]:
        """Return the address of the server and its token, when it answers."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            for path in self._runtime.glob("jpserver-*.json"):
                with suppress(OSError, ValueError):  # incomplete, or already removed
                    about = json.loads(path.read_text())
                    with urllib.request.urlopen(f"{about['url']}api", timeout=LIMIT_S):  # noqa: S310
                        return about["url"], about["token"]
            time.sleep(0.05)

    def write(self, path: str, *cells: str) -> None:
        """Write a notebook file."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(notebook(*cells)))

    def close(self) -> None:
        """Shut down the server with its kernels."""
        self._process.terminate()
        try:
            self._process.wait(LIMIT_S / 4)
        finally:
            self._process.kill()
            self._process.wait(LIMIT_S)


@contextmanager
def browser(lab: Lab, **options: Any) -> Iterator[Page]:
    """Open JupyterLab in a headless Chromium, with options of Playwright."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=LIMIT_MS)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield new_page(chromium, lab, **options)
        chromium.close()


def new_page(chromium: Browser, lab: Lab, path: str = "lab", **options: Any) -> Page:
    """Open a server's JupyterLab, or another path, in a running browser."""
    page = chromium.new_page(**options)
    page.set_default_timeout(LIMIT_MS)
    page.goto(f"{lab.url(path)}&reset")  # without the notebooks that were open
    page.wait_for_function("window.jupyterapp?.restored.then(() => true)")
    return page


def show_theme(page: Page, theme: str) -> None:
    """Switch JupyterLab to the light or dark theme."""
    page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
    page.wait_for_function(
        "is => document.body.dataset.jpThemeLight === is", arg=str(theme == "light").lower()
    )
    page.locator("#jupyterlab-splash").wait_for(state="detached")


class Notebook:
    """An open notebook in a browser, on the right side of another one if `left` is given."""

    def __init__(self, page: Page, path: str, *, left: Notebook | None = None) -> None:
        self.page = page
        mode = {"mode": "split-right", "ref": left.id} if left else {}
        self.id: str = page.evaluate(OPEN, [path, mode])
        self.panel = page.locator(f'[id="{self.id}"]')

    def close(self) -> None:
        """Shut down its kernel and close it, unsaved."""
        self.page.evaluate(CLOSE, self.id)

    def bring_to_front(self) -> None:
        """Show its tab."""
        self.page.evaluate("id => window.jupyterapp.shell.activateById(id)", self.id)

    def run(self, cell: int) -> None:
        """Start a cell with the keyboard."""
        self.source(cell).click()
        self.page.keyboard.press("Control+Enter")

    def execute(self, cell: int) -> str:
        """Run a cell, wait for its end, and return its output."""
        self.run(cell)
        return self.finish(cell)

    def finish(self, cell: int) -> str:
        """Wait for the end of a cell, and return its output."""
        from playwright.sync_api import expect

        expect(self._cell(cell).locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]:"))
        return self.shown(cell)

    def shown(self, cell: int) -> str:
        """Return the visible output of a cell."""
        text: str = self.outputs(cell).inner_text()
        return text.strip()

    def see(self, cell: int, text: str) -> str:
        """Wait until the output of a cell contains the pattern, and return the output."""
        from playwright.sync_api import expect

        expect(self.outputs(cell)).to_contain_text(re.compile(text))
        return self.shown(cell)

    def outputs(self, cell: int) -> Locator:
        """Return the output area of a cell."""
        return self._cell(cell).locator(".jp-Cell-outputArea")

    def interrupt(self) -> None:
        """Interrupt the kernel with its shortcut."""
        self._activate()
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("i")
        self.page.keyboard.press("i")

    def restart(self) -> None:
        """Restart the kernel with its shortcut, and wait until it is ready."""
        self._activate()
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("0")
        self.page.keyboard.press("0")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        self.page.wait_for_function(
            "jupyterapp.shell.currentWidget.sessionContext.ready.then(() => "
            "jupyterapp.shell.currentWidget.sessionContext.session.kernel.info.then(() => true))"
        )

    def shut_down(self) -> None:
        """Shut down the kernel, as the menu does."""
        self._command("kernelmenu:shutdown")

    def source(self, cell: int) -> Locator:
        """Return the editor of a cell."""
        return self._cell(cell).locator(".cm-content")

    def contrasts(self, cell: int) -> list[tuple[str, float]]:
        """Return each text in the output of a cell, and its contrast (WCAG 2)."""
        found: list[tuple[str, float]] = self.outputs(cell).evaluate(CONTRASTS)
        return found

    def bars(self, cell: int) -> list[str]:
        """Return the colors of the bars in the output of a cell."""
        return [bar_color(bar) for bar in self.outputs(cell).locator("meter").all()]

    def cut_off(self, cell: int) -> list[str]:
        """Return the texts in the output of a cell that are truncated."""
        found: list[str] = self.outputs(cell).evaluate(CUT_OFF)
        return found

    def _cell(self, number: int) -> Locator:
        return self.panel.locator(".jp-Notebook-cell").nth(number)

    def _activate(self) -> None:
        """Make this the current notebook for shortcuts and menus."""
        self.panel.locator(".jp-Notebook").focus()
        self.page.wait_for_function(
            "id => window.jupyterapp.shell.currentWidget.id === id", arg=self.id
        )

    def _command(self, name: str) -> None:
        self._activate()
        self.page.evaluate("name => window.jupyterapp.commands.execute(name)", name)


def bar_color(bar: Locator) -> str:
    """Return the color of the filled end of a bar: green, amber or red."""
    from PIL import Image

    picture = Image.open(BytesIO(bar.screenshot())).convert("RGB")
    pixel = picture.getpixel((4, picture.height // 2))
    assert isinstance(pixel, tuple)
    red, green, _ = pixel
    return "green" if red < green else "amber" if green > red * 0.68 else "red"


@contextmanager
def opening(lab: Lab, page: Page, folder: str) -> Iterator[Callable[..., Notebook]]:
    """Yield a function that opens a notebook with these cells; close the notebooks at the end.

    Args:
        lab: The server.
        page: JupyterLab in the browser.
        folder: A new folder for the notebooks, because JupyterLab remembers paths.
    """
    with ExitStack() as opened:

        def open_one(name: str, *cells: str, left: Notebook | None = None) -> Notebook:
            path = f"{folder}/{name}"
            lab.write(path, *cells)
            notebook = Notebook(page, path, left=left)
            opened.callback(notebook.close)
            return notebook

        yield open_one


def notebook(*cells: str) -> dict[str, Any]:
    """Return the content of a notebook file."""
    return {
        "cells": [
            {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
            | {"source": code, "id": f"cell-{number}"}
            for number, code in enumerate(cells)
        ],
        "metadata": {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


OPEN = """async ([path, options]) => {
    const widget = await window.jupyterapp.commands.execute(
        'docmanager:open', {path, factory: 'Notebook', options});
    await widget.context.ready;
    await widget.sessionContext.ready;
    await widget.sessionContext.session.kernel.info;
    return widget.id;
}"""
CLOSE = """async id => {
    const [widget] = [...window.jupyterapp.shell.widgets('main')].filter(one => one.id === id);
    await widget.sessionContext.shutdown();
    widget.dispose();  // close() would ask what to do with unsaved changes
}"""
CUT_OFF = """area => [area, ...area.querySelectorAll('*')]
    .filter(one => one.clientWidth && one.scrollWidth > one.clientWidth + 1)
    .map(one => one.innerText)"""

# https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio
CONTRASTS = """area => {
    const parse = colour => {
        const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number);
        return [r, g, b, a];
    };
    const over = (top, bottom) => [0, 1, 2].map(i => top[i] * top[3] + bottom[i] * (1 - top[3]));
    const behind = element => {
        if (!element) return [255, 255, 255, 1];
        const own = parse(getComputedStyle(element).backgroundColor);
        return own[3] === 1 ? own : [...over(own, behind(element.parentElement)), 1];
    };
    const luminance = colour => {
        const [r, g, b] = colour.map(value => value / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const found = [];
    const opacity = element => element === area
        ? 1 : getComputedStyle(element).opacity * opacity(element.parentElement);
    const texts = document.createTreeWalker(area, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const text = texts.currentNode.textContent.trim();
        const element = texts.currentNode.parentElement;
        if (!text || !element.getClientRects().length) continue;
        const back = behind(element);
        const ink = parse(getComputedStyle(element).color);
        const front = over([ink[0], ink[1], ink[2], ink[3] * opacity(element)], back);
        const [low, high] = [luminance(front), luminance(back)].sort((a, b) => a - b);
        found.push([text, (high + 0.05) / (low + 0.05)]);
    }
    return found;
}"""
