"""The extension for JupyterLab: what Jupyter's server answers, and what people see and click."""

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
    browser,
    colour,
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


def ask(lab: Lab, path: str, body: object = None, *, token: str | None = None) -> Any:
    """Ask a Jupyter server; with a body it is a POST. token: another one than the server's."""
    address, known = lab.address()
    request = urllib.request.Request(  # noqa: S310 - it is the test's own server
        f"{address}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"token {known if token is None else token}"},
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:  # noqa: S310
        return json.load(answer)


def held(machine: Machine) -> list[str]:
    """Return the lock files of GPUs that somebody holds."""
    return [name for name in locked(machine.locks) if name.startswith("GPU-")]


def delete(lab: Lab, path: str) -> None:
    address, token = lab.address()
    headers = {"Authorization": f"token {token}"}
    request = urllib.request.Request(f"{address}{path}", headers=headers, method="DELETE")  # noqa: S310
    with urllib.request.urlopen(request, timeout=LIMIT_S):  # noqa: S310
        pass


@contextmanager
def running(machine: Machine, **options: Any) -> Iterator[Lab]:
    """Start a server; it is shut down with its kernels at the end."""
    lab = Lab(machine, **options)
    try:
        yield lab
    finally:
        lab.close()


@contextmanager
def kernel(machine: Machine, lab: Lab) -> Iterator[tuple[str, BlockingKernelClient]]:
    """Start a kernel of the server; its id, and what talks to it."""
    from jupyter_client.blocking.client import BlockingKernelClient

    id_ = ask(lab, "api/kernels", {"name": "python3"})["id"]
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
    """Wait until a kernel answers. On a busy machine its heartbeat may be late: it is not dead."""
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            client.wait_for_ready(timeout=LIMIT_S)
        except RuntimeError:  # noqa: PERF203 - the same call is tried again
            if time.monotonic() > until:
                raise
        else:
            return


def run(client: BlockingKernelClient, code: str) -> None:
    reply = client.execute_interactive(code, output_hook=lambda _: None, timeout=LIMIT_S)
    assert reply["content"]["status"] == "ok", reply["content"]


# -- the server ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_server(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def server(on_server: Machine) -> Iterator[Lab]:
    """Start a server whose tests need no browser."""
    with running(on_server) as lab:
        yield lab


def fresh(lab: Lab) -> Any:
    """Return an answer that was begun after this call."""
    begun, answers = time.time(), []

    def is_fresh() -> bool:
        answers.append(ask(lab, "reserve_gpu/status"))
        return bool(answers[-1]["time"] > begun)

    wait_for(is_fresh, 0.1)
    return answers[-1]


def test_the_answer_is_that_of_the_command_line(on_server: Machine, server: Lab) -> None:
    """The server answers with the JSON of `reserve-gpu status`."""
    on_server.write(ONE * 3)
    shown = on_server.command(sys.executable, "-m", "reserve_gpu", "status", "--json")
    expected, answer = json.loads(shown.stdout), fresh(server)
    assert {*answer} - {*expected} == {"failure"}
    assert answer["devices"] == expected["devices"]
    assert answer["failure"] is None


def test_without_the_token_there_is_no_answer(server: Lab) -> None:
    """Who may not use the Jupyter server is told nothing, and can change nothing."""
    for path, body in (("status", None), ("release", {"pid": 1})):
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(server, f"reserve_gpu/{path}", body, token="wrong")  # noqa: S106
        with refused.value as answer:
            assert answer.code == 403


def test_a_request_of_another_site_changes_nothing(server: Lab) -> None:
    """A browser's POST with the cookie of the login and without Jupyter's XSRF token is refused."""
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
    """A holder, or one who waits, has the id of the kernel that it is or that has started it."""
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
        run(client, "%reserve_gpu 1")
        run(other, child)
        stranger.send("reserve_gpu.reserve(wait=True)")
        wait_for(lambda: len(held(on_server)) == 2)
        wait_for(lambda: ask(server, "reserve_gpu/status")["waiting"], 0.1)
        answer = fresh(server)
        kernels = [device["holders"][0]["kernel"] for device in answer["devices"]]
        assert kernels == [second, first]
        assert [ticket["kernel"] for ticket in answer["waiting"]] == [None]
        assert [ticket["is_own"] for ticket in answer["waiting"]] == [True]
        run(other, "child.kill()")
        run(client, "%reserve_gpu --release")
        assert not stranger.answer().error


def test_what_is_kept_for_a_restart_is_the_kernels(on_server: Machine, server: Lab) -> None:
    """What a kernel that restarts has left is shown as that kernel's."""
    on_server.write(ONE)
    with kernel(on_server, server) as (id_, client):
        run(client, "%reserve_gpu")
        ask(server, f"api/kernels/{id_}/restart", {})
        (holder,) = fresh(server)["devices"][0]["holders"]
        assert holder["kept_until"] > time.time()
        assert (holder["kernel"], holder["is_own"]) == (id_, True)
        done = ask(server, "reserve_gpu/release", {"pid": holder["pid"]})
        assert done["is_done"]
        assert held(on_server) == []


def test_who_kept_it_meanwhile_is_released(on_server: Machine, server: Lab) -> None:
    """The pid that was shown before a restart releases what has been kept since."""
    on_server.write(ONE)
    with kernel(on_server, server) as (id_, client):
        run(client, "%reserve_gpu")
        (before,) = fresh(server)["devices"][0]["holders"]
        ask(server, f"api/kernels/{id_}/restart", {})
        (holder,) = fresh(server)["devices"][0]["holders"]
        assert holder["pid"] != before["pid"]
        done = ask(server, "reserve_gpu/release", {"pid": before["pid"]})
        assert done["text"].startswith("Released GPU0 of ")
        assert held(on_server) == []


def test_release_in_a_busy_kernel(on_server: Machine, server: Lab) -> None:
    """A kernel whose cell runs releases its GPU within that cell."""
    on_server.write(ONE)
    with kernel(on_server, server) as (_, client):
        run(client, "%reserve_gpu")
        client.execute("import time; time.sleep(1000)")
        (holder,) = fresh(server)["devices"][0]["holders"]
        done = ask(server, "reserve_gpu/release", {"pid": holder["pid"]})
        assert done["is_done"]
        assert done["text"].startswith("Released GPU0 of ")
        assert held(on_server) == []


def test_only_reservations_can_be_released(on_server: Machine, server: Lab) -> None:
    """A pid that holds nothing is answered with a word, and nothing happens to its process."""
    on_server.write(ONE)
    with on_server.child() as child:
        done = ask(server, "reserve_gpu/release", {"pid": child.pid, "end": True})
        assert done == {
            "is_done": False,
            "text": f"Process {child.pid} holds none of your reservations.",
        }
        assert child.run("1").value == 1


def test_another_reservation_of_the_process_is_not_released(
    on_server: Machine, server: Lab
) -> None:
    """What a process has reserved since a button was shown is not released by that button."""
    on_server.write(ONE)
    with kernel(on_server, server) as (_, client):
        run(client, "%reserve_gpu")
        (before,) = fresh(server)["devices"][0]["holders"]
        run(client, "%reserve_gpu --release\n%reserve_gpu")
        asked = {"pid": before["pid"], "since": before["since"]}
        assert not ask(server, "reserve_gpu/release", asked)["is_done"]
        assert len(held(on_server)) == 1
        (now,) = ask(server, "reserve_gpu/status?new=1")["devices"][0]["holders"]
        assert ask(server, "reserve_gpu/release", asked | {"since": now["since"]})["is_done"]


def test_fifty_clients_cost_one_look(on_server: Machine, server: Lab) -> None:
    """However many ask, the driver is asked once in two seconds; nobody asks, and it is not."""
    on_server.write(ONE)
    fresh(server)

    def looks() -> int:
        return on_server.calls().count("nvmlShutdown")

    before, begun = looks(), time.monotonic()
    until = begun + 5

    def client() -> None:
        while time.monotonic() < until:
            ask(server, "reserve_gpu/status")
            time.sleep(0.2)

    clients = [threading.Thread(target=client) for _ in range(50)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    seconds = time.monotonic() - begun
    after = looks()
    assert 1 <= after - before <= seconds / 2 + 1
    time.sleep(3)  # the time in which nothing may happen
    assert looks() == after


def test_a_look_is_no_activity(server: Lab) -> None:
    """To look at the GPUs keeps no server alive that is to be stopped when nobody uses it."""
    before = ask(server, "api/status")["last_activity"]
    fresh(server)
    assert ask(server, "api/status")["last_activity"] == before


def test_no_driver_is_an_answer(on_server: Machine, server: Lab) -> None:
    """Without a driver the answer says so, and still names what is reserved."""
    on_server.write(ONE)
    with on_server.child() as child:
        assert not child.reserve().error
        on_server.write("fail nvmlInitWithFlags * 9\n")
        answer = fresh(server)
        on_server.write(ONE)
    assert "driver" in answer["failure"]
    assert [holder["pid"] for row in answer["devices"] for holder in row["holders"]] == [child.pid]


def test_a_setting_that_is_not_valid_is_an_answer(on_server: Machine) -> None:
    """With a setting that is not valid, a look and a release answer with its name."""
    code = (
        "import json; from jupyterlab_reserve_gpu import look; "
        "print(json.dumps([look.look({})['failure'], look.release(1, is_end=False)['text']]))"
    )
    done = on_server.python(code, RESERVE_GPU_IDLE_MEMORY="lots")
    for text in json.loads(done.stdout):
        assert "RESERVE_GPU_IDLE_MEMORY" in text


def test_a_hanging_driver_holds_up_nothing_else(on_server: Machine, server: Lab) -> None:
    """While the driver hangs the server serves, and says then which GPU does not answer."""
    ask(server, "api/kernels")
    on_server.write((driver.SCENARIOS / "hang.txt").read_text())
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(fresh(server)))
    thread.start()
    begun = time.monotonic()
    ask(server, "api/kernels")
    assert time.monotonic() - begun < 2
    assert not answers
    thread.join()
    on_server.write(ONE)
    (broken, free) = answers[0]["devices"]
    assert "the driver hangs" in broken["reason"]
    assert free["state"] == "free"


def threads_of(lab: Lab) -> int:
    return psutil.Process(lab.pid).num_threads()


def test_many_looks_share_a_thread(on_server: Machine, server: Lab) -> None:
    """300 clients that ask for a new look at once cost the server a few threads."""
    on_server.write(ONE)
    fresh(server)
    before = threads_of(server)
    on_server.write((driver.SCENARIOS / "hang.txt").read_text())
    answers: list[Any] = []

    def client() -> None:
        answers.append(ask(server, "reserve_gpu/status?new=1"))

    clients = [threading.Thread(target=client) for _ in range(300)]
    for each in clients:
        each.start()
    process = psutil.Process(server.pid)
    wait_for(lambda: len(process.net_connections("tcp")) > len(clients), 0.1)
    ask(server, "api/kernels")  # after them
    during = threads_of(server)
    on_server.write(ONE)
    for each in clients:
        each.join()
    assert during < before + 10
    assert len(answers) == len(clients)
    assert {answer["devices"][0]["state"] for answer in answers} <= {"free", "broken"}


def test_a_client_that_has_gone_leaves_no_look(on_server: Machine, server: Lab) -> None:
    """A request that waits for another look starts none if its client disconnects."""
    on_server.write(ONE)
    fresh(server)
    on_server.write((driver.SCENARIOS / "hang.txt").read_text())
    start = len(on_server.calls())
    first = threading.Thread(target=ask, args=(server, "reserve_gpu/status?new=1"))
    first.start()
    # A call that hangs since an earlier look is not made again.
    wait_for(lambda: "nvmlInitWithFlags" in " ".join(on_server.calls()[start:]))
    address, token = server.address()
    port = int(re.findall(r":(\d+)/", address)[0])
    with socket.create_connection(("127.0.0.1", port)) as client:
        line = f"GET /reserve_gpu/status?new=1 HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        client.sendall(f"{line}Authorization: token {token}\r\n\r\n".encode())
        ask(server, "api/kernels")  # after it
    on_server.write(ONE)
    first.join()
    ask(server, "api/kernels")
    calls = [call.partition(" ")[0] for call in on_server.calls()[start:]]
    assert calls.count("nvmlInitWithFlags") == 1


def test_a_server_ends_while_the_driver_hangs(machine: Machine) -> None:
    """However many releases wait for a driver that hangs, the server ends when it is asked to.

    Releases beyond the limit are answered with 503 and Retry-After.
    """
    with running(machine) as lab:
        ask(lab, "api/kernels")
        before = threads_of(lab)
        machine.write((driver.SCENARIOS / "hang.txt").read_text())
        refused: list[str | None] = []

        def release() -> None:
            try:
                ask(lab, "reserve_gpu/release", {"pid": 1})
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


def settle(machine: Machine, **values: object) -> None:
    """Set what a user sets in JupyterLab's settings, before it starts."""
    folder = machine.home / "settings" / "jupyterlab-reserve-gpu"
    folder.mkdir(parents=True)
    (folder / "plugin.jupyterlab-settings").write_text(json.dumps({"interval": 2, **values}))


@pytest.fixture(scope="module")
def on_lab(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Return the machine on which JupyterLab runs."""
    machine = Machine(tmp_path_factory.mktemp("extension"))
    settle(machine)
    return machine


@pytest.fixture(scope="module")
def lab(on_lab: Machine) -> Iterator[Lab]:
    with running(on_lab) as lab:
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
    """Open a notebook with these cells; all are closed at the end, and what was told is gone."""
    with opening(lab, page, request.node.name) as open_one:
        yield open_one
    page.evaluate("jupyterapp.commands.execute('apputils:dismiss-notification', {})")


def show_panel(page: Page) -> None:
    page.evaluate("jupyterapp.commands.execute('reserve-gpu:show')")


def item(page: Page) -> Locator:
    """Return what the status bar says of the GPUs."""
    return page.locator(".jp-ReserveGPU-item")


def panel(page: Page) -> Locator:
    return page.locator(".jp-ReserveGPU-panel")


def own(page: Page, notebook: str) -> Locator:
    """Return what the panel says of a notebook of one's own."""
    return panel(page).locator("li", has_text=notebook)


def rows(page: Page) -> Locator:
    """Return the rows of this machine's devices."""
    return section(page, "This Machine").locator(".jp-ReserveGPU-row")


def section(page: Page, title: str) -> Locator:
    heading = page.get_by_role("heading", name=title, exact=True)
    return panel(page).locator("section").filter(has=heading)


def buttons(where: Locator) -> list[str]:
    """Return the labels of the buttons there."""
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


def says(where: Locator, pattern: str) -> None:
    """Wait until the pattern can be read there."""
    from playwright.sync_api import expect

    expect(where).to_contain_text(re.compile(pattern))


def is_urgent(page: Page, level: str) -> bool:
    return bool(item(page).locator(f"button.jp-mod-{level}").count())


def told(page: Page, text: str) -> Locator:
    """Open the list of what was told, and wait until that stands there."""
    from playwright.sync_api import expect

    message = messages(page).filter(has=page.get_by_text(re.compile(text)))
    expect(message).to_have_count(1)
    return message


def messages(page: Page) -> Locator:
    """Open the list of what was told; its entries."""
    center = page.locator(".jp-Notification-Center")
    if not center.count():
        page.evaluate("jupyterapp.commands.execute('apputils:display-notifications')")
    return center.locator(".jp-Notification-List-Item")


def test_a_click_reserves(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """A notebook without a GPU gets one by a click, and its next cell has it."""
    on_lab.write(ONE * 2)
    notebook = open_notebook("train.ipynb", VARIABLES)
    says(item(page), "^no GPU")
    item(page).get_by_text("Reserve GPU").click()
    told(page, r"^train\.ipynb has GPU0\.$")
    says(item(page), r"^GPU0 · 0.0 of 80.0 GiB$")
    assert is_urgent(page, "calm")
    notebook.run(0)
    assert notebook.finish(0) == "['0']"


def test_the_palette_releases(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """The command palette has `Release GPU`, which runs the magic in the kernel."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu", VARIABLES)
    notebook.run(0)
    says(item(page), "^GPU0 · ")
    page.keyboard.press("Control+Shift+C")
    page.keyboard.type("Release GPU")
    page.keyboard.press("Enter")
    says(item(page), "^no GPU")
    notebook.run(1)
    assert notebook.finish(1) == "[None]"  # a release from elsewhere leaves it empty, and is told


def test_nothing_free_offers_to_wait(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """Where nothing is free a click says who has it, and offers the queue; each is said once."""
    from playwright.sync_api import expect

    on_lab.write(ONE)
    with on_lab.child(JPY_SESSION_NAME="other.ipynb") as child:
        assert not child.reserve().error
        open_notebook("train.ipynb", "")
        says(item(page), "^no GPU")
        item(page).get_by_text("Reserve GPU").click()
        message = told(page, r"No GPU is free: your other\.ipynb has GPU0\.")
        message.get_by_role("button", name="Wait for GPU").click()
        says(item(page), r"^(requesting a GPU|waiting \(first in line\))$")
        says(item(page), r"^waiting \(first in line\)$")
        assert buttons(own(page, "train.ipynb")) == ["Stop Waiting"]
        expect(messages(page)).to_have_count(0)
        child.run("reserve_gpu.release()")
        says(item(page), "^GPU0 · ")
        told(page, r"train\.ipynb got GPU0\.")
        expect(messages(page)).to_have_count(1)


def test_stopping_a_wait(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """A wait that a click has begun is in no cell: Stop in the panel ends it, with one click."""
    on_lab.write(ONE)
    with on_lab.child() as child:
        assert not child.reserve().error
        open_notebook("train.ipynb", "")
        says(item(page), "^no GPU")
        item(page).get_by_text("Reserve GPU").click()
        told(page, "No GPU is free").get_by_role("button", name="Wait for GPU").click()
        own(page, "train.ipynb").get_by_role("button", name="Stop Waiting").click()
        says(item(page), "^no GPU.*Reserve GPU")
        assert fresh_answer(page)["waiting"] == []


def test_a_hand_over(on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]) -> None:
    """An idle GPU for which a notebook waits is amber, with who waits; Release hands it over."""
    from playwright.sync_api import expect

    on_lab.write(ONE)
    left = open_notebook("left.ipynb", "%reserve_gpu")
    left.run(0)
    left.finish(0)
    right = open_notebook("right.ipynb", "%reserve_gpu --wait")
    right.run(0)
    says(item(page), r"^waiting \(first in line\)$")
    says(own(page, "right.ipynb").last, "Waiting for a GPU, first in line")
    left.bring_to_front()
    says(item(page), r"^GPU0 · 0.0 of 80.0 GiB$")  # it has just been reserved
    expect(messages(page)).to_have_count(0)
    make_long_ago(on_lab)
    says(item(page), r"^GPU0 · 0.0 of 80.0 GiB · idle; your right\.ipynb is waiting for a GPU$")
    assert is_urgent(page, "near")
    wanted = told(
        page, r"GPU0 is idle in left\.ipynb, and your right\.ipynb is waiting for a GPU\."
    )
    assert level(wanted) == "warning"
    own(page, "left.ipynb").first.get_by_role("button", name="Release GPU").click()
    says(item(page), "^no GPU")
    messages(page)  # a click elsewhere has closed the list
    expect(wanted).to_have_count(0)
    right.bring_to_front()
    says(item(page), "^GPU0 · ")
    told(page, r"right\.ipynb got GPU0\.")


def test_a_button_looks_before_it_releases(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """`Release All 3 GPUs` in a notification releases nothing once nobody waits any more."""
    on_lab.write(ONE * 3)
    notebook = open_notebook("train.ipynb", "%reserve_gpu -n 3")
    notebook.run(0)
    notebook.finish(0)
    make_long_ago(on_lab)
    with on_lab.child(JPY_SESSION_NAME="small.ipynb") as child:
        child.send("reserve_gpu.reserve(wait=True)")
        message = told(page, "GPU0, GPU1 and GPU2 are idle.*small.ipynb is waiting for a GPU")
        with stale(page):
            child.kill()
            message.get_by_role("button", name="Release All 3 GPUs").click()
            told(page, "The other process is no longer waiting")
    assert len(held(on_lab)) == 3


def test_a_button_looks_before_it_prolongs(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """`Extend by 2 h` makes no new reservation once the old one is over."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu --for 8m", "%reserve_gpu --release")
    notebook.run(0)
    notebook.finish(0)
    make_long_ago(on_lab)
    told(page, r"train\.ipynb loses GPU0 at")
    with stale(page):
        notebook.run(1)
        notebook.finish(1)
        message = told(page, r"train\.ipynb loses GPU0 at")
        message.get_by_role("button", name="Extend by 2 h").click()
        told(page, r"train\.ipynb no longer holds GPU0\.")
    assert held(on_lab) == []


@contextmanager
def stale(page: Page) -> Iterator[None]:
    """Let the page see no news, as between two looks; but what a button asks for is answered."""
    last = page.evaluate("fetch(new URL('/reserve_gpu/status', location)).then(a => a.text())")
    address = re.compile(r"reserve_gpu/status\?\d+$")  # JupyterLab adds the time
    page.route(address, lambda route: route.fulfill(body=last, content_type="application/json"))
    try:
        yield
    finally:
        page.unroute(address)


def make_long_ago(machine: Machine) -> None:
    """Make all reservations an hour old; for a short one no end is shown."""
    for name in held(machine):
        make_older(machine.locks / name, 3600)


def level(message: Locator) -> str:
    """Return of what kind a notification is, as it is seen: info, warning, error or success."""
    classes = message.evaluate("e => [e, ...e.querySelectorAll('*')].map(x => x.className)")
    found = re.search("jp-Notification-Toast-(info|warning|error|success)", str(classes))
    return found[1] if found else str(classes)


def test_a_busy_notebook_releases(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """Release works while a cell runs, which goes on."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu\nimport time; time.sleep(1000)")
    notebook.run(0)
    says(item(page), "^GPU0 · ")
    own(page, "train.ipynb").get_by_role("button", name="Release GPU").click()
    told(page, r"Released GPU0 of train\.ipynb")
    says(item(page), "^no GPU$|^no GPU")
    assert held(on_lab) == []
    notebook.interrupt()
    notebook.finish(0)


def test_before_an_end(on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]) -> None:
    """In the last ten minutes it is amber and told; `Extend by 2 h` moves the part's end."""
    from playwright.sync_api import expect

    on_lab.write(ONE * 2)
    notebook = open_notebook("train.ipynb", "%reserve_gpu 1 --for 8m --memory 10GB")
    notebook.run(0)
    notebook.finish(0)
    says(item(page), rf"^GPU1 · 0.0 of 9.3 GiB reserved · until {MOMENT} \(8 min left\)$")
    assert is_urgent(page, "near")
    make_long_ago(on_lab)
    message = told(page, rf"train\.ipynb loses GPU1 at {MOMENT}, in less than 10 minutes\.")
    assert level(message) == "warning"
    message.get_by_role("button", name="Extend by 2 h").click()
    says(item(page), r"^GPU1 · 0.0 of 9.3 GiB reserved · until [^(]+$")
    told(page, r"^train\.ipynb has GPU1, until [^,]+\.$")
    expect(messages(page)).to_have_count(1)
    assert is_urgent(page, "calm")
    (holder,) = fresh_holders(page)
    assert 7200 < holder["until"] - time.time() < 7200 + 9 * 60


def fresh_holders(page: Page) -> list[dict[str, Any]]:
    """Return the holders of all devices, as the page gets them."""
    return [holder for device in fresh_answer(page)["devices"] for holder in device["holders"]]


def fresh_answer(page: Page) -> Any:
    """Return how the machine stands, as the page gets it."""
    return page.evaluate(
        "fetch(new URL('/reserve_gpu/status?new=1', location)).then(a => a.json())"
    )


def test_an_end(on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]) -> None:
    """The last minute is told in amber. Then the notebook has no GPU, and that alone is told."""
    from playwright.sync_api import expect

    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu --for 20s")
    notebook.run(0)
    notebook.finish(0)
    make_long_ago(on_lab)
    says(item(page), r"^GPU0 · .* \(1 min left\)$")
    assert level(told(page, r"train\.ipynb loses GPU0 at .*, in less than a minute\.")) == "warning"
    says(item(page), "^no GPU")
    told(page, rf"train\.ipynb's reservation of GPU0 ended at {MOMENT}\.$")
    expect(messages(page)).to_have_count(1)


def test_overdue(on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]) -> None:
    """What CUDA still uses after its time is red, with the time since when."""
    on_lab.write(ONE)
    cuda = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    notebook = open_notebook("train.ipynb", f"%reserve_gpu --for 5s\n{cuda}")
    notebook.run(0)
    says(item(page), rf"^GPU0 · .* · overdue since {MOMENT}$")
    assert is_urgent(page, "over")
    told(page, rf"ended at {MOMENT}\. The kernel is still using it\.")


def test_a_restart(on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]) -> None:
    """What is kept for a restart is amber with its seconds; a click takes it again, or frees it."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu", VARIABLES)
    notebook.run(0)
    notebook.finish(0)
    notebook.restart()
    says(item(page), r"^GPU0 · kept for the restart \(\d\d s left\).*Reserve Again$")
    assert is_urgent(page, "near")
    item(page).get_by_text("Reserve Again").click()
    says(item(page), "^GPU0 · 0.0 of 80.0 GiB$")
    notebook.run(1)
    assert notebook.finish(1) == "['0']"
    notebook.restart()
    says(own(page, "train.ipynb"), r"kept for the restart")
    own(page, "train.ipynb").get_by_role("button", name="Release GPU").click()
    says(item(page), "^no GPU")
    assert held(on_lab) == []


def test_more_than_its_part(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """A notebook that uses more than its part is red, with both numbers."""
    on_lab.write(ONE)
    notebook = open_notebook(
        "train.ipynb", "%reserve_gpu --memory 10GiB\nimport os; print(os.getpid())"
    )
    notebook.run(0)
    pid = notebook.finish(0).splitlines()[-1]
    on_lab.write(f"{ONE}  compute {pid} 12288\n")
    says(item(page), "^GPU0 · 12.0 of 10.0 GiB, over its limit$")
    assert is_urgent(page, "over")


def test_ending_a_kernel(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """A kernel is ended after a question only, to which Enter says no; its GPU is free then."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu")
    notebook.run(0)
    notebook.finish(0)
    says(item(page), "^GPU0 · 0.0 of 80.0 GiB$")
    end = own(page, "train.ipynb").get_by_role("button", name="Shut Down Kernel")
    end.click()
    says(
        page.locator(".jp-Dialog"),
        r"Shut Down Kernel of train\.ipynb\?"
        r"Everything in its memory will be lost, and GPU0 will be freed\.",
    )
    page.keyboard.press("Enter")
    page.locator(".jp-Dialog").wait_for(state="detached")
    assert len(held(on_lab)) == 1
    end.click()
    page.locator(".jp-Dialog .jp-mod-warn").click()
    wait_for(lambda: held(on_lab) == [])
    says(panel(page), "You hold no GPU on this machine")


