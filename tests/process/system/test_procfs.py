"""What the system says of processes: their commands, notebooks and directories, and who holds."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import reserve_gpu
from reserve_gpu.render import phrases
from tests.support.machine import Child

if TYPE_CHECKING:
    from tests.support.here import Here

SCRIPT = """
import json, sys
import reserve_gpu
reserve_gpu.reserve("0")
print(json.dumps(reserve_gpu.status().to_dict()["devices"][0]["holders"]))
"""
US = (sys.executable, "-m", "reserve_gpu")


def test_a_script(here: Here) -> None:
    """A script's holder has no notebook; its command and its directory stand apart."""
    (here.folder / "train.py").write_text(SCRIPT)
    done = here.command(sys.executable, str(here.folder / "train.py"), "--epochs", "3")
    (holder,) = json.loads(done.stdout)
    assert holder["notebook"] is None
    assert holder["command"] == f"{os.path.basename(sys.executable)} train.py --epochs 3"
    assert holder["cwd"] == str(here.folder)


def test_the_directory_is_gone(here: Here) -> None:
    """Who works in a directory that was deleted reserves as ever, and has none."""
    code = "import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"
    done = here.python(code + SCRIPT)
    (holder,) = json.loads(done.stdout)
    assert holder["cwd"] is None
    assert holder["command"].startswith(f"{os.path.basename(sys.executable)} -c import os;")


def test_a_kernel_has_no_notebook_of_the_process_that_started_it(here: Here) -> None:
    """A notebook's name counts only if the process that started the kernel does not have it."""
    ask = "from reserve_gpu.system import process_identity; print(process_identity.notebook())"
    name = {"JPY_SESSION_NAME": "/home/alice/train.ipynb"}
    with here.child(**name) as starter:
        for pid, notebook in ((starter.pid, "None"), (os.getpid(), "train.ipynb")):
            done = here.python(ask, **name, JPY_PARENT_PID=str(pid))
            assert done.stdout == f"{notebook}\n"


def test_what_run_has_started(here: Here) -> None:
    """Behind `reserve-gpu run` it is the command that is named, not ours nor the notebook's."""
    environ = here.environ(JPY_SESSION_NAME="/home/alice/train.ipynb")
    child = Child(environ, here.folder, *US, "run", "--")
    try:
        (holder,) = reserve_gpu.status().rows[0].holders
    finally:
        child.kill()
    assert holder.notebook is None
    assert holder.record.who.command == f"{os.path.basename(sys.executable)} child.py"
    assert f", {holder.record.who.command} (pid {child.pid})" in phrases.holder(holder)


def test_who_uses_a_gpu(here: Here) -> None:
    """A process that uses a GPU without having reserved it is called by its command in short."""
    with here.child() as child:
        here.write(f"gpu\n compute {child.pid} 300")
        (process,) = reserve_gpu.status().rows[0].processes
    assert process.command == f"{os.path.basename(sys.executable)} child.py"
