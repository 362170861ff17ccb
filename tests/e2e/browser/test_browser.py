"""The magic in JupyterLab, in a real browser."""

from __future__ import annotations

import json
import re
import sys
from contextlib import closing, contextmanager
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


def test_restart(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """After a restart with JupyterLab's button, a cell names the kept GPU and reserves it again."""
    on_lab.write(ONE * 2)
    notebook = open_notebook(
        "train.ipynb", "%reserve_gpu 1", "1", "%reserve_gpu --status", "%reserve_gpu"
    )
    notebook.execute(0)
    with holder(on_lab, "'0'"):
        notebook.restart()
        notebook.execute(1)
        kept = notebook.see(1, "GPU1 is kept for this kernel until ")
        assert kept.rstrip().endswith("%reserve_gpu")
        assert "GPU1 is kept for this kernel until " in notebook.execute(2)
        assert_legible(notebook, 2)
        assert notebook.execute(3).splitlines()[-1] == "CUDA_VISIBLE_DEVICES = '1'"


def test_end(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """The output of the cell shows the end of the lease, and later that it has ended."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu --for 8s")
    assert "GPU0 is yours until " in notebook.execute(0)
    shown = notebook.see(0, "The reservation of GPU0 ended at ")
    assert "is yours" not in shown
    assert shown.rstrip().endswith("%reserve_gpu")
    assert_legible(notebook, 0)


def test_two_notebooks(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """Two notebooks that run at the same time get different GPUs."""
    on_lab.write(ONE * 2)
    left = open_notebook("left.ipynb", "%reserve_gpu")
    right = open_notebook("right.ipynb", "%reserve_gpu", left=left)
    left.run(0)
    right.run(0)
    lines = [notebook.finish(0).splitlines()[-1] for notebook in (left, right)]
    assert sorted(lines) == ["CUDA_VISIBLE_DEVICES = '0'", "CUDA_VISIBLE_DEVICES = '1'"]


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


# For each memory cell: the number of lines of its text, and the right edge of the text.
TEXT_BOXES = """cells => cells.map(cell => {
    const range = document.createRange();
    range.selectNodeContents(cell.querySelector('span') ?? cell);
    const boxes = [...range.getClientRects()];
    return [new Set(boxes.map(box => box.top)).size, Math.round(boxes.at(-1)?.right)];
})"""


@pytest.mark.parametrize("width", [700, 1000])
def test_narrow_window(on_lab: Machine, open_notebook: Callable[..., Notebook], width: int) -> None:
    """In a narrow window, numbers stay on one line, are aligned, and nothing is truncated."""
    notebook = open_notebook("mine.ipynb", "%reserve_gpu --status", "%reserve_gpu")
    note = "for the thesis, until Friday evening; then it is all yours"
    with holder(on_lab, f"0, note={note!r}") as child:
        on_lab.write(f"{ONE}compute {child.pid} 40000\n{ONE}compute 4321000 9000\n")
        notebook.page.set_viewport_size({"width": width, "height": 900})
        for cell in (0, 1):
            notebook.execute(cell)
            boxes = notebook.outputs(cell).locator("td:nth-child(2)").evaluate_all(TEXT_BOXES)
            assert [lines for lines, _ in boxes] == [1, 1]
            assert len({end for _, end in boxes}) == 1
            assert notebook.cut_off(cell) == []
    notebook.page.set_viewport_size({"width": 1400, "height": 900})


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


def test_notes_are_escaped(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """The display of a wait shows another user's note as text, not HTML."""
    on_lab.write(ONE)
    notebook = open_notebook("mine.ipynb", "%reserve_gpu --wait")
    with holder(on_lab, f"note={HOSTILE!r}"):
        notebook.run(0)
        assert HOSTILE in notebook.see(0, "Waiting for")
        states = notebook.outputs(0).locator("b, script").all_inner_texts()
        assert states == ["reserved"]
    notebook.finish(0)


def test_interrupted_wait(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """An interrupt ends a wait, and no GPU is visible."""
    on_lab.write(ONE)
    notebook = open_notebook("mine.ipynb", "%reserve_gpu --wait", VARIABLES)
    with holder(on_lab):
        notebook.run(0)
        notebook.see(0, "Waiting for a GPU")
        notebook.interrupt()
        assert notebook.finish(0).startswith("Stopped waiting")
    assert notebook.execute(1) == "['']"
    assert_legible(notebook, 0)


def test_wait_with_a_timeout(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """After its timeout, a wait shows the holder, without the display of the wait."""
    on_lab.write(ONE)
    notebook = open_notebook("mine.ipynb", "%reserve_gpu --wait 1.5s")
    with holder(on_lab) as child:
        shown = notebook.execute(0)
    head, *_, error = filter(None, map(str.strip, shown.splitlines()))
    assert head == error
    assert error.startswith("Timed out after 1.5 s.")
    assert f"train.ipynb (pid {child.pid})" in shown
    assert f"!reserve-gpu release {child.pid}" in shown
    assert "Waiting" not in shown


def test_refusal_stops_run_all(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """A refusal has no traceback, and stops Run All."""
    on_lab.write(f"{ONE}compute 4321000 3500")
    # JupyterLab sends the second cell a moment later, and a kernel releases what it has got then.
    slow = "import time; time.sleep(2)\n%reserve_gpu"
    notebook = open_notebook("mine.ipynb", slow, "print('went on')")
    notebook.run_all()
    shown = notebook.finish(0)
    assert re.search(r"\b0\b[^:]*\bbusy\b[^:]*no reservation: pid 4321000\n", shown)
    assert "Traceback" not in shown
    assert "No free GPU" in shown.splitlines()[-1]
    assert notebook.shown(1) == ""
    assert_legible(notebook, 0)


def test_mistake(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """A mistake in the line is reported in one line."""
    notebook = open_notebook("mine.ipynb", "%reserve_gpu --wait soon")
    (line,) = notebook.execute(0).splitlines()
    assert line.startswith("UsageError: 'soon'")


def test_tab_completes_an_option(open_notebook: Callable[..., Notebook]) -> None:
    """Tab after the start of an option completes it."""
    from playwright.sync_api import expect

    notebook = open_notebook("mine.ipynb", "")
    assert notebook.offered(0, "%reserve_gpu --st") == ["--status"]
    notebook.page.keyboard.press("Enter")
    expect(notebook.source(0)).to_have_text("%reserve_gpu --status")


@pytest.mark.parametrize("width", [420, 1200])
def test_page_fits_the_window(on_lab: Machine, page: Page, width: int) -> None:
    """The status as a page fits the window, even that of a phone."""
    on_lab.write(ONE * 3)
    with holder(on_lab, "0, note='for the thesis, until Friday evening; then it is all yours'"):
        shown = on_lab.command(sys.executable, "-m", "reserve_gpu", "status", "--format", "html")
    assert page.context.browser
    with closing(page.context.browser.new_page(viewport={"width": width, "height": 800})) as phone:
        phone.set_content(shown.stdout)
        assert phone.evaluate("document.documentElement.scrollWidth") == width
        assert phone.locator("h1").inner_text().startswith("GPUs of ")
