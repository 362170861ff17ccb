"""The JupyterLab extension: the answers of Jupyter's server, and the page in a real browser."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests import driver
from tests.support.lab import (
    CHROMIUM,
    CONTRASTS,
    THEMES,
    Lab,
    Notebook,
    browser,
    new_page,
    opening,
    show_theme,
)
from tests.support.locked import locked, make_older
from tests.support.machine import LIMIT_S, Machine
from tests.support.processes import wait_for
from tests.support.reserving import MOMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Locator, Page

pytestmark = [
    pytest.mark.needs("browser"),
    pytest.mark.needs("lab"),
    pytest.mark.skipif(not CHROMIUM, reason="the extra `browser` also needs Debian's chromium"),
]

ONE = "gpu\n  name NVIDIA A100-SXM4-80GB\n  memory 81920\n"
MOST_RELEASES = 8  # at a time, in handlers.py
VARIABLES = "import os; print([os.environ.get('CUDA_VISIBLE_DEVICES')])"
LEGIBLE = 4.5  # contrast of text and background, WCAG 2.2 AA


def request(lab: Lab, path: str, body: object = None, *, token: str | None = None) -> Any:
    """Send a request to a Jupyter server and return its JSON; a body makes it a POST."""
    address, known = lab.address()
    request = urllib.request.Request(  # noqa: S310 - it is the test's own server
        f"{address}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"token {known if token is None else token}"},
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:  # noqa: S310
        return json.load(answer)


def held_gpus(machine: Machine) -> list[str]:
    """Return the lock files of the reserved GPUs."""
    return [name for name in locked(machine.locks) if name.startswith("GPU-")]


@contextmanager
def running_server(machine: Machine, **options: Any) -> Iterator[Lab]:
    """Start a server, and shut it down with its kernels at the end."""
    lab = Lab(machine, **options)
    try:
        yield lab
    finally:
        lab.close()


# -- the server ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_server(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def server(on_server: Machine) -> Iterator[Lab]:
    """Start a server without a browser."""
    with running_server(on_server) as lab:
        yield lab


def fresh_status(lab: Lab) -> Any:
    """Return a status that the server began to read after this call."""
    begun, answers = time.time(), []

    def is_fresh() -> bool:
        answers.append(request(lab, "reserve_gpu/status"))
        return bool(answers[-1]["time"] > begun)

    wait_for(is_fresh, 0.1)
    return answers[-1]


def test_token_is_required(server: Lab) -> None:
    """Without the server's token, a client can neither read the status nor release a GPU."""
    for path, body in (("status", None), ("release", {"pid": 1})):
        with pytest.raises(urllib.error.HTTPError) as refused:
            request(server, f"reserve_gpu/{path}", body, token="wrong")  # noqa: S106
        with refused.value as answer:
            assert answer.code == 403


def test_cross_site_request_is_refused(server: Lab) -> None:
    """A POST with the login cookie but without Jupyter's XSRF token is refused."""
    address, token = server.address()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    opener.open(f"{address}lab?token={token}", timeout=LIMIT_S).close()
    opener.open(f"{address}reserve_gpu/status", timeout=LIMIT_S).close()  # the cookie logs in
    with pytest.raises(urllib.error.HTTPError) as refused:
        opener.open(f"{address}reserve_gpu/release", data=b'{"pid": 1}', timeout=LIMIT_S)
    with refused.value as answer:
        assert answer.code == 403
        assert b"'_xsrf' argument missing" in answer.read()


