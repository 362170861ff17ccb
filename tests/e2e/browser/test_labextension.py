"""The JupyterLab extension: the answers of Jupyter's server, and the page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
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
    bar_color,
    browser,
    new_page,
    opening,
    show_theme,
)
from tests.support.locked import locked, make_older
from tests.support.machine import LIMIT_S, ROOT, Machine, program
from tests.support.processes import wait_for
from tests.support.reserving import MOMENT
from tests.support.users import DAEMON, NOBODY, for_users

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from jupyter_client.blocking.client import BlockingKernelClient
    from playwright.sync_api import Locator, Page

pytestmark = [
    pytest.mark.needs("browser"),
    pytest.mark.needs("lab"),
    pytest.mark.skipif(not CHROMIUM, reason="the extra `browser` also needs Debian's chromium"),
]

ONE = "gpu\n  name NVIDIA A100-SXM4-80GB\n  memory 81920\n"
PROXY = program("configurable-http-proxy")
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


def delete(lab: Lab, path: str) -> None:
    address, token = lab.address()
    headers = {"Authorization": f"token {token}"}
    request = urllib.request.Request(f"{address}{path}", headers=headers, method="DELETE")  # noqa: S310
    with urllib.request.urlopen(request, timeout=LIMIT_S):  # noqa: S310
        pass


@contextmanager
def running_server(machine: Machine, **options: Any) -> Iterator[Lab]:
    """Start a server, and shut it down with its kernels at the end."""
    lab = Lab(machine, **options)
    try:
        yield lab
    finally:
        lab.close()


@contextmanager
def kernel(machine: Machine, lab: Lab) -> Iterator[tuple[str, BlockingKernelClient]]:
    """Start a kernel of the server; yield its id and its client."""
    from jupyter_client.blocking.client import BlockingKernelClient

    id_ = request(lab, "api/kernels", {"name": "python3"})["id"]
    file = machine.home / "runtime" / f"kernel-{id_}.json"
    wait_for(file.exists)
    client = BlockingKernelClient(connection_file=str(file))
    client.load_connection_file()
    client.start_channels()
    wait_for_answer(client)
    try:
        yield id_, client
    finally:
        client.stop_channels()
        delete(lab, f"api/kernels/{id_}")


def wait_for_answer(client: BlockingKernelClient) -> None:
    """Wait until the kernel answers, even if its heartbeat is late on a busy machine."""
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            client.wait_for_ready(timeout=LIMIT_S)
        except RuntimeError:  # noqa: PERF203 - the same call is tried again
            if time.monotonic() > until:
                raise
        else:
            return


def run_cell(client: BlockingKernelClient, code: str) -> None:
    reply = client.execute_interactive(code, output_hook=lambda _: None, timeout=LIMIT_S)
    assert reply["content"]["status"] == "ok", reply["content"]


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


def test_status_equals_the_command_line(on_server: Machine, server: Lab) -> None:
    """The server returns the JSON of `reserve-gpu status`."""
    on_server.write(ONE * 3)
    shown = on_server.command(sys.executable, "-m", "reserve_gpu", "status", "--json")
    expected, answer = json.loads(shown.stdout), fresh_status(server)
    assert {*answer} - {*expected} == {"failure"}
    assert answer["devices"] == expected["devices"]
    assert answer["failure"] is None


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


def test_the_kernel_of_a_holder(on_server: Machine, server: Lab) -> None:
    """A holder and a waiter show the id of their kernel, or of the kernel that started them."""
    on_server.write(ONE * 2)
    child = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import "
        "reserve_gpu; reserve_gpu.reserve(); print(1, flush=True); input()'], "
        "stdin=subprocess.PIPE, stdout=subprocess.PIPE); child.stdout.readline()"
    )
    with (
        kernel(on_server, server) as (first, client),
        kernel(on_server, server) as (second, other),
        on_server.child() as stranger,
    ):
        run_cell(client, "%reserve_gpu 1")
        run_cell(other, child)
        stranger.send("reserve_gpu.reserve(wait=True)")
        wait_for(lambda: len(held_gpus(on_server)) == 2)
        wait_for(lambda: request(server, "reserve_gpu/status")["waiting"], 0.1)
        answer = fresh_status(server)
        kernels = [device["holders"][0]["kernel"] for device in answer["devices"]]
        assert kernels == [second, first]
        assert [ticket["kernel"] for ticket in answer["waiting"]] == [None]
        assert [ticket["is_own"] for ticket in answer["waiting"]] == [True]
        run_cell(other, "child.kill()")
        run_cell(client, "%reserve_gpu --release")
        assert not stranger.answer().error


def test_release_after_a_restart(on_server: Machine, server: Lab) -> None:
    """A GPU kept for a restart belongs to the kernel, and the earlier pid releases it."""
    on_server.write(ONE)
    with kernel(on_server, server) as (id_, client):
        run_cell(client, "%reserve_gpu")
        (before,) = fresh_status(server)["devices"][0]["holders"]
        request(server, f"api/kernels/{id_}/restart", {})
        (holder,) = fresh_status(server)["devices"][0]["holders"]
        assert holder["pid"] != before["pid"]
        assert holder["kept_until"] > time.time()
        assert (holder["kernel"], holder["is_own"]) == (id_, True)
        assert request(server, "reserve_gpu/release", {"pid": before["pid"]})["is_done"]
        assert held_gpus(on_server) == []


def test_release_in_a_busy_kernel(on_server: Machine, server: Lab) -> None:
    """A kernel releases its GPU while a cell runs."""
    on_server.write(ONE)
    with kernel(on_server, server) as (_, client):
        run_cell(client, "%reserve_gpu")
        client.execute("import time; time.sleep(1000)")
        (holder,) = fresh_status(server)["devices"][0]["holders"]
        done = request(server, "reserve_gpu/release", {"pid": holder["pid"]})
        assert done["is_done"]
        assert held_gpus(on_server) == []


def test_process_without_a_reservation(on_server: Machine, server: Lab) -> None:
    """A request to release names the pid of a process without a reservation, which survives."""
    on_server.write(ONE)
    with on_server.child() as child:
        done = request(server, "reserve_gpu/release", {"pid": child.pid, "end": True})
        assert not done["is_done"]
        assert child.run("1").value == 1


def test_later_reservation_is_not_released(on_server: Machine, server: Lab) -> None:
    """A request to release an earlier reservation does not release the current one."""
    on_server.write(ONE)
    with kernel(on_server, server) as (_, client):
        run_cell(client, "%reserve_gpu")
        (before,) = fresh_status(server)["devices"][0]["holders"]
        run_cell(client, "%reserve_gpu --release\n%reserve_gpu")
        asked = {"pid": before["pid"], "since": before["since"]}
        assert not request(server, "reserve_gpu/release", asked)["is_done"]
        assert len(held_gpus(on_server)) == 1
        (now,) = request(server, "reserve_gpu/status?new=1")["devices"][0]["holders"]
        assert request(server, "reserve_gpu/release", asked | {"since": now["since"]})["is_done"]


def test_fifty_clients_share_a_query(on_server: Machine, server: Lab) -> None:
    """The server queries the driver at most every two seconds, and only if a client asks."""
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
    after = count_reads()
    assert 1 <= after - before <= seconds / 2 + 1
    time.sleep(3)  # the time in which nothing may happen
    assert count_reads() == after


def test_reading_the_status_is_not_activity(server: Lab) -> None:
    """Reading the status does not count as activity, so idle servers can be stopped."""
    before = request(server, "api/status")["last_activity"]
    fresh_status(server)
    assert request(server, "api/status")["last_activity"] == before


def test_status_without_a_driver(on_server: Machine, server: Lab) -> None:
    """Without a driver, the status has the reason and the reservations."""
    on_server.write(ONE)
    with on_server.child() as child:
        assert not child.reserve().error
        on_server.write("fail nvmlInitWithFlags * 9\n")
        answer = fresh_status(server)
        on_server.write(ONE)
    assert "driver" in answer["failure"]
    assert [holder["pid"] for row in answer["devices"] for holder in row["holders"]] == [child.pid]


def test_invalid_setting(on_server: Machine) -> None:
    """The status and the result of a release name an invalid setting."""
    code = (
        "import json; from jupyterlab_reserve_gpu import look; "
        "print(json.dumps([look.look({})['failure'], look.release(1, is_end=False)['text']]))"
    )
    done = on_server.python(code, RESERVE_GPU_IDLE_MEMORY="lots")
    for text in json.loads(done.stdout):
        assert "RESERVE_GPU_IDLE_MEMORY" in text


def test_hanging_driver_blocks_no_other_request(on_server: Machine, server: Lab) -> None:
    """While the driver hangs, the server answers other requests."""
    request(server, "api/kernels")
    on_server.write((driver.SCENARIOS / "hang.txt").read_text())
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(fresh_status(server)))
    thread.start()
    begun = time.monotonic()
    request(server, "api/kernels")
    assert time.monotonic() - begun < 2
    assert not answers
    thread.join()
    on_server.write(ONE)
    (broken, free) = answers[0]["devices"]
    assert "the driver hangs" in broken["reason"]
    assert free["state"] == "free"


def threads_of(lab: Lab) -> int:
    """Return the number of the server's threads."""
    return psutil.Process(lab.pid).num_threads()