@pytest.mark.parametrize("width", [260, 800])
def test_sixty_four_gpus(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook], width: int
) -> None:
    """The picture of many GPUs is short; all of it can be read, narrow and wide, in both themes."""
    on_lab.write(ONE * 64)
    notebook = open_notebook("train.ipynb", "%reserve_gpu 17 --for 8m")
    notebook.run(0)
    notebook.finish(0)
    says(panel(page), r"63 of 64 GPUs are free\.")
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
    assert rows(page).count() == 3
    for theme in THEMES:
        show_theme(page, theme)
        for where in (panel(page), item(page)):
            contrasts = where.evaluate(CONTRASTS)
            assert contrasts
            assert [(theme, *each) for each in contrasts if each[1] < LEGIBLE] == []
    assert cut_off_without_a_tooltip(page) == []
    show_theme(page, "light")


def test_eight_gpus_fit(page: Page, lab: Lab, on_lab: Machine) -> None:
    """Eight GPUs fit into the panel as JupyterLab opens it, although a holder's text takes lines.

    Each bar has its color, and the user's own GPUs are marked.
    """
    note = "note='for the thesis, until Friday; then all of you can have it'"
    with (
        on_lab.child(JPY_SESSION_NAME="/home/alice/a-notebook-with-a-long-name.ipynb") as child,
        another(page, lab) as other,
    ):
        on_lab.write(ONE * 8)
        assert not child.reserve(f"'3,4', {note}").error
        used = "".join(
            f"{ONE}utilisation 97\ncompute {child.pid} {mib}\n" for mib in (36000, 60000, 81500)
        )
        on_lab.write(f"{ONE * 3}{used}{ONE * 2}")
        other.set_viewport_size({"width": 1100, "height": 900})
        show_panel(other)
        shown = rows(other)
        says(shown.nth(5), "79.6 of 80.0 GiB")
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
        with stale(other):  # else a row is made anew while its picture is taken
            for _ in range(2):  # the second answer changes nothing
                other.wait_for_event("response", lambda answer: "gpu/status" in answer.url)
            for theme in THEMES:
                show_theme(other, theme)
                bars = [colour(row.locator("meter")) for row in shown.all()[3:6]]
                assert bars == ["green", "amber", "red"], theme


