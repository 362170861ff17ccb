"""Create the pictures of README and docs/ (as root): `python -m tests.support.screenshots [NAME]`.

Users, kernels, reservations, waits and the browser are real; only the driver is not. The names of
users and of the host exist only in a namespace of this program.
"""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.hosts import Hosts
from tests.support.lab import Lab, Notebook, browser, show_theme
from tests.support.locked import make_older
from tests.support.machine import ROOT, Child, Machine
from tests.support.processes import queue, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from playwright.sync_api import Page

IMAGES = ROOT / "docs" / "images"
NAMESPACE = ["unshare", "--mount", "--uts", "--propagation=private"]
HOST = "gpu-box"
USERS = {"alice": 70001, "bob": 70002, "carol": 70003, "dave": 70004, "erin": 70005}
MINUTE_S, HOUR_S = 60, 3600
TABS_PX, MARGIN_PX = 25, 10
MODEL = """
gpu
  name NVIDIA A100-SXM4-80GB
  vbios 92.00.45.00.03
  memory 81920
  reserved 620
"""
LOST, UNREADABLE = 4, 5  # GPUs with a fault
TROUBLE = f"""
fail nvmlDeviceGetHandleByIndex_v2 {LOST} 15
fail nvmlDeviceGetComputeRunningProcesses_v3 {UNREADABLE} 999
fail nvmlDeviceGetMemoryInfo {UNREADABLE} 4
fail nvmlDeviceGetMemoryInfo_v2 {UNREADABLE} 4
"""


class Scene:
    """A machine with eight GPUs and several users."""

    def __init__(self, folder: Path) -> None:
        self.machine = Machine(folder)
        self.machine.log.touch()
        self.uses: dict[int, list[str]] = {}
        self._people = ExitStack()
        self._update()

    def use(self, gpu: int, pid: int, mib: int, percent: int) -> None:
        """Add a process with memory to a GPU, and set the utilization."""
        self.uses.setdefault(gpu, []).extend([f"compute {pid} {mib}", f"utilisation {percent}"])
        self._update()

    def free(self, gpu: int) -> None:
        """Remove all processes from a GPU."""
        del self.uses[gpu]
        self._update()

    def person(self, user: str, notebook: str) -> Child:
        """Start a Python process of a user, as the kernel of a notebook."""
        environ = self.machine.environ(HOME="/nonexistent", JPY_SESSION_NAME=notebook)
        child = Child(environ, self.machine.folder, *as_user(user))
        self._people.callback(child.kill)
        return child

    def stranger(self, user: str, script: str) -> int:
        """Start a script of a user without a reservation, and return its pid."""
        path = self.machine.folder / script
        path.write_text("import time; time.sleep(900)")
        process = subprocess.Popen([*as_user(user), sys.executable, str(path)])
        self._people.callback(process.kill)
        return process.pid

    def holder(
        self,
        user: str,
        notebook: str,
        gpu: int,
        *,
        since_s: float,
        idle_s: float = 0,
        request: str = "",
    ) -> Child:
        """Reserve a GPU or a part for a user, with an earlier start."""
        child = self.person(user, notebook)
        answer = child.reserve(f"{gpu}, {request}")
        assert answer.value == str(gpu), answer
        for path in self.machine.locks.glob("*.lock"):
            record = json.loads(path.read_text() or "{}")
            if record.get("pid") == child.pid:
                make_older(path, since_s, idle_s)
        return child

    def pid_of(self, notebook: str) -> int:
        """Return the pid of a notebook that holds a GPU."""
        texts = [path.read_text() or "{}" for path in self.machine.locks.glob("GPU-*.lock")]
        (record,) = (r for r in map(json.loads, texts) if r.get("notebook") == notebook)
        return int(record["pid"])

    def close(self) -> None:
        """End all processes."""
        self._people.close()

    def _update(self) -> None:
        gpus = [MODEL + "".join(f"  {use}\n" for use in self.uses.get(n, [])) for n in range(8)]
        self.machine.write("".join(gpus) + TROUBLE)


def as_user(user: str) -> list[str]:
    return ["setpriv", f"--reuid={user}", "--regid=65534", "--clear-groups"]


def start_users(scene: Scene) -> None:
    """Start the reservations and processes of all pictures."""
    alice = scene.holder(
        "alice", "train.ipynb", 0, since_s=9.3 * HOUR_S, request="note='for the thesis'"
    )
    scene.use(0, alice.pid, 70900, 97)
    bob = scene.holder("bob", "finetune.ipynb", 1, since_s=130 * MINUTE_S, request="for_='3h'")
    scene.use(1, bob.pid, 38300, 64)
    scene.holder("carol", "explore.ipynb", 2, since_s=6 * HOUR_S, idle_s=5.4 * HOUR_S)
    scene.use(3, scene.stranger("dave", "train.py"), 21500, 88)