def test_simultaneous_requests_share_threads(on_server: Machine, server: Lab) -> None:
    """300 simultaneous requests for a new status share a few threads."""
    on_server.write(ONE)
    fresh_status(server)
    before = threads_of(server)
    on_server.write((driver.SCENARIOS / "hang.txt").read_text())
    answers: list[Any] = []

    def client() -> None:
        answers.append(request(server, "reserve_gpu/status?new=1"))

    clients = [threading.Thread(target=client) for _ in range(300)]
    for each in clients:
        each.start()
    process = psutil.Process(server.pid)
    wait_for(lambda: len(process.net_connections("tcp")) > len(clients), 0.1)
    request(server, "api/kernels")  # after them
    during = threads_of(server)
    on_server.write(ONE)
    for each in clients:
        each.join()
    assert during < before + 10
    assert len(answers) == len(clients)
    assert {answer["devices"][0]["state"] for answer in answers} <= {"free", "broken"}


def test_disconnected_client_starts_no_query(on_server: Machine, server: Lab) -> None:
    """A waiting request starts no query if its client disconnects."""
    on_server.write(ONE)
    fresh_status(server)
    on_server.write((driver.SCENARIOS / "hang.txt").read_text())
    start = len(on_server.calls())
    first = threading.Thread(target=request, args=(server, "reserve_gpu/status?new=1"))
    first.start()
    # A call that hangs since an earlier look is not made again.
    wait_for(lambda: "nvmlInitWithFlags" in " ".join(on_server.calls()[start:]))
    address, token = server.address()
    port = int(re.findall(r":(\d+)/", address)[0])
    with socket.create_connection(("127.0.0.1", port)) as client:
        line = f"GET /reserve_gpu/status?new=1 HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        client.sendall(f"{line}Authorization: token {token}\r\n\r\n".encode())
        request(server, "api/kernels")  # after it
    on_server.write(ONE)
    first.join()
    request(server, "api/kernels")
    calls = [call.partition(" ")[0] for call in on_server.calls()[start:]]
    assert calls.count("nvmlInitWithFlags") == 1


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


