"""The magic in JupyterLab, in a real browser."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.support.lab import (
    CHROMIUM,
    THEMES,
    Lab,
    Notebook,
    browser,
    notebook,
    opening,
    show_theme,
)
from tests.support.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Page

    from tests.support.machine import Child

pytestmark = [
    pytest.mark.needs("browser"),
    pytest.mark.skipif(not CHROMIUM, reason="the extra `browser` also needs Debian's chromium"),
]

ONE = "gpu\n  name NVIDIA A100-SXM4-80GB\n  memory 81920\n"
VARIABLES = "import os; print([os.environ.get('CUDA_VISIBLE_DEVICES')])"
LEGIBLE = 4.5  # contrast of text and background, WCAG 2.2 AA
HOSTILE = "<b>bold</b><script>document.title = 'gotcha'</script>"


@pytest.fixture(scope="module")
def on_lab(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Create the machine that JupyterLab runs on."""
    return Machine(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def lab(on_lab: Machine) -> Iterator[Lab]:
    lab = Lab(on_lab)
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator[Page]:
    with browser(lab, viewport={"width": 1400, "height": 900}) as page:
        yield page


@pytest.fixture
def open_notebook(
    lab: Lab, page: Page, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Notebook]]:
    """Return a function that opens a notebook; close all notebooks at the end."""
    with opening(lab, page, request.node.name) as open_one:
        yield open_one


@contextmanager
def holder(machine: Machine, arguments: str = "") -> Iterator[Child]:
    """Reserve a GPU for another notebook."""
    with machine.child(JPY_SESSION_NAME="/home/alice/train.ipynb") as child:
        assert not child.reserve(arguments).error
        yield child


def assert_legible(notebook: Notebook, cell: int) -> None:
    """Assert that the output is legible in both themes and nothing is truncated."""
    for theme in THEMES:
        show_theme(notebook.page, theme)
        contrasts = notebook.contrasts(cell)
        assert contrasts
        assert [(theme, *one) for one in contrasts if one[1] < LEGIBLE] == []
    assert notebook.cut_off(cell) == []
    show_theme(notebook.page, "light")


def test_reserve(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """The cell shows the GPU and its variables, and the next cell has the variables."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu", VARIABLES, "%reserve_gpu --check")
    assert "CUDA_VISIBLE_DEVICES = '0'" in notebook.execute(0).splitlines()
    assert notebook.execute(1) == "['0']"
    assert notebook.execute(2)
    assert_legible(notebook, 0)
    assert_legible(notebook, 2)


def test_status(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """The status has a row with the state and the holder of each GPU, and shows notes as text."""
    on_lab.write(ONE * 6)
    notebook = open_notebook("mine.ipynb", "%reserve_gpu 0", "%reserve_gpu --status")
    notebook.execute(0)
    with holder(on_lab, f"2, note={HOSTILE!r}") as child:
        on_lab.write(
            f"{ONE}{ONE}{ONE}{ONE}compute {child.pid} 40000\n{ONE}{ONE}memory none\n"
            "fail nvmlDeviceGetHandleByIndex_v2 4 15\n"
            "fail nvmlDeviceGetComputeRunningProcesses_v3 5 3\n"
        )
        notebook.execute(1)
    rows = notebook.outputs(1).locator("tbody tr").all_inner_texts()
    expected = [
        r"reserved.*mine\.ipynb",
        "free",
        r"reserved.*train\.ipynb.*" + re.escape(HOSTILE),
        rf"39\.1 of 80\.0 GiB.*busy.*pid {child.pid}",
        "broken",
        "unknown",
    ]
    for index, (row, pattern) in enumerate(zip(rows, expected, strict=True)):
        assert re.match(rf"{index}\b.*\b{pattern}", " ".join(row.split())), row
    assert notebook.page.title() != "gotcha"
    assert_legible(notebook, 1)


def test_untrusted_notebook(on_lab: Machine, lab: Lab, page: Page) -> None:
    """In an untrusted notebook, a bar is green, amber or red, depending on its memory."""
    with on_lab.child() as child:
        used = "".join(f"{ONE}compute {child.pid} {mib}\n" for mib in (12288, 60000, 79000))
        on_lab.write(used)
        html = child.run("reserve_gpu.status()._repr_html_()").value
    content = notebook("1")
    content["cells"][0]["outputs"] = [
        {"output_type": "display_data", "data": {"text/html": html}, "metadata": {}}
    ]
    (lab.folder / "saved.ipynb").write_text(json.dumps(content))
    saved = Notebook(page, "saved.ipynb")
    for theme in THEMES:
        show_theme(page, theme)
        assert saved.bars(0) == ["green", "amber", "red"], theme
    show_theme(page, "light")
    saved.close()


def test_wait_for_another_notebook(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """One display counts the seconds of a wait, and is replaced when the other kernel ends."""
    on_lab.write(ONE)
    left = open_notebook("left.ipynb", "%reserve_gpu")
    right = open_notebook("right.ipynb", "print('before')\n%reserve_gpu --wait", left=left)
    left.execute(0)
    right.run(0)
    for seconds in (1, 2):
        waiting = right.see(0, rf"next in the queue, {seconds} s so far")
        assert waiting.count("Waiting for a GPU") == 1
    assert re.search(r"\b0\b[^:]*\breserved\b[^:]*\w+, left\.ipynb \(pid \d+\) for \d+ s", waiting)
    assert_legible(right, 0)
    left.shut_down()
    before, *lines = right.finish(0).split("\n", 1)
    assert before == "before"
    assert re.match(r"Waited for \d+ s\.\nReserving GPU0: ", lines[0].strip())
    assert lines[0].endswith("CUDA_VISIBLE_DEVICES = '0'")