def status(scene: Scene, lab: Lab, page: Page) -> None:
    """Show a notebook that gets a GPU, and the status."""
    run_and_take_picture(
        lab, page, "status.png", "sweep.ipynb", "%reserve_gpu", "%reserve_gpu --status"
    )


def waiting(scene: Scene, lab: Lab, page: Page) -> None:
    """Show two notebooks: one holds the last free GPU, and the other one waits."""
    bob = scene.holder("bob", "fold.ipynb", 7, since_s=25 * MINUTE_S)
    scene.use(7, bob.pid, 52000, 90)
    lab.write("baseline.ipynb", "%reserve_gpu")
    lab.write("ablation.ipynb", "%reserve_gpu --wait 1h")
    with (
        closing(Notebook(page, "baseline.ipynb")) as left,
        closing(Notebook(page, "ablation.ipynb", left=left)) as right,
    ):
        left.execute(0)
        scene.person("carol", "/home/carol/explore.ipynb").send("reserve_gpu.reserve(wait=True)")
        wait_for(lambda: queue(scene.machine))
        right.run(0)
        right.see(0, "number 2 in the queue, 4 s so far")
        take_picture(page, "waiting.png", left, right)


def refusal(scene: Scene, lab: Lab, page: Page) -> None:
    """Show a request for more GPUs than are free."""
    del scene
    run_and_take_picture(lab, page, "refusal.png", "three.ipynb", "%reserve_gpu -n 3")


def parts(scene: Scene, lab: Lab, page: Page) -> None:
    """Show a notebook that gets a part of a GPU, and the status."""
    alice = scene.holder("alice", "probe.ipynb", 6, since_s=2 * HOUR_S, request="memory='10GiB'")
    scene.use(6, alice.pid, 12400, 71)
    bob = scene.holder("bob", "fold.ipynb", 6, since_s=25 * MINUTE_S, request="memory='32GiB'")
    scene.use(6, bob.pid, 9500, 71)
    cells = ("%reserve_gpu --memory 10GiB", "%reserve_gpu --status")
    run_and_take_picture(lab, page, "parts.png", "small.ipynb", *cells)
    for child in (alice, bob):  # the next picture needs the whole GPU
        child.kill()
    scene.free(6)


def ends(scene: Scene, lab: Lab, page: Page) -> None:
    """Show a notebook with a lease, and the ends of other leases."""
    scene.machine.rules.write_text('message = "Maintenance on Friday at 17:00"\n')
    request = "idle='1h', if_wanted=True"
    carol = scene.holder("carol", "demo.ipynb", 7, since_s=2600, idle_s=2400, request=request)
    cells = ("%reserve_gpu --for 4h", "%reserve_gpu --status")
    run_and_take_picture(lab, page, "ends.png", "sweep.ipynb", *cells)
    carol.kill()
    scene.machine.rules.write_text("")


def terminal(scene: Scene, lab: Lab, page: Page) -> None:
    """Show the status in a terminal of 120 columns."""
    del lab
    shown = scene.machine.command(
        *as_user("erin"), sys.executable, "-m", "reserve_gpu", "status",
        COLUMNS="120", NO_COLOR="", FORCE_COLOR="1",
    )  # fmt: skip
    page.set_content(TERMINAL.format(as_html(f"$ reserve-gpu status\n{shown.stdout}")))
    page.locator("pre").screenshot(path=IMAGES / "terminal.png")


def hosts(scene: Scene, lab: Lab, page: Page) -> None:
    """Show three machines in a terminal; one does not answer."""
    del lab
    folder = scene.machine.folder / "hosts"
    folder.mkdir()
    with Hosts(folder, "lab1", "lab2", "lab3", gpus=4) as machines, ExitStack() as people:
        for name, gpu, user, notebook in (
            ("lab1", 0, "alice", "train.ipynb"),
            ("lab1", 1, "bob", "finetune.ipynb"),
            ("lab2", 3, "carol", "explore.ipynb"),
        ):
            machine = machines.machines[name]
            environ = machine.environ(JPY_SESSION_NAME=notebook)
            child = Child(environ, machine.folder, *as_user(user))
            people.callback(child.kill)
            assert child.reserve(f"{gpu}, for_='3h'").value == str(gpu)
        machines.freeze("lab3")
        typed = ["status", "--hosts", "lab1,lab2,lab3"]
        shown = subprocess.run(
            [sys.executable, "-m", "reserve_gpu", *typed],
            env=machines.environ(COLUMNS="100", NO_COLOR="", FORCE_COLOR="1"),
            capture_output=True, check=True, text=True,
        ).stdout  # fmt: skip
    page.set_content(TERMINAL.format(as_html(f"$ reserve-gpu {' '.join(typed)}\n{shown}")))
    page.locator("pre").screenshot(path=IMAGES / "hosts.png")


