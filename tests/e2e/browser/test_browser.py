"""%reserve_gpu in JupyterLab, in a real browser, as a person sees and uses it."""

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
    """Return the machine on which JupyterLab runs."""
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
    """Open a notebook with these cells, beside another one; all are closed at the end."""
    with opening(lab, page, request.node.name) as open_one:
        yield open_one


@contextmanager
def holder(machine: Machine, arguments: str = "") -> Iterator[Child]:
    """Let somebody else reserve a GPU in a notebook of their own."""
    with machine.child(JPY_SESSION_NAME="/home/alice/train.ipynb") as child:
        assert not child.reserve(arguments).error
        yield child


def check_looks(notebook: Notebook, cell: int) -> None:
    """Return what is below the cell can be read in both themes, and nothing of it is cut off."""
    for theme in THEMES:
        show_theme(notebook.page, theme)
        contrasts = notebook.contrasts(cell)
        assert contrasts
        assert [(theme, *one) for one in contrasts if one[1] < LEGIBLE] == []
    assert notebook.cut_off(cell) == []
    show_theme(notebook.page, "light")


def test_reserve(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """The cell shows which GPU the notebook has and its variables, and the next cell has them."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu", VARIABLES)
    notebook.run(0)
    assert notebook.finish(0).splitlines() == [
        "Reserving GPU0: 0000:01:00.0 16x NVIDIA A100-SXM4-80GB (VBIOS 86.07.22.00.A8)",
        "CUDA_DEVICE_MEMORY = '81920'",
        "CUDA_DEVICE_ORDER = 'PCI_BUS_ID'",
        "CUDA_VISIBLE_DEVICES = '0'",
    ]
    notebook.run(1)
    assert notebook.finish(1) == "['0']"
    check_looks(notebook, 0)


def test_a_restart(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """After a restart by JupyterLab's button a cell says what is kept, and gets it by asking."""
    on_lab.write(ONE * 2)
    notebook = open_notebook("train.ipynb", "%reserve_gpu 1", "1 + 1", "%reserve_gpu --status")
    notebook.run(0)
    notebook.finish(0)
    with holder(on_lab, "'0'"):
        notebook.restart()
        notebook.run(1)
        notebook.finish(1)
        kept = notebook.see(1, "GPU1 is kept for this kernel until ")
        assert kept.rstrip().endswith("To reserve it again:\n%reserve_gpu")
        notebook.run(2)
        shown = notebook.finish(2)
        assert "kept for its restart (" in shown
        assert "GPU1 is kept for this kernel until " in shown
        check_looks(notebook, 2)
        notebook.run(0)
        assert notebook.finish(0).splitlines()[-1] == "CUDA_VISIBLE_DEVICES = '1'"


def test_the_end_is_told(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """The cell that reserved for a time says until when; later its output says that it is over."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu --for 8s")
    notebook.run(0)
    assert "GPU0 is yours until " in notebook.finish(0)
    shown = notebook.see(0, "The reservation of GPU0 ended at ")
    assert "is yours" not in shown
    assert "No GPU is visible to this notebook now. To get one:" in shown
    assert shown.rstrip().endswith("%reserve_gpu")
    check_looks(notebook, 0)


def test_two_notebooks_side_by_side(
    on_lab: Machine, open_notebook: Callable[..., Notebook]
) -> None:
    """Two notebooks that are started together get different GPUs."""
    on_lab.write(ONE * 2)
    left = open_notebook("left.ipynb", "%reserve_gpu")
    right = open_notebook("right.ipynb", "%reserve_gpu", beside=left)
    left.run(0)
    right.run(0)
    lines = [notebook.finish(0).splitlines()[-1] for notebook in (left, right)]
    assert sorted(lines) == ["CUDA_VISIBLE_DEVICES = '0'", "CUDA_VISIBLE_DEVICES = '1'"]


def test_status(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """The status has a row for each GPU with its state and who has it; notes stay text."""
    on_lab.write(ONE * 6)
    notebook = open_notebook("mine.ipynb", "%reserve_gpu 0", "%reserve_gpu --status")
    notebook.run(0)
    notebook.finish(0)
    with holder(on_lab, f"2, note={HOSTILE!r}") as child:
        on_lab.write(
            f"{ONE}{ONE}{ONE}{ONE}compute {child.pid} 40000\n{ONE}{ONE}memory none\n"
            "fail nvmlDeviceGetHandleByIndex_v2 4 15\n"
            "fail nvmlDeviceGetComputeRunningProcesses_v3 5 3\n"
        )
        notebook.run(1)
        notebook.finish(1)
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


def test_status_is_legible(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """The status and a check can be read in both themes."""
    on_lab.write(
        f"{ONE}{ONE}{ONE}compute 4321000 40000\n{ONE}{ONE}memory none\n"
        "fail nvmlDeviceGetHandleByIndex_v2 3 15\n"
        "fail nvmlDeviceGetComputeRunningProcesses_v3 4 3\n"
    )
    lines = "%reserve_gpu 0", "%reserve_gpu --status", "%reserve_gpu --check"
    notebook = open_notebook("mine.ipynb", *lines)
    for cell in range(len(lines)):
        notebook.run(cell)
        assert notebook.finish(cell)
    check_looks(notebook, 1)
    check_looks(notebook, 2)


# For each memory cell, the number of lines that its text takes, and where the text ends.
TEXT_BOXES = """cells => cells.map(cell => {
    const range = document.createRange();
    range.selectNodeContents(cell.querySelector('span') ?? cell);
    const boxes = [...range.getClientRects()];
    return [new Set(boxes.map(box => box.top)).size, Math.round(boxes.at(-1)?.right)];
})"""


@pytest.mark.parametrize("width", [700, 1000])
def test_a_narrow_window(
    on_lab: Machine, open_notebook: Callable[..., Notebook], width: int
) -> None:
    """In a narrow window, numbers stay on one line, end at one edge, and nothing is cut off."""
    notebook = open_notebook("mine.ipynb", "%reserve_gpu --status", "%reserve_gpu")
    note = "for the thesis, until Friday evening; then it is all yours"
    with holder(on_lab, f"0, note={note!r}") as child:
        on_lab.write(f"{ONE}compute {child.pid} 40000\n{ONE}compute 4321000 9000\n")
        notebook.page.set_viewport_size({"width": width, "height": 900})
        for cell in (0, 1):
            notebook.run(cell)
            notebook.finish(cell)
            boxes = notebook.outputs(cell).locator("td:nth-child(2)").evaluate_all(TEXT_BOXES)
            assert [lines for lines, _ in boxes] == [1, 1]
            assert len({end for _, end in boxes}) == 1
            assert notebook.cut_off(cell) == []
    notebook.page.set_viewport_size({"width": 1400, "height": 900})


def test_bars_of_a_notebook_that_is_not_trusted(on_lab: Machine, lab: Lab, page: Page) -> None:
    """In saved outputs, which Jupyter cleans, much memory is red, some amber, and little green."""
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


def test_status_beside_another_notebook(
    on_lab: Machine, open_notebook: Callable[..., Notebook]
) -> None:
    """Nothing of the status is cut off where two notebooks are side by side."""
    on_lab.write(ONE * 2)
    left = open_notebook("left.ipynb", "%reserve_gpu", "%reserve_gpu --status")
    open_notebook("right.ipynb", "", beside=left)
    left.run(0)
    left.finish(0)
    left.run(1)
    left.finish(1)
    assert left.cut_off(1) == []


def test_waiting_for_the_other_notebook(
    on_lab: Machine, open_notebook: Callable[..., Notebook]
) -> None:
    """One display counts the seconds, and makes room for the GPU once the other kernel ends."""
    on_lab.write(ONE)
    left = open_notebook("left.ipynb", "%reserve_gpu")
    right = open_notebook("right.ipynb", "print('before')\n%reserve_gpu --wait", beside=left)
    left.run(0)
    left.finish(0)
    right.run(0)
    for seconds in (1, 2):
        waiting = right.see(0, rf"next in the queue, {seconds} s so far")
        assert waiting.count("Waiting for a GPU") == 1
    assert re.search(r"\b0\b[^:]*\breserved\b[^:]*\w+, left\.ipynb \(pid \d+\) for \d+ s", waiting)
    check_looks(right, 0)
    left.shut_down()
    before, *lines = right.finish(0).split("\n", 1)
    assert before == "before"
    assert re.match(r"Waited for \d+ s\.\nReserving GPU0: ", lines[0].strip())
    assert lines[0].endswith("CUDA_VISIBLE_DEVICES = '0'")


def test_what_others_write_stays_text(
    on_lab: Machine, open_notebook: Callable[..., Notebook]
) -> None:
    """A note that another user wrote is shown as it was typed, whatever is in it."""
    on_lab.write(ONE)
    notebook = open_notebook("mine.ipynb", "%reserve_gpu --wait")
    with holder(on_lab, f"note={HOSTILE!r}"):
        notebook.run(0)
        assert HOSTILE in notebook.see(0, "Waiting for")
        states = notebook.outputs(0).locator("b, script").all_inner_texts()
        assert states == ["reserved"]
    notebook.finish(0)


def test_interrupting_a_wait(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """The kernel's interrupt ends a wait with one line, and no GPU is visible."""
    on_lab.write(ONE)
    notebook = open_notebook("mine.ipynb", "%reserve_gpu --wait", VARIABLES)
    with holder(on_lab):
        notebook.run(0)
        notebook.see(0, "Waiting for a GPU")
        notebook.interrupt()
        assert notebook.finish(0) == (
            "Stopped waiting; nothing is reserved. No GPU is visible to this notebook.\n"
            "Your place in the queue is kept for 2 min; the same request returns to it."
        )
    notebook.run(1)
    assert notebook.finish(1) == "['']"
    check_looks(notebook, 0)


def test_a_wait_that_runs_out(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """After its limit a wait shows who has the GPU, and nothing of the display while it waited."""
    on_lab.write(ONE)
    notebook = open_notebook("mine.ipynb", "%reserve_gpu --wait 1.5s")
    with holder(on_lab) as child:
        notebook.run(0)
        shown = notebook.finish(0)
    head, asked, left, *picture, error = filter(None, map(str.strip, shown.splitlines()))
    assert f"train.ipynb (pid {child.pid})" in picture[-1]
    assert "Waiting" not in shown
    own = f"You hold GPU0 in train.ipynb (pid {child.pid})"
    assert asked == f"{own}. To release it: !reserve-gpu release {child.pid}"
    assert left == "No GPU is visible to this notebook."
    assert error == "Timed out after 1.5 s. No free GPU: GPU0 is reserved by your train.ipynb."
    assert head == error


def test_an_error_stops_run_all(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """Nothing free is said without a traceback, and Run All stops there."""
    on_lab.write(f"{ONE}compute 4321000 3500")
    # JupyterLab sends the second cell a moment later, and a kernel releases what it has got then.
    slow = "import time; time.sleep(2)\n%reserve_gpu"
    notebook = open_notebook("mine.ipynb", slow, "print('went on')")
    notebook.run_all()
    shown = notebook.finish(0)
    assert re.search(r"\b0\b[^:]*\bbusy\b[^:]*no reservation: pid 4321000\n", shown)
    assert "Traceback" not in shown
    assert shown.endswith("\nNo free GPU: GPU0 is busy.")
    assert notebook.shown(1) == ""
    check_looks(notebook, 0)


def test_a_mistake_is_one_line(on_lab: Machine, open_notebook: Callable[..., Notebook]) -> None:
    """A mistake in the line is said in one line."""
    notebook = open_notebook("mine.ipynb", "%reserve_gpu --wait soon")
    notebook.run(0)
    shown = notebook.finish(0)
    assert shown == "UsageError: 'soon' is not a valid duration. Examples: 90s, 10m, 2h, 1h30m."


def test_tab_offers_options(open_notebook: Callable[..., Notebook]) -> None:
    """Tab behind the magic shows its options, and none of Python's names."""
    notebook = open_notebook("mine.ipynb", "")
    offers = notebook.offered(0, "%reserve_gpu ")
    assert offers[0] == "--count"
    kinds = notebook.page.locator(".jp-Completer-typeExtended").all_inner_texts()
    assert {*kinds} == {"option", ""}
    # JupyterLab itself adds the words of the notebook.
    assert {offer for offer in offers if not offer.startswith("--")} <= {"%", "reserve_gpu"}


def test_tab_completes_an_option(open_notebook: Callable[..., Notebook]) -> None:
    """Tab after the beginning of an option offers it, and Enter takes it."""
    from playwright.sync_api import expect

    notebook = open_notebook("mine.ipynb", "")
    assert notebook.offered(0, "%reserve_gpu --st") == ["--status"]
    notebook.page.keyboard.press("Enter")
    expect(notebook.source(0)).to_have_text("%reserve_gpu --status")


@pytest.mark.parametrize("width", [420, 1200])
def test_the_page_fits(on_lab: Machine, page: Page, width: int) -> None:
    """The status as a page is as wide as the window, also that of a phone, whatever notes say."""
    on_lab.write(ONE * 3)
    with holder(on_lab, "0, note='for the thesis, until Friday evening; then it is all yours'"):
        shown = on_lab.command(sys.executable, "-m", "reserve_gpu", "status", "--format", "html")
    assert page.context.browser
    with closing(page.context.browser.new_page(viewport={"width": width, "height": 800})) as phone:
        phone.set_content(shown.stdout)
        assert phone.evaluate("document.documentElement.scrollWidth") == width
        assert phone.locator("h1").inner_text().startswith("GPUs of ")