def test_fifty_clients_share_a_query(on_server: Machine, server: Lab) -> None:
    """The server queries the driver at most every two seconds."""
    on_server.write(ONE)
    fresh_status(server)

    def count_reads() -> int:
        return on_server.calls().count("nvmlShutdown")

    before, begun = count_reads(), time.monotonic()
    until = begun + 5

    def client() -> None:
        while time.monotonic() < until:
            request(server, "reserve_gpu/status")
            time.sleep(0.2)

    clients = [threading.Thread(target=client) for _ in range(50)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    seconds = time.monotonic() - begun
    assert 1 <= count_reads() - before <= seconds / 2 + 1


def test_reading_the_status_is_not_activity(server: Lab) -> None:
    """Reading the status does not count as activity, so idle servers can be stopped."""
    before = request(server, "api/status")["last_activity"]
    fresh_status(server)
    assert request(server, "api/status")["last_activity"] == before


def threads_of(lab: Lab) -> int:
    """Return the number of the server's threads."""
    return psutil.Process(lab.pid).num_threads()


def test_server_stops_while_the_driver_hangs(machine: Machine) -> None:
    """A server stops although releases wait for a hanging driver; others get a Retry-After."""
    with running_server(machine) as lab:
        request(lab, "api/kernels")
        before = threads_of(lab)
        machine.write((driver.SCENARIOS / "hang.txt").read_text())
        refused: list[str | None] = []

        def release() -> None:
            try:
                request(lab, "reserve_gpu/release", {"pid": 1})
            except urllib.error.HTTPError as error:
                with error:
                    refused.append(error.headers["Retry-After"])
            except OSError:  # the server goes away
                pass

        threads = [threading.Thread(target=release) for _ in range(60)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(refused) == len(threads) - MOST_RELEASES, 0.1)
        assert {*refused} == {"5"}
        assert threads_of(lab) < before + 4 * MOST_RELEASES
        lab.close()
        for thread in threads:
            thread.join()


# -- JupyterLab ------------------------------------------------------------------------------------


def write_settings(machine: Machine, **values: object) -> None:
    """Write the extension's settings before JupyterLab starts."""
    folder = machine.home / "settings" / "jupyterlab-reserve-gpu"
    folder.mkdir(parents=True)
    (folder / "plugin.jupyterlab-settings").write_text(json.dumps({"interval": 2, **values}))


@pytest.fixture(scope="module")
def on_lab(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Return the machine on which JupyterLab runs."""
    machine = Machine(tmp_path_factory.mktemp("extension"))
    write_settings(machine)
    return machine


@pytest.fixture(scope="module")
def lab(on_lab: Machine) -> Iterator[Lab]:
    with running_server(on_lab) as lab:
        yield lab


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator[Page]:
    with browser(lab, viewport={"width": 1400, "height": 900}) as page:
        show_panel(page)
        yield page


@pytest.fixture
def open_notebook(
    lab: Lab, page: Page, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Notebook]]:
    """Return a function that opens a notebook; close the notebooks and notifications at the end."""
    with opening(lab, page, request.node.name) as open_one:
        yield open_one
    page.evaluate("jupyterapp.commands.execute('apputils:dismiss-notification', {})")


def show_panel(page: Page) -> None:
    page.evaluate("jupyterapp.commands.execute('reserve-gpu:show')")


def status_item(page: Page) -> Locator:
    """Return the extension's item in the status bar."""
    return page.locator(".jp-ReserveGPU-item")


def panel(page: Page) -> Locator:
    return page.locator(".jp-ReserveGPU-panel")


def own_entry(page: Page, notebook: str) -> Locator:
    """Return the panel's entry of the user's notebook."""
    return panel(page).locator("li", has_text=notebook)


def device_rows(page: Page) -> Locator:
    """Return the rows of this machine's devices."""
    return section(page, "This Machine").locator(".jp-ReserveGPU-row")


def section(page: Page, title: str) -> Locator:
    heading = page.get_by_role("heading", name=title, exact=True)
    return panel(page).locator("section").filter(has=heading)


def buttons(where: Locator) -> list[str]:
    """Return the labels of the buttons."""
    labels: list[str] = where.get_by_role("button").all_inner_texts()
    return labels


def expect_text(where: Locator, pattern: str) -> None:
    """Wait until the element contains the pattern."""
    from playwright.sync_api import expect

    expect(where).to_contain_text(re.compile(pattern))


def has_urgency(page: Page, level: str) -> bool:
    return bool(status_item(page).locator(f"button.jp-mod-{level}").count())


def notification(page: Page, text: str) -> Locator:
    """Open the list of notifications, and wait for the notification with this text."""
    from playwright.sync_api import expect

    message = notifications(page).filter(has=page.get_by_text(re.compile(text)))
    expect(message).to_have_count(1)
    return message


def notifications(page: Page) -> Locator:
    """Open the list of notifications, and return its entries."""
    center = page.locator(".jp-Notification-Center")
    if not center.count():
        page.evaluate("jupyterapp.commands.execute('apputils:display-notifications')")
    return center.locator(".jp-Notification-List-Item")


def test_reserve_and_release(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """A click reserves a GPU for the next cell, and the command palette releases it."""
    on_lab.write(ONE * 2)
    notebook = open_notebook("train.ipynb", VARIABLES, VARIABLES)
    expect_text(status_item(page), "^no GPU")
    status_item(page).get_by_text("Reserve GPU").click()
    notification(page, r"^train\.ipynb has GPU0\.$")
    expect_text(status_item(page), r"^GPU0 · 0.0 of 80.0 GiB$")
    assert has_urgency(page, "calm")
    assert notebook.execute(0) == "['0']"
    page.keyboard.press("Control+Shift+C")
    page.keyboard.type("Release GPU")
    page.keyboard.press("Enter")
    expect_text(status_item(page), "^no GPU")
    assert notebook.execute(1) == "[None]"


def test_no_free_gpu_offers_to_wait(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """If no GPU is free, a click shows the holder and offers to wait, in one notification."""
    from playwright.sync_api import expect

    on_lab.write(ONE)
    with on_lab.child(JPY_SESSION_NAME="other.ipynb") as child:
        assert not child.reserve().error
        open_notebook("train.ipynb", "")
        expect_text(status_item(page), "^no GPU")
        status_item(page).get_by_text("Reserve GPU").click()
        message = notification(page, r"No GPU is free: your other\.ipynb has GPU0\.")
        message.get_by_role("button", name="Wait for GPU").click()
        expect_text(status_item(page), r"^(requesting a GPU|waiting \(first in line\))$")
        expect_text(status_item(page), r"^waiting \(first in line\)$")
        assert buttons(own_entry(page, "train.ipynb")) == ["Stop Waiting"]
        expect(notifications(page)).to_have_count(0)
        child.run("reserve_gpu.release()")
        expect_text(status_item(page), "^GPU0 · ")
        notification(page, r"train\.ipynb got GPU0\.")
        expect(notifications(page)).to_have_count(1)


def test_stop_waiting(on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]) -> None:
    """`Stop Waiting` in the panel ends a wait that a click has started."""
    on_lab.write(ONE)
    with on_lab.child() as child:
        assert not child.reserve().error
        open_notebook("train.ipynb", "")
        expect_text(status_item(page), "^no GPU")
        status_item(page).get_by_text("Reserve GPU").click()
        notification(page, "No GPU is free").get_by_role("button", name="Wait for GPU").click()
        own_entry(page, "train.ipynb").get_by_role("button", name="Stop Waiting").click()
        expect_text(status_item(page), "^no GPU.*Reserve GPU")
        assert page_status(page)["waiting"] == []


def test_handover(on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]) -> None:
    """An idle GPU with a waiter is amber and names the waiter, and a click hands the GPU over."""
    from playwright.sync_api import expect

    on_lab.write(ONE)
    left = open_notebook("left.ipynb", "%reserve_gpu")
    left.execute(0)
    right = open_notebook("right.ipynb", "%reserve_gpu --wait")
    right.run(0)
    expect_text(status_item(page), r"^waiting \(first in line\)$")
    expect_text(own_entry(page, "right.ipynb").last, "Waiting for a GPU, first in line")
    left.bring_to_front()
    expect_text(status_item(page), r"^GPU0 · 0.0 of 80.0 GiB$")  # it has just been reserved
    expect(notifications(page)).to_have_count(0)
    make_reservations_older(on_lab)
    expect_text(
        status_item(page),
        r"^GPU0 · 0.0 of 80.0 GiB · idle; your right\.ipynb is waiting for a GPU$",
    )
    assert has_urgency(page, "near")
    wanted = notification(
        page, r"GPU0 is idle in left\.ipynb, and your right\.ipynb is waiting for a GPU\."
    )
    assert notification_level(wanted) == "warning"
    own_entry(page, "left.ipynb").first.get_by_role("button", name="Release GPU").click()
    expect_text(status_item(page), "^no GPU")
    notifications(page)  # a click elsewhere has closed the list
    expect(wanted).to_have_count(0)
    right.bring_to_front()
    expect_text(status_item(page), "^GPU0 · ")
    notification(page, r"right\.ipynb got GPU0\.")


def test_release_checks_for_waiters(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """`Release All 3 GPUs` in a notification releases nothing after the waiter has gone."""
    on_lab.write(ONE * 3)
    notebook = open_notebook("train.ipynb", "%reserve_gpu -n 3")
    notebook.execute(0)
    make_reservations_older(on_lab)
    with on_lab.child(JPY_SESSION_NAME="small.ipynb") as child:
        child.send("reserve_gpu.reserve(wait=True)")
        message = notification(
            page, "GPU0, GPU1 and GPU2 are idle.*small.ipynb is waiting for a GPU"
        )
        with frozen_status(page):
            child.kill()
            message.get_by_role("button", name="Release All 3 GPUs").click()
            notification(page, "The other process is no longer waiting")
    assert len(held_gpus(on_lab)) == 3


@contextmanager
def frozen_status(page: Page) -> Iterator[None]:
    """Keep the page's status unchanged, except for requests of buttons."""
    last = page.evaluate("fetch(new URL('/reserve_gpu/status', location)).then(a => a.text())")
    address = re.compile(r"reserve_gpu/status\?\d+$")  # JupyterLab adds the time
    page.route(address, lambda route: route.fulfill(body=last, content_type="application/json"))
    try:
        yield
    finally:
        page.unroute(address)


def make_reservations_older(machine: Machine) -> None:
    """Make all reservations an hour old, because no end is shown for a young one."""
    for name in held_gpus(machine):
        make_older(machine.locks / name, 3600)


def notification_level(message: Locator) -> str:
    """Return the displayed level of a notification: info, warning, error or success."""
    classes = message.evaluate("e => [e, ...e.querySelectorAll('*')].map(x => x.className)")
    found = re.search("jp-Notification-Toast-(info|warning|error|success)", str(classes))
    return found[1] if found else str(classes)


def test_release_while_a_cell_runs(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """The panel releases a GPU while a cell runs, and the cell continues."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu\nimport time; time.sleep(1000)")
    notebook.run(0)
    expect_text(status_item(page), "^GPU0 · ")
    own_entry(page, "train.ipynb").get_by_role("button", name="Release GPU").click()
    notification(page, r"Released GPU0 of train\.ipynb")
    expect_text(status_item(page), "^no GPU$|^no GPU")
    assert held_gpus(on_lab) == []
    notebook.interrupt()
    notebook.finish(0)


def test_before_the_end(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """In its last ten minutes, a reservation is amber, and `Extend by 2 h` extends it."""
    from playwright.sync_api import expect

    on_lab.write(ONE * 2)
    notebook = open_notebook("train.ipynb", "%reserve_gpu 1 --for 8m --memory 10GB")
    notebook.execute(0)
    expect_text(
        status_item(page), rf"^GPU1 · 0.0 of 9.3 GiB reserved · until {MOMENT} \(8 min left\)$"
    )
    assert has_urgency(page, "near")
    make_reservations_older(on_lab)
    message = notification(page, rf"train\.ipynb loses GPU1 at {MOMENT}, in less than 10 minutes\.")
    assert notification_level(message) == "warning"
    message.get_by_role("button", name="Extend by 2 h").click()
    expect_text(status_item(page), r"^GPU1 · 0.0 of 9.3 GiB reserved · until [^(]+$")
    notification(page, r"^train\.ipynb has GPU1, until [^,]+\.$")
    expect(notifications(page)).to_have_count(1)
    assert has_urgency(page, "calm")
    (holder,) = page_holders(page)
    assert 7200 < holder["until"] - time.time() < 7200 + 9 * 60


def page_holders(page: Page) -> list[dict[str, Any]]:
    """Return the holders of all devices, as the page gets them."""
    return [holder for device in page_status(page)["devices"] for holder in device["holders"]]


def page_status(page: Page) -> Any:
    """Return a new status, as the page gets it."""
    return page.evaluate(
        "fetch(new URL('/reserve_gpu/status?new=1', location)).then(a => a.json())"
    )


def test_end(on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]) -> None:
    """Notifications announce the last minute and the end of a lease."""
    from playwright.sync_api import expect

    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu --for 20s")
    notebook.execute(0)
    make_reservations_older(on_lab)
    expect_text(status_item(page), r"^GPU0 · .* \(1 min left\)$")
    notification(page, r"train\.ipynb loses GPU0 at .*, in less than a minute\.")
    expect_text(status_item(page), "^no GPU")
    notification(page, rf"train\.ipynb's reservation of GPU0 ended at {MOMENT}\.$")
    expect(notifications(page)).to_have_count(1)


def test_overdue(on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]) -> None:
    """A GPU that CUDA uses after the end of its lease is red, with the time of the end."""
    on_lab.write(ONE)
    cuda = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    notebook = open_notebook("train.ipynb", f"%reserve_gpu --for 5s\n{cuda}")
    notebook.run(0)
    expect_text(status_item(page), rf"^GPU0 · .* · overdue since {MOMENT}$")
    assert has_urgency(page, "over")
    notification(page, rf"ended at {MOMENT}\. The kernel is still using it\.")


def test_restart(on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]) -> None:
    """A GPU that is kept for a restart is amber, and can be reserved again or released."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu", VARIABLES)
    notebook.execute(0)
    notebook.restart()
    expect_text(status_item(page), r"^GPU0 · kept for the restart \(\d\d s left\).*Reserve Again$")
    assert has_urgency(page, "near")
    status_item(page).get_by_text("Reserve Again").click()
    expect_text(status_item(page), "^GPU0 · 0.0 of 80.0 GiB$")
    assert notebook.execute(1) == "['0']"
    notebook.restart()
    expect_text(own_entry(page, "train.ipynb"), r"kept for the restart")
    own_entry(page, "train.ipynb").get_by_role("button", name="Release GPU").click()
    expect_text(status_item(page), "^no GPU")
    assert held_gpus(on_lab) == []


def test_use_beyond_a_part(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """A notebook that uses more than its part is red, with both amounts of memory."""
    on_lab.write(ONE)
    notebook = open_notebook(
        "train.ipynb", "%reserve_gpu --memory 10GiB\nimport os; print(os.getpid())"
    )
    pid = notebook.execute(0).splitlines()[-1]
    on_lab.write(f"{ONE}  compute {pid} 12288\n")
    expect_text(status_item(page), "^GPU0 · 12.0 of 10.0 GiB, over its limit$")
    assert has_urgency(page, "over")


def test_shut_down_a_kernel(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """The panel shuts a kernel down only after the user has confirmed the question."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu")
    notebook.execute(0)
    expect_text(status_item(page), "^GPU0 · 0.0 of 80.0 GiB$")
    end = own_entry(page, "train.ipynb").get_by_role("button", name="Shut Down Kernel")
    end.click()
    expect_text(
        page.locator(".jp-Dialog"),
        r"Shut Down Kernel of train\.ipynb\?"
        r"Everything in its memory will be lost, and GPU0 will be freed\.",
    )
    page.keyboard.press("Enter")
    page.locator(".jp-Dialog").wait_for(state="detached")
    assert len(held_gpus(on_lab)) == 1
    end.click()
    page.locator(".jp-Dialog .jp-mod-warn").click()
    wait_for(lambda: held_gpus(on_lab) == [])
    expect_text(panel(page), "You hold no GPU on this machine")


def test_sixty_four_gpus(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """The panel of 64 GPUs is short and legible, in both themes."""
    on_lab.write(ONE * 64)
    notebook = open_notebook("train.ipynb", "%reserve_gpu 17 --for 8m")
    notebook.execute(0)
    expect_text(panel(page), r"63 of 64 GPUs are free\.")
    assert device_rows(page).count() == 3
    for theme in THEMES:
        show_theme(page, theme)
        for where in (panel(page), status_item(page)):
            contrasts = where.evaluate(CONTRASTS)
            assert contrasts
            assert [(theme, *each) for each in contrasts if each[1] < LEGIBLE] == []
    show_theme(page, "light")


def test_every_holder_of_a_shared_gpu(on_lab: Machine, page: Page) -> None:
    """Each holder of a shared GPU has a line; a tooltip shows the whole of a truncated text."""
    names = ["a-notebook-whose-name-is-longer-than-the-panel-is-wide.ipynb", "fold.ipynb"]
    note = "for the thesis, until Friday at the latest; ask me if you need it before then"
    on_lab.write(ONE)
    with (
        on_lab.child(JPY_SESSION_NAME=f"/home/alice/{names[0]}") as first,
        on_lab.child(JPY_SESSION_NAME=f"/home/alice/{names[1]}") as second,
    ):
        assert not first.reserve(f"memory='10GiB', for_='3h', note={note!r}").error
        assert not second.reserve("memory='32GiB'").error
        lines = device_rows(page).first.locator(".jp-ReserveGPU-line")
        expect_text(lines.nth(1), rf"{names[1]}.*of 32\.0 GiB.*pid {second.pid}$")
        expect_text(lines.nth(0), rf"until {MOMENT} · “{note}” · .*pid {first.pid}$")
        expect_text(device_rows(page).first, r"38\.0 GiB available")
        name = lines.nth(0).locator("span").first
        assert name.evaluate("name => name.scrollWidth > name.clientWidth")
        assert str(name.get_attribute("title")).endswith(f", {names[0]}")


def test_offered_actions(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """The panel and the commands offer a notebook only the actions that apply."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu", "%reserve_gpu --for 2h")
    expect_text(status_item(page), "^no GPU")
    # The panel is updated every few seconds, and might still show an earlier test's reservations.
    wait_for(lambda: offered_actions(page) == (["Reserve GPU"], [True, False]))
    notebook.run(0)
    expect_text(status_item(page), "^GPU0 · ")
    assert offered_actions(page) == (["Release GPU", "Shut Down Kernel"], [False, True])
    notebook.run(1)
    expect_text(status_item(page), "until")
    assert offered_actions(page) == (
        ["Extend by 2 h", "Release GPU", "Shut Down Kernel"],
        [False, True],
    )
    second = open_notebook("second.ipynb", "%reserve_gpu --wait")
    expect_text(own_entry(page, "second.ipynb"), "No GPU")
    assert buttons(own_entry(page, "second.ipynb")) == ["Wait for GPU"]
    second.run(0)
    expect_text(status_item(page), r"^waiting \(first in line\)$")
    assert buttons(own_entry(page, "second.ipynb")) == ["Stop Waiting"]
    expect_text(own_entry(page, "second.ipynb"), r"Waiting for a GPU, first in line · \d+ s so far")
    assert not panel(page).get_by_text(re.compile("Get one|%reserve_gpu")).count()


def offered_actions(page: Page) -> tuple[list[str], list[bool]]:
    """Return the panel's buttons, and whether the commands to reserve and release are enabled."""
    enabled = "name => jupyterapp.commands.isEnabled(name)"
    commands = ("reserve-gpu:reserve", "reserve-gpu:release")
    return buttons(panel(page)), [page.evaluate(enabled, arg=name) for name in commands]


def test_settings_in_front(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """With the settings in front, the page shows and offers nothing for a notebook."""
    from playwright.sync_api import expect

    on_lab.write(ONE * 2)
    notebook = open_notebook("train.ipynb", "")
    expect_text(status_item(page), "^no GPU.*Reserve GPU$")
    page.evaluate("jupyterapp.commands.execute('settingeditor:open')")
    expect_text(status_item(page), "^2 of 2 GPUs free$")
    expect(panel(page).get_by_role("button")).to_have_count(0)
    notebook.bring_to_front()
    expect_text(status_item(page), "^no GPU.*Reserve GPU$")


def test_no_driver(on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]) -> None:
    """Without a driver, the item says so, and the panel shows the reason and the reservations."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu")
    notebook.run(0)
    expect_text(status_item(page), "^GPU0 · ")
    on_lab.write("fail nvmlInitWithFlags * 9\n")
    expect_text(status_item(page), "^GPUs: no answer$")
    expect_text(panel(page).locator(".jp-ReserveGPU-problem"), "driver")
    expect_text(own_entry(page, "train.ipynb"), "GPU0")
    on_lab.write(ONE)
    expect_text(status_item(page), "^GPU0 · ")


# -- servers of other kinds ------------------------------------------------------------------------


@contextmanager
def open_page(page: Page, lab: Lab, path: str = "lab") -> Iterator[Page]:
    """Open the page of another server in the same browser."""
    assert page.context.browser
    with closing(new_page(page.context.browser, lab, path)) as other:
        yield other


def test_notebook_7_below_a_base_url(page: Page, machine: Machine) -> None:
    """In Notebook 7, the item is in the top bar, and the kernel menu reserves and releases."""
    from playwright.sync_api import expect

    machine.write(ONE)
    write_settings(machine)
    options = ["--ServerApp.base_url=/some/where/"]
    with running_server(machine, program="notebook", options=options) as server:
        server.write("train.ipynb", "1")
        with open_page(page, server, "notebooks/train.ipynb") as other:
            expect_text(status_item(other), "^no GPU")
            for command, expected in (
                ("Reserve GPU", "^GPU0 · "),
                ("Release GPU", "^no GPU"),
            ):
                other.locator(".lm-MenuBar-item", has_text="Kernel").click()
                other.locator(".lm-Menu-item", has_text=command).click()
                expect_text(status_item(other), expected)
            other.locator(".lm-MenuBar-item", has_text="Kernel").click()
            other.locator(".lm-Menu-item", has_text="Show GPUs").click()
            expect(panel(other)).to_be_visible()
            expect_text(panel(other), "GPU0 is free")


def test_other_machines(page: Page, machine: Machine) -> None:
    """With a table [hosts], the panel has a section for each machine, with its GPUs or an error."""
    machine.write(ONE * 2)
    write_settings(machine)
    machine.rules.write_text('[hosts]\nlab = ["localhost", "nowhere.invalid"]\n')
    with running_server(machine) as lab, open_page(page, lab) as other:
        expect_text(status_item(other), "^2 of 2 GPUs free$")
        show_panel(other)
        expect_text(section(other, "localhost"), "Both GPUs are free")
        expect_text(section(other, "nowhere.invalid"), "ssh ")


def test_disabled_server_extension(page: Page, machine: Machine) -> None:
    """If the server extension is disabled, the panel shows the command that enables it."""
    machine.write(ONE)
    off = "--ServerApp.jpserver_extensions={'jupyterlab_reserve_gpu': False}"
    with running_server(machine, options=[off]) as lab, open_page(page, lab) as other:
        expect_text(status_item(other), "^GPUs: no answer$")
        status_item(other).locator("button").click()
        expect_text(panel(other), "jupyter server extension enable jupyterlab_reserve_gpu")


def test_broken_package(page: Page, machine: Machine, tmp_path: Path) -> None:
    """If the server cannot import reserve_gpu, the panel shows the error."""
    package = tmp_path / "broken" / "reserve_gpu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('not here')")
    with (
        running_server(machine, environ={"PYTHONPATH": str(package.parent)}) as lab,
        open_page(page, lab) as other,
    ):
        expect_text(status_item(other), "^GPUs: no answer$")
        status_item(other).locator("button").click()
        expect_text(panel(other), r"can't import reserve_gpu \(not here\)")


def test_disabled_notifications(page: Page, machine: Machine) -> None:
    """Disabled notifications are not shown."""
    machine.write(ONE)
    write_settings(machine, tellEnded=False, tellBeforeEnd=False)
    with running_server(machine) as lab, open_page(page, lab) as other:
        lab.write("train.ipynb", "%reserve_gpu --for 5s")
        notebook = Notebook(other, "train.ipynb")
        notebook.run(0)
        expect_text(status_item(other), "^GPU0 · ")
        expect_text(status_item(other), "^no GPU")
        other.evaluate("jupyterapp.commands.execute('apputils:display-notifications')")
        expect_text(other.locator(".jp-Notification-Center"), "No notifications")
