"""`reserve-gpu setup` checks whether the real IPython and a real kernel load the extension."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.setup import find_extension
from tests.support.machine import ROOT
from tests.support.profiles import OWN_LINE

if TYPE_CHECKING:
    from tests.support.profiles import Home

pytestmark = pytest.mark.full
KERNEL_FILE = "ipython_kernel_config.py"
OTHER_LIST = b'{"%s": {"extensions": ["autoreload"]}}'
PRINT_LOADED = "print('loaded:', 'reserve_gpu' in get_ipython().extension_manager.loaded)"


def run_ipython(home: Home, *options: str, cwd: str | Path = "/", **environ: str | Path) -> str:
    """Return the output of IPython in a terminal, including whether the extension is loaded."""
    done = subprocess.run(
        [sys.executable, *options, "-m", "IPython", "--no-banner", "-c", PRINT_LOADED],
        env=home.environ(TERM="dumb", **environ), cwd=cwd, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "data",
    [
        b"c = get_config()\nc.InteractiveShellApp.extensions = [\n    'reserve_gpu',\n]\n",
        (ROOT / "ipython_config.py").read_bytes(),
    ],
)
def test_own_line_is_enough(data: bytes, home: Home) -> None:
    """If the user's own configuration loads the extension, nothing is added."""
    home.write(data)
    before = home.configuration()
    assert home.setup().stdout.startswith("Nothing was changed.")
    assert home.configuration() == before


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("ipython_config.py", b"raise ValueError('mine')\n", "ValueError: mine"),
        ("startup/1.py", b"__import__('os')._exit(0)\n", "unknown reason"),
        (
            "ipython_config.json",
            OTHER_LIST % b"InteractiveShellApp",
            "InteractiveShellApp.extensions in {}",
        ),
        (
            KERNEL_FILE,
            b"get_config().IPKernelApp.extensions = ['autoreload']\n",
            "c.IPKernelApp.extensions in {}",
        ),
    ],
)
def test_error_names_why_the_lines_load_nothing(
    name: str, data: bytes, reason: str, home: Home
) -> None:
    """The error names the setting or the exception until the user fixes it."""
    file = home.write(data, name)
    assert home.fail_setup().startswith(f"Added lines to {home.config}.")
    line = home.fail_setup()
    assert line.startswith("Nothing was changed.")
    assert reason.format(file) in line
    assert ("loaded: True" in run_ipython(home)) == (name == KERNEL_FILE)
    file.write_bytes(file.read_bytes().replace(data, b"{}" if name.endswith("json") else b"pass\n"))
    home.setup()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("ipython_config.py", b"get_config().TerminalIPythonApp.extensions = ['reserve_gpu']\n"),
        ("startup/1.py", b"1 / 0\n"),
        (KERNEL_FILE, b"get_config().InteractiveShellApp.extensions.append('json')\n"),
        (KERNEL_FILE, b"raise ValueError('mine')\n"),
    ],
)
def test_harmless_settings_are_accepted(name: str, data: bytes, home: Home) -> None:
    """Other settings and errors do not keep IPython or a kernel from loading the extension."""
    home.write(data, name)
    home.setup()
    assert "loaded: True" in run_ipython(home)


@pytest.mark.parametrize(
    ("name", "section"),
    [(KERNEL_FILE, "IPKernelApp"), ("ipython_config.py", "TerminalIPythonApp")],
)
def test_append_in_another_section_is_refused(name: str, section: str, home: Home) -> None:
    """The lines are refused, because with two appends traitlets would double the list."""
    file = home.write(f"get_config().{section}.extensions.append('autoreload')\n".encode(), name)
    before = home.configuration()
    assert f"c.{section}.extensions in {file}" in home.fail_setup()
    assert home.configuration() == before


@pytest.mark.parametrize(
    ("check", "section", "name"),
    [
        ("terminal", "TerminalIPythonApp", "ipython_config.json"),
        ("kernel", "InteractiveShellApp", "ipython_config.json"),
        ("kernel", "IPKernelApp", "ipython_kernel_config.json"),
    ],
)
def test_json_file_that_replaces_the_extensions_is_named(
    check: str, section: str, name: str, home: Home
) -> None:
    home.write(OWN_LINE)
    file = home.write(OTHER_LIST % section.encode(), name)
    answer = home.path / "answer"
    command = [sys.executable, find_extension.__file__, check, str(answer)]
    subprocess.run(command, env=home.environ(), cwd="/", capture_output=True, check=True)
    assert answer.read_text().startswith(f"{section}.extensions in {file} ")


def test_environment_without_the_package(home: Home, tmp_path: Path) -> None:
    """The lines load nothing without the package, even in a folder that contains its name."""
    home.setup()
    above = tmp_path / "above"
    (above / "reserve_gpu" / "reserve_gpu").mkdir(parents=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    for folder in [folder for folder in sys.path if folder.endswith("-packages")]:
        for entry in Path(folder).iterdir():
            if "reserve_gpu" not in entry.name and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    output = run_ipython(home, "-S", cwd=above, PYTHONPATH=packages)
    assert "loaded: False" in output
    assert "Error" not in output
