"""Install kernelspecs that reserve a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.system import spawn
from tests.support.kernelspec import install_kernelspec, kernelspec_folder

if TYPE_CHECKING:
    from tests.support.commandline import CommandLine
    from tests.support.here import Here


@pytest.mark.ipython
def test_the_kernelspec_extends_the_stock_one(here: Here, typed: CommandLine) -> None:
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict

    stock = get_kernel_dict()
    spec = install_kernelspec(here, typed, "-n", "2", "--gpu-name", "1050")
    at = spec["argv"].index("--")
    start = spawn.python("-m", "reserve_gpu", "kernel", "start", "--count=2", "--name=1050")
    assert spec["argv"][:at] == start
    assert spec["argv"][at + 1 :] == [*stock["argv"], "--ext", "reserve_gpu"]
    assert os.path.isabs(spec["argv"][0])
    assert spec["display_name"] == "Python 3 (GPU: count 2, name 1050)"
    assert spec["metadata"].items() >= stock["metadata"].items()
    logos = {path.name for path in Path(RESOURCES).iterdir() if path.suffix in (".png", ".svg")}
    assert {path.name for path in kernelspec_folder(here).iterdir()} >= logos


def test_the_default_place_is_the_user_s(here: Here, typed: CommandLine) -> None:
    os.environ["JUPYTER_DATA_DIR"] = str(here.home / "data")
    assert typed("kernel", "install", "--name", "Mine").code == 0
    assert (here.home / "data" / "kernels" / "mine" / "kernel.json").exists()


@pytest.mark.parametrize("content", ['{"argv": ["x"], "metadata": {}}', "rubbish", None])
def test_another_kernel_of_the_same_name_is_not_replaced(
    here: Here, typed: CommandLine, content: str | None
) -> None:
    folder = kernelspec_folder(here)
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "kernel.json").write_text(content)
    done = typed("kernel", "install", "--prefix", ".")
    assert (done.code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert [path.read_text() for path in folder.iterdir()] == [content] * (content is not None)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--wait", "45 s"),
        ("--wait 46s", "45 s"),
        ("--until 2099-12-01", "weekday"),
        ("--if-wanted", "say when"),
        ("--name ../x", "'../x'"),
        ("--user --sys-prefix", "--sys-prefix"),
        ("--prefix /dev/null", "/dev/null"),
    ],
)
def test_an_invalid_request_is_refused(
    here: Here, typed: CommandLine, words: str, key: str
) -> None:
    os.environ["JUPYTER_DATA_DIR"] = str(here.folder / "data")
    done = typed("kernel", "install", *words.split())
    assert done.code == (73 if "/dev/null" in words else 2)
    assert key in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (here.folder / "data").exists()


def test_a_second_install_replaces_the_first(here: Here, typed: CommandLine) -> None:
    install_kernelspec(here, typed, "-n", "2", "--wait", "45s")
    assert "--count=2" not in install_kernelspec(here, typed)["argv"]


@pytest.mark.parametrize("missing", ["jupyter_client", "ipykernel", "jupyter_client ipykernel"])
def test_the_error_shows_how_to_install_the_missing_parts_of_jupyter(
    typed: CommandLine, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for module in missing.split():
        monkeypatch.setitem(sys.modules, module, None)
    done = typed("kernel", "install", "--prefix", ".")
    assert (done.code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.endswith(f"-m pip install {missing}\n")