def cut_off_without_a_tooltip(page: Page) -> list[str]:
    """Return the texts that end with an ellipsis and have no tooltip with the whole text."""
    found: list[str] = panel(page).evaluate(CUT_OFF_WITHOUT_A_TOOLTIP)
    return found


CUT_OFF_WITHOUT_A_TOOLTIP = """panel => [panel, ...panel.querySelectorAll('*')]
    .filter(one => one.clientWidth && (one.scrollWidth > one.clientWidth + 1
        || getComputedStyle(one).overflowY === 'hidden' && one.scrollHeight > one.clientHeight + 1))
    .filter(one => getComputedStyle(one).textOverflow !== 'ellipsis'
        && getComputedStyle(one).webkitLineClamp === 'none' || one.title !== one.textContent)
    .map(one => one.textContent)"""


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


def test_extend_checks_the_reservation(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """`Extend by 2 h` makes no new reservation after the old one has been released."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu --for 8m", "%reserve_gpu --release")
    notebook.execute(0)
    make_reservations_older(on_lab)
    notification(page, r"train\.ipynb loses GPU0 at")
    with frozen_status(page):
        notebook.execute(1)
        message = notification(page, r"train\.ipynb loses GPU0 at")
        message.get_by_role("button", name="Extend by 2 h").click()
        notification(page, r"train\.ipynb no longer holds GPU0\.")
    assert held_gpus(on_lab) == []


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
    assert (
        notification_level(
            notification(page, r"train\.ipynb loses GPU0 at .*, in less than a minute\.")
        )
        == "warning"
    )
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


@pytest.mark.parametrize("width", [260, 800])
def test_sixty_four_gpus(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook], width: int
) -> None:
    """The panel of 64 GPUs is short and legible, narrow and wide, in both themes."""
    on_lab.write(ONE * 64)
    notebook = open_notebook("train.ipynb", "%reserve_gpu 17 --for 8m")
    notebook.execute(0)
    expect_text(panel(page), r"63 of 64 GPUs are free\.")
    handle = page.locator("#jp-main-split-panel > .lm-SplitPanel-handle:not(.lm-mod-hidden)").last
    right = panel(page).bounding_box()
    box = handle.bounding_box()
    assert right
    assert box
    page.mouse.move(box["x"], 300)
    page.mouse.down()
    page.mouse.move(right["x"] + right["width"] - width, 300, steps=3)
    page.mouse.up()
    wait_for(lambda: abs((panel(page).bounding_box() or right)["width"] - width) < 30, 0.05)
    assert device_rows(page).count() == 3
    for theme in THEMES:
        show_theme(page, theme)
        for where in (panel(page), status_item(page)):
            contrasts = where.evaluate(CONTRASTS)
            assert contrasts
            assert [(theme, *each) for each in contrasts if each[1] < LEGIBLE] == []
    assert cut_off_without_a_tooltip(page) == []
    show_theme(page, "light")


def test_eight_gpus_fit(page: Page, lab: Lab, on_lab: Machine) -> None:
    """Eight GPUs fit into the panel, with colored bars and the user's own GPUs marked."""
    note = "note='for the thesis, until Friday; then all of you can have it'"
    with (
        on_lab.child(JPY_SESSION_NAME="/home/alice/a-notebook-with-a-long-name.ipynb") as child,
        open_page(page, lab) as other,
    ):
        on_lab.write(ONE * 8)
        assert not child.reserve(f"'3,4', {note}").error
        used = "".join(
            f"{ONE}utilisation 97\ncompute {child.pid} {mib}\n" for mib in (36000, 60000, 81500)
        )
        on_lab.write(f"{ONE * 3}{used}{ONE * 2}")
        other.set_viewport_size({"width": 1100, "height": 900})
        show_panel(other)
        shown = device_rows(other)
        expect_text(shown.nth(5), "79.6 of 80.0 GiB")
        for width in (1100, 1000):
            other.set_viewport_size({"width": width, "height": 900})
            heights = [(row.bounding_box() or {"height": 0})["height"] for row in shown.all()]
            lines = [round(height / heights[0]) for height in heights]
            assert lines == [1, 1, 1, 3, 3, 2, 1, 1], (width, heights)
        assert panel(other).evaluate("panel => panel.scrollHeight <= panel.clientHeight")
        backgrounds = shown.evaluate_all(
            "rows => rows.map(row => getComputedStyle(row).backgroundColor)"
        )
        assert [each != backgrounds[0] for each in backgrounds] == [n in (3, 4) for n in range(8)]
        with frozen_status(other):  # else a row is made anew while its picture is taken
            for _ in range(2):  # the second answer changes nothing
                other.wait_for_event("response", lambda answer: "gpu/status" in answer.url)
            for theme in THEMES:
                show_theme(other, theme)
                bars = [bar_color(row.locator("meter")) for row in shown.all()[3:6]]
                assert bars == ["green", "amber", "red"], theme


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
        assert cut_off_without_a_tooltip(page) == []


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


def test_texts_of_other_users_are_escaped(on_lab: Machine, page: Page) -> None:
    """A note and a notebook's name of another user are shown as text, not HTML."""
    hostile = "<img src=x onerror=document.title='gotcha'>"
    on_lab.write(ONE)
    with on_lab.child(JPY_SESSION_NAME=f"/home/alice/{hostile}.ipynb") as child:
        assert not child.reserve(f"note={hostile!r}").error
        expect_text(panel(page), re.escape(hostile))
        assert panel(page).locator("img").count() == 0
    assert page.title() != "gotcha"


SEEM = """state => {
    Object.defineProperty(document, 'visibilityState', {get: () => state, configurable: true});
    document.dispatchEvent(new Event('visibilitychange'));
}"""  # a headless browser hides no tab


def test_hidden_tab_sends_no_requests(page: Page) -> None:
    """A hidden tab sends no requests."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))

    def count_reads() -> int:
        return sum("reserve_gpu" in url for url in asked)

    page.evaluate(SEEM, arg="hidden")
    page.wait_for_timeout(3000)  # for what is under way
    before = count_reads()
    page.wait_for_timeout(6000)  # three times the interval
    assert count_reads() == before
    page.evaluate(SEEM, arg="visible")
    with page.expect_request(re.compile("reserve_gpu/status")):
        pass


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


# -- JupyterHub ------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    """Return unused ports."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def hub(machine: Machine, *users: str) -> Iterator[str]:
    """Start a JupyterHub for these users below a base URL; yield its address."""
    port, *others = free_ports(3)
    address = f"http://127.0.0.1:{port}/many/gpus/"
    for user in users:
        (machine.folder / user).mkdir()
        shutil.chown(machine.folder / user, user)
    environ = machine.environ(
        HUB_ADDRESS=address,
        HUB_PORTS=" ".join(map(str, others)),
        HUB_FOLDER=str(machine.folder),
    )
    config = str(ROOT / "tests" / "support" / "hub_config.py")
    log = machine.folder / "hub.log"
    with (
        log.open("wb") as file,
        machine.running(
            sys.executable, "-m", "jupyterhub", "-f", config,
            environ=environ, stdout=file.fileno(), stderr=file.fileno(),
        ) as process,
    ):  # fmt: skip
        wait_for(lambda: "JupyterHub is now running" in log.read_text() or process.poll(), 0.1)
        assert process.poll() is None, log.read_text()
        yield address
        process.terminate()  # it stops the servers of its users
        process.wait(LIMIT_S)


@pytest.mark.skipif(
    not (PROXY and find_spec("jupyterhub")), reason="needs JupyterHub and configurable-http-proxy"
)
def test_two_users_of_a_hub(page: Page) -> None:
    """Each user sees all reservations, and can release only their own."""
    assert page.context.browser
    with (
        for_users() as machine,
        hub(machine, NOBODY, DAEMON) as address,
        ExitStack() as opened,
    ):
        machine.write(ONE * 2)
        pages = []
        for user in (NOBODY, DAEMON):
            other = opened.enter_context(closing(page.context.browser.new_page()))
            other.set_default_timeout(LIMIT_S * 1000)
            other.goto(f"{address}hub/login")
            other.locator("#username_input").fill(user)
            other.locator("#password_input").fill("any")
            other.locator("#login_submit").click()
            other.wait_for_url(re.compile(f"/many/gpus/user/{user}/lab"))
            other.wait_for_function("window.jupyterapp?.restored.then(() => true)")
            show_panel(other)
            pages.append(other)
        first, second = pages
        first.evaluate(
            "jupyterapp.commands.execute('notebook:create-new', {kernelName: 'python3'})"
        )
        expect_text(status_item(first), "^no GPU")
        status_item(first).get_by_text("Reserve GPU").click()
        expect_text(status_item(first), "^GPU0 · ")
        expect_text(panel(second), f"{NOBODY}, Untitled.ipynb")
        expect_text(panel(second), "You hold no GPU on this machine")
        pid = second.evaluate(ASK, arg=["status", None])["devices"][0]["holders"][0]["pid"]
        refused = second.evaluate(ASK, arg=["release", {"pid": pid, "end": True}])
        assert not refused["is_done"]
        assert len(held_gpus(machine)) == 1
        own_entry(first, "Untitled.ipynb").get_by_role("button", name="Release GPU").click()
        expect_text(status_item(first), "^no GPU")
        expect_text(panel(second), "Both GPUs are free")


# What the extension itself does, with the login and the XSRF token of the page.
ASK = """async ([path, body]) => {
    const {serverSettings} = jupyterapp.serviceManager;
    const xsrf = document.cookie.match(/_xsrf=([^;]*)/)?.[1] ?? '';
    const response = await fetch(`${serverSettings.baseUrl}reserve_gpu/${path}`, {
        ...body ? {method: 'POST', body: JSON.stringify(body)} : {},
        headers: {'X-XSRFToken': xsrf},
    });
    return response.json();
}"""