def test_every_holder_of_a_shared_gpu(on_lab: Machine, page: Page) -> None:
    """Each holder of a shared GPU has its own line, and the available memory is shown.

    Idle time, end and note come before the pid. A tooltip shows the whole of a truncated text.
    """
    names = ["a-notebook-whose-name-is-longer-than-the-panel-is-wide.ipynb", "fold.ipynb"]
    note = "for the thesis, until Friday at the latest; ask me if you need it before then"
    on_lab.write(ONE)
    with (
        on_lab.child(JPY_SESSION_NAME=f"/home/alice/{names[0]}") as first,
        on_lab.child(JPY_SESSION_NAME=f"/home/alice/{names[1]}") as second,
    ):
        assert not first.reserve(f"memory='10GiB', for_='3h', note={note!r}").error
        assert not second.reserve("memory='32GiB'").error
        lines = rows(page).first.locator(".jp-ReserveGPU-line")
        says(lines.nth(1), rf"{names[1]}.*of 32\.0 GiB.*pid {second.pid}$")
        says(lines.nth(0), rf"until {MOMENT} · “{note}” · .*pid {first.pid}$")
        says(rows(page).first, r"38\.0 GiB available")
        name = lines.nth(0).locator("span").first
        assert name.evaluate("name => name.scrollWidth > name.clientWidth")
        assert str(name.get_attribute("title")).endswith(f", {names[0]}")
        assert cut_off_without_a_tooltip(page) == []