def jupyterlab(scene: Scene, lab: Lab, page: Page) -> None:
    """Show a notebook with a GPU, and the status bar and panel of the extension."""
    cells = ("%reserve_gpu --for 4h", "import torch\nmodel = torch.nn.Linear(512, 512)")
    lab.write("sweep.ipynb", *cells)
    with closing(Notebook(page, "sweep.ipynb")) as notebook:
        show_panel(page, 720)
        notebook.execute(0)
        scene.use(6, scene.pid_of("sweep.ipynb"), 12400, 71)
        wait_for_status(page, "GPU6 · 12.1 of 80.0 GiB · until")
        page.screenshot(path=IMAGES / "jupyterlab.png")
    scene.free(6)


def jupyterlab_wanted(scene: Scene, lab: Lab, page: Page) -> None:
    """Show an idle GPU with a waiter, and the notification."""
    bob = scene.holder("bob", "fold.ipynb", 7, since_s=25 * MINUTE_S)
    scene.use(7, bob.pid, 52000, 90)
    lab.write("baseline.ipynb", "%reserve_gpu")
    with closing(Notebook(page, "baseline.ipynb")) as notebook:
        show_panel(page, 300)
        notebook.execute(0)
        for path in scene.machine.locks.glob("GPU-*.lock"):
            if json.loads(path.read_text() or "{}").get("notebook") == "baseline.ipynb":
                make_older(path, 12 * MINUTE_S)  # a young reservation is not idle
        carol = scene.person("carol", "/home/carol/explore.ipynb")
        carol.send("reserve_gpu.reserve(wait=True)")
        wait_for_status(page, "idle; carol is waiting for a GPU")
        page.evaluate("window.jupyterapp.commands.execute('apputils:display-notifications')")
        page.locator(".jp-Notification-Center").get_by_text("carol is waiting for a GPU").wait_for()
        page.screenshot(path=IMAGES / "jupyterlab_wanted.png")
        carol.kill()
    bob.kill()
    scene.free(7)


def jupyterlab_end(scene: Scene, lab: Lab, page: Page) -> None:
    """Show the narrow panel with a reservation that ends soon."""
    lab.write("probe.ipynb", "%reserve_gpu --for 9m")
    with closing(Notebook(page, "probe.ipynb")) as notebook:
        show_panel(page, 300)
        notebook.execute(0)
        wait_for_status(page, "9 min left")
        page.screenshot(path=IMAGES / "jupyterlab_end.png")


def show_panel(page: Page, width: int) -> None:
    """Show the panel of the extension with this width."""
    page.evaluate("window.jupyterapp.commands.execute('reserve-gpu:show')")
    edge = page.locator(".jp-ReserveGPU-panel").bounding_box()
    assert edge
    page.mouse.move(edge["x"] - 1, 300)
    page.mouse.down()
    page.mouse.move(edge["x"] + edge["width"] - width, 300, steps=5)
    page.mouse.up()


def wait_for_status(page: Page, text: str) -> None:
    """Wait until the status bar contains the text."""
    page.locator(".jp-ReserveGPU-item", has_text=text).wait_for()


# The colors of a terminal.
TERMINAL = """<body style="margin:0"><pre style="margin:0;padding:14px;width:max-content;
font:14px 'DejaVu Sans Mono',monospace;line-height:1.25;background:#1e1e1e;color:#ddd">{}</pre>"""
TERMINAL_COLORS = {
    "31": "#f47067",
    "32": "#6bc46d",
    "33": "#daaa3f",
    "35": "#dcbdfb",
    "36": "#76e3ea",
}


def as_html(text: str) -> str:
    """Return the text of a terminal as HTML."""
    made = ""
    for part in re.split("(\x1b\\[[0-9;]*m)", text):
        code = part[2:-1] if part.startswith("\x1b[") else None
        if code is None:
            made += html.escape(part)
            continue
        styles = [
            f"color:{TERMINAL_COLORS[each]}" for each in code.split(";") if each in TERMINAL_COLORS
        ]
        styles += ["font-weight:bold"] if "1" in code.split(";") else []
        styles += ["opacity:0.7"] if code == "2" else []
        made += "</span>" if code == "0" else f'<span style="{";".join(styles)}">'
    return made


