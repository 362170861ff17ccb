"""Kernels that have their GPU before their first line runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.system import spawn

if TYPE_CHECKING:
    from tests.support.commandline import CommandLine
    from tests.support.here import Here


from tests.support.kernelspec import folder, install

# Here, as old ones set an environment variable when jupyter_client first imports them.
pytest.importorskip("ipykernel.kernelspec")


# -- installing -----------------------------------------------------------------------------------


@pytest.mark.ipython
def test_the_kernelspec(here: Here, typed: CommandLine) -> None:
    """The kernelspec is the stock one with its logos and metadata, started by this Python."""
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict

    spec, stock = install(here, typed, "-n", "2", "--gpu-name", "1050"), get_kernel_dict()
    at = spec["argv"].index("--")
    start = spawn.python("-m", "reserve_gpu", "kernel", "start", "--count=2", "--name=1050")
    assert spec["argv"][:at] == start
    assert spec["argv"][at + 1 :] == [*stock["argv"], "--ext", "reserve_gpu"]
    assert os.path.isabs(spec["argv"][0])
    assert spec["display_name"] == "Python 3 (GPU: count 2, name 1050)"
    assert spec["metadata"].items() >= stock["metadata"].items()
    logos = {path.name for path in Path(RESOURCES).iterdir() if path.suffix in (".png", ".svg")}
    assert {path.name for path in folder(here).iterdir()} >= logos


def test_install_again(here: Here, typed: CommandLine) -> None:
    """Installing again replaces ours."""
    install(here, typed, "-n", "2")
    assert "--count=2" not in install(here, typed)["argv"]


def test_the_user_s_place(here: Here, typed: CommandLine) -> None:
    """By default the kernel is the user's, where every notebook of theirs finds it."""
    data = here.home / "data"
    os.environ["JUPYTER_DATA_DIR"] = str(data)
    done = typed("kernel", "install", "--name", "Mine")
    assert f"in {data}/kernels/mine\n" in done.stdout, done.stderr


@pytest.mark.parametrize("content", ['{"argv": ["x"], "metadata": {}}', "rubbish", None])
def test_another_s_kernel_is_left_alone(
    here: Here, typed: CommandLine, content: str | None
) -> None:
    """A kernel of the same name that is not ours is not replaced."""
    folder(here).mkdir(parents=True)
    if content is not None:
        (folder(here) / "kernel.json").write_text(content)
    before = list(folder(here).iterdir())
    done = typed("kernel", "install", "--prefix", ".")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert list(folder(here).iterdir()) == before
    assert [path.read_text() for path in before] == ([] if content is None else [content])


def test_the_stock_kernel_is_not_replaced(typed: CommandLine) -> None:
    """The name of the stock kernel is refused: whoever opens a notebook expects that one."""
    done = typed("kernel", "install", "--prefix", ".", "--name", "python3")
    assert done.code == 2
    assert "Choose another --name" in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--wait", "up to 45 s"),
        ("--wait 2m", "up to 45 s"),
        ("--wait soon", "not a valid duration"),
        ("--idle soon", "not a valid duration"),
        ("--until 2099-12-01", "Use a time of day or a weekday with --until"),
        ("--until 25:00", "not a valid time"),
        ("--if-wanted", "say when"),
        ("--min-memory much", "not a valid size"),
        ("nonsense", "is not a GPU name"),
        ("--name ../x", "not a valid kernel name"),
        ("--name ..", "not a valid kernel name"),
        ("--user --sys-prefix", "Give one of"),
        ("--prefix /dev/null", "can't be installed"),
    ],
)
def test_what_can_not_be_installed(here: Here, typed: CommandLine, words: str, text: str) -> None:
    """A kernel that could never start is refused in one line, before anything is written."""
    os.environ["JUPYTER_DATA_DIR"] = str(here.folder / "data")
    done = typed("kernel", "install", *words.split())
    assert done.code == (73 if "/dev/null" in words else 2)
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (here.folder / "data").exists()


@pytest.mark.parametrize("missing", ["jupyter_client", "ipykernel", "jupyter_client ipykernel"])
def test_without_jupyter(typed: CommandLine, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Where parts of Jupyter that are needed are missing, one line says how to get all of them."""
    for module in missing.split():
        monkeypatch.setitem(sys.modules, module, None)
    done = typed("kernel", "install", "--prefix", ".")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.endswith(f"-m pip install {missing}\n")
    assert done.stderr.count("\n") == 1