def test_only_actions_that_apply(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """The panel and the commands offer a notebook only what it can do now."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu", "%reserve_gpu --for 2h")
    says(item(page), "^no GPU")
    # The panel is updated every few seconds, and might still show an earlier test's reservations.
    wait_for(lambda: offers(page) == (["Reserve GPU"], [True, False]))
    notebook.run(0)
    says(item(page), "^GPU0 · ")
    assert offers(page) == (["Release GPU", "Shut Down Kernel"], [False, True])
    notebook.run(1)
    says(item(page), "until")
    assert offers(page) == (
        ["Extend by 2 h", "Release GPU", "Shut Down Kernel"],
        [False, True],
    )
    second = open_notebook("second.ipynb", "%reserve_gpu --wait")
    says(own(page, "second.ipynb"), "No GPU")
    assert buttons(own(page, "second.ipynb")) == ["Wait for GPU"]
    second.run(0)
    says(item(page), r"^waiting \(first in line\)$")
    assert buttons(own(page, "second.ipynb")) == ["Stop Waiting"]
    says(own(page, "second.ipynb"), r"Waiting for a GPU, first in line · \d+ s so far")
    assert not panel(page).get_by_text(re.compile("Get one|%reserve_gpu")).count()


def offers(page: Page) -> tuple[list[str], list[bool]]:
    """Return the panel's buttons, and whether the commands to reserve and release are enabled."""
    enabled = "name => jupyterapp.commands.isEnabled(name)"
    commands = ("reserve-gpu:reserve", "reserve-gpu:release")
    return buttons(panel(page)), [page.evaluate(enabled, arg=name) for name in commands]


def test_nothing_of_a_notebook_beside_the_settings(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """With the settings in front nothing is said of a notebook, nor offered for one."""
    from playwright.sync_api import expect

    on_lab.write(ONE * 2)
    notebook = open_notebook("train.ipynb", "")
    says(item(page), "^no GPU.*Reserve GPU$")
    page.evaluate("jupyterapp.commands.execute('settingeditor:open')")
    says(item(page), "^2 of 2 GPUs free$")
    expect(panel(page).get_by_role("button")).to_have_count(0)
    notebook.bring_to_front()
    says(item(page), "^no GPU.*Reserve GPU$")


def test_no_driver(on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]) -> None:
    """Without a driver the item says so, and the panel why, and what is held in any case."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "%reserve_gpu")
    notebook.run(0)
    says(item(page), "^GPU0 · ")
    on_lab.write("fail nvmlInitWithFlags * 9\n")
    says(item(page), "^GPUs: no answer$")
    says(panel(page).locator(".jp-ReserveGPU-problem"), "driver")
    says(own(page, "train.ipynb"), "GPU0")
    on_lab.write(ONE)
    says(item(page), "^GPU0 · ")


def test_a_driver_that_hangs(
    on_lab: Machine, page: Page, open_notebook: Callable[..., Notebook]
) -> None:
    """While the driver hangs cells run; the panel says then which GPU does not answer."""
    on_lab.write(ONE)
    notebook = open_notebook("train.ipynb", "print(1 + 1)")
    says(item(page), "^no GPU")
    on_lab.write((driver.SCENARIOS / "hang.txt").read_text())
    notebook.run(0)
    assert notebook.finish(0) == "2"
    says(panel(page), "the driver hangs")
    on_lab.write(ONE)
    says(panel(page), "GPU0 is free")


def test_what_others_write_stays_text(on_lab: Machine, page: Page) -> None:
    """A note and a notebook's name of somebody else are shown as they were typed."""
    hostile = "<img src=x onerror=document.title='gotcha'>"
    on_lab.write(ONE)
    with on_lab.child(JPY_SESSION_NAME=f"/home/alice/{hostile}.ipynb") as child:
        assert not child.reserve(f"note={hostile!r}").error
        says(panel(page), re.escape(hostile))
        assert panel(page).locator("img").count() == 0
    assert page.title() != "gotcha"


SEEM = """state => {
    Object.defineProperty(document, 'visibilityState', {get: () => state, configurable: true});
    document.dispatchEvent(new Event('visibilitychange'));
}"""  # a headless browser hides no tab


def test_a_hidden_tab_does_not_ask(page: Page) -> None:
    """Nothing is asked by a tab that nobody sees."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))

    def looks() -> int:
        return sum("reserve_gpu" in url for url in asked)

    page.evaluate(SEEM, arg="hidden")
    page.wait_for_timeout(3000)  # for what is under way
    before = looks()
    page.wait_for_timeout(6000)  # three times the interval
    assert looks() == before
    page.evaluate(SEEM, arg="visible")
    with page.expect_request(re.compile("reserve_gpu/status")):
        pass


# -- servers of other kinds ------------------------------------------------------------------------


@contextmanager
def another(page: Page, lab: Lab, path: str = "lab") -> Iterator[Page]:
    """Open the page of another server in the same browser."""
    assert page.context.browser
    with closing(new_page(page.context.browser, lab, path)) as other:
        yield other


def test_notebook_7_below_a_base_url(page: Page, machine: Machine) -> None:
    """In Notebook 7 the item stands in the top bar; the kernel menu reserves and releases."""
    from playwright.sync_api import expect

    machine.write(ONE)
    settle(machine)
    options = ["--ServerApp.base_url=/some/where/"]
    with running(machine, program="notebook", options=options) as server:
        server.write("train.ipynb", "1")
        with another(page, server, "notebooks/train.ipynb") as other:
            says(item(other), "^no GPU")
            for command, expected in (
                ("Reserve GPU", "^GPU0 · "),
                ("Release GPU", "^no GPU"),
            ):
                other.locator(".lm-MenuBar-item", has_text="Kernel").click()
                other.locator(".lm-Menu-item", has_text=command).click()
                says(item(other), expected)
            other.locator(".lm-MenuBar-item", has_text="Kernel").click()
            other.locator(".lm-Menu-item", has_text="Show GPUs").click()
            expect(panel(other)).to_be_visible()
            says(panel(other), "GPU0 is free")


def test_other_machines(page: Page, machine: Machine) -> None:
    """With a table [hosts], the panel has a section for each machine, or why it did not answer."""
    machine.write(ONE * 2)
    settle(machine)
    machine.rules.write_text('[hosts]\nlab = ["localhost", "nowhere.invalid"]\n')
    with running(machine) as lab, another(page, lab) as other:
        says(item(other), "^2 of 2 GPUs free$")
        show_panel(other)
        says(section(other, "localhost"), "Both GPUs are free")
        says(section(other, "nowhere.invalid"), "ssh ")


def test_switched_off(page: Page, machine: Machine) -> None:
    """Where Jupyter's server does not run its part, the item says so, and how to enable it."""
    machine.write(ONE)
    off = "--ServerApp.jpserver_extensions={'jupyterlab_reserve_gpu': False}"
    with running(machine, options=[off]) as lab, another(page, lab) as other:
        says(item(other), "^GPUs: no answer$")
        item(other).locator("button").click()
        says(panel(other), "jupyter server extension enable jupyterlab_reserve_gpu")


def test_without_the_core(page: Page, machine: Machine, tmp_path: Path) -> None:
    """Where Jupyter's server can't import reserve_gpu, the item says so, and the rest works."""
    package = tmp_path / "broken" / "reserve_gpu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('not here')")
    with (
        running(machine, environ={"PYTHONPATH": str(package.parent)}) as lab,
        another(page, lab) as other,
    ):
        says(item(other), "^GPUs: no answer$")
        item(other).locator("button").click()
        says(panel(other), r"can't import reserve_gpu \(not here\)")