def run_and_take_picture(lab: Lab, page: Page, picture: str, name: str, *cells: str) -> None:
    """Run the cells of a new notebook, and take a picture of it."""
    lab.write(name, *cells)
    with closing(Notebook(page, name)) as notebook:
        for cell in range(len(cells)):
            notebook.execute(cell)
        take_picture(page, picture, notebook)


def take_picture(page: Page, name: str, *notebooks: Notebook) -> None:
    """Take a picture of the notebooks, down to the end of the longest one."""
    panels = [notebook.panel.bounding_box() for notebook in notebooks]
    ends = [
        notebook.panel.locator(".jp-Notebook-cell").last.bounding_box() for notebook in notebooks
    ]
    left, top = min(p["x"] for p in panels), min(p["y"] for p in panels) - TABS_PX
    right, bottom = (
        max(p["x"] + p["width"] for p in panels),
        max(e["y"] + e["height"] for e in ends),
    )
    clip = {"x": left, "y": top, "width": right - left, "height": bottom + MARGIN_PX - top}
    page.screenshot(path=IMAGES / name, clip=clip)


# The theme of the page, the function, and the size of the window.
PICTURES: tuple[tuple[str, Callable[[Scene, Lab, Page], None], dict[str, int]], ...] = (
    ("light", status, {"width": 1130, "height": 1400}),
    ("light", refusal, {"width": 1130, "height": 1000}),
    ("light", parts, {"width": 1130, "height": 1400}),
    ("light", ends, {"width": 1130, "height": 1400}),
    ("dark", waiting, {"width": 1600, "height": 900}),
    ("dark", terminal, {"width": 1300, "height": 800}),
    ("dark", hosts, {"width": 1300, "height": 800}),
    ("light", jupyterlab, {"width": 1400, "height": 640}),
    ("dark", jupyterlab_wanted, {"width": 1100, "height": 640}),
    ("light", jupyterlab_end, {"width": 1000, "height": 780}),
)


def set_names(folder: Path) -> None:
    """Set the names of the users and the host in this namespace."""
    passwd = folder / "passwd"
    people = "".join(f"{user}:x:{n}:{n}::/nonexistent:/bin/sh\n" for user, n in USERS.items())
    passwd.write_text(Path("/etc/passwd").read_text() + people)
    subprocess.run(["mount", "--bind", passwd, "/etc/passwd"], check=True)
    subprocess.run(["hostname", HOST], check=True)


def draw(folder: Path, names: Sequence[str]) -> None:
    """Create the pictures with these names, or all. The folder is writable for all users."""
    set_names(folder)
    with ExitStack() as opened:
        scene = Scene(folder)
        opened.callback(scene.close)
        start_users(scene)
        lab = Lab(scene.machine, *as_user("erin"))
        opened.callback(lab.close)
        for theme, picture, viewport in PICTURES:
            if names and picture.__name__ not in names:
                continue
            with browser(lab, viewport=viewport) as page:
                show_theme(page, theme)
                page.evaluate("window.jupyterapp.shell.collapseLeft()")
                picture(scene, lab, page)


def main() -> None:
    """Create the pictures in a new namespace."""
    if os.geteuid():
        sys.exit(
            "python -m tests.support.screenshots: run it as root, because it shows several users."
        )
    inside = "--inside"
    if inside not in sys.argv:
        program = [sys.executable, "-m", "tests.support.screenshots", inside, *sys.argv[1:]]
        sys.exit(subprocess.run([*NAMESPACE, *program], check=False).returncode)
    IMAGES.mkdir(parents=True, exist_ok=True)
    os.umask(0)  # all users write to the folder
    with tempfile.TemporaryDirectory(prefix="reserve_gpu-screenshots-") as folder:
        Path(folder).chmod(0o1777)
        require_python(folder)
        draw(Path(folder), [name for name in sys.argv[1:] if name != inside])
    for image in IMAGES.iterdir():
        image.chmod(0o644)


def require_python(folder: str) -> None:
    """Exit with a message if other users cannot run this Python."""
    kernel = (
        "import subprocess, sys; subprocess.check_call([sys.executable, '-m', 'ipykernel', '-h'])"
    )
    command = [*as_user("nobody"), sys.executable, "-c", kernel]
    if subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode:
        sys.exit(f"Other users can't run {sys.executable}. Use a Python that they can run.")


if __name__ == "__main__":
    main()