def test_switches(page: Page, machine: Machine) -> None:
    """What is switched off in the settings is not told."""
    machine.write(ONE)
    settle(machine, tellEnded=False, tellBeforeEnd=False)
    with running(machine) as lab, another(page, lab) as other:
        lab.write("train.ipynb", "%reserve_gpu --for 5s")
        notebook = Notebook(other, "train.ipynb")
        notebook.run(0)
        says(item(other), "^GPU0 · ")
        says(item(other), "^no GPU")
        other.evaluate("jupyterapp.commands.execute('apputils:display-notifications')")
        says(other.locator(".jp-Notification-Center"), "No notifications")


# -- JupyterHub ------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    """Return ports on which nobody listens."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def hub(machine: Machine, *users: str) -> Iterator[str]:
    """Start a JupyterHub below a base URL for these users; its address."""
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
    """Each user sees what both have, and can release only what is their own."""
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
        says(item(first), "^no GPU")
        item(first).get_by_text("Reserve GPU").click()
        says(item(first), "^GPU0 · ")
        says(panel(second), f"{NOBODY}, Untitled.ipynb")
        says(panel(second), "You hold no GPU on this machine")
        pid = second.evaluate(ASK, arg=["status", None])["devices"][0]["holders"][0]["pid"]
        refused = second.evaluate(ASK, arg=["release", {"pid": pid, "end": True}])
        assert refused["text"] == f"Process {pid} holds none of your reservations."
        assert len(held(machine)) == 1
        own(first, "Untitled.ipynb").get_by_role("button", name="Release GPU").click()
        says(item(first), "^no GPU")
        says(panel(second), "Both GPUs are free")


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
