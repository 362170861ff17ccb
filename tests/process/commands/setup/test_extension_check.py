"""`reserve-gpu setup` reports what the real IPython and a real kernel do with a configuration."""

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


def run_ipython(home: Home) -> str:
    """Return the output of IPython in a terminal, including whether the extension is loaded."""
    code = "print('loaded:', 'reserve_gpu' in get_ipython().extension_manager.loaded)"
    command = [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "-c", code]
    done = subprocess.run(
        command, env=home.environ(TERM="dumb"), cwd="/", capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "data",
    [
        OWN_LINE,
        b"c = get_config()\nc.InteractiveShellApp.extensions = [\n    'reserve_gpu',\n]\n",
        (ROOT / "ipython_config.py").read_bytes(),
    ],
)
def test_own_line(data: bytes, home: Home) -> None:
    """If the user's own configuration loads the extension, nothing is added or removed."""
    home.write(data)
    before = home.configuration()
    text = "Nothing was changed. Your configuration or the system's already loads the extension.\n"
    assert home.run().stdout.startswith(text)
    assert home.configuration() == before


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("ipython_config.py", b"raise ValueError('mine')\n", "ValueError: mine"),
        ("ipython_config.py", b"no Python\n", "SyntaxError: "),
        ("startup/1.py", b"__import__('os')._exit(0)\n", "unknown reason"),
        (
            "ipython_config.json",
            OTHER_LIST % b"InteractiveShellApp",
            "InteractiveShellApp.extensions in {} replaces the extensions",
        ),
        (
            KERNEL_FILE,
            b"get_config().IPKernelApp.extensions = ['autoreload']\n",
            "a Jupyter kernel does not load the extension: c.IPKernelApp.extensions in {} replaces",
        ),
    ],
)
def test_lines_that_do_not_load_the_extension(
    name: str, data: bytes, reason: str, home: Home
) -> None:
    """The error names the setting or the exception, also on the second run; then it is fixed."""
    file = home.write(data, name)
    assert home.refused().startswith(f"Added lines to {home.config}. But ")
    line = home.refused()
    assert line.startswith(f"Nothing was changed. The lines are already in {home.config}. But ")
    assert reason.format(file) in line
    assert ("loaded: True" in run_ipython(home)) == (name == KERNEL_FILE)
    file.write_bytes(file.read_bytes().replace(data, b"{}" if name.endswith("json") else b"pass\n"))
    assert "Whenever IPython or a Jupyter kernel of" in home.run().stdout


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("ipython_config.py", b"get_config().TerminalIPythonApp.extensions = ['reserve_gpu']\n"),
        ("startup/1.py", b"1 / 0\n"),
        (KERNEL_FILE, b"get_config().InteractiveShellApp.extensions.append('json')\n"),
        (KERNEL_FILE, b"raise ValueError('mine')\n"),
    ],
)
def test_settings_that_do_no_harm(name: str, data: bytes, home: Home) -> None:
    """Other settings and errors do not keep IPython or a kernel from loading the extension."""
    home.write(data, name)
    assert "Whenever IPython or a Jupyter kernel of" in home.run().stdout
    assert "loaded: True" in run_ipython(home)


@pytest.mark.parametrize("check", ["terminal", "kernel"])
@pytest.mark.parametrize("section", ["InteractiveShellApp", "OWN"])
def test_a_json_file_that_replaces_the_extensions(check: str, section: str, home: Home) -> None:
    """A list of extensions in a JSON file of either program is named."""
    own = {"terminal": "TerminalIPythonApp", "kernel": "IPKernelApp"}[check]
    section = own if section == "OWN" else section
    home.write(OWN_LINE)
    names = {"TerminalIPythonApp": "ipython_config", "IPKernelApp": "ipython_kernel_config"}
    name = f"{names.get(section, 'ipython_config')}.json"
    file = home.write(OTHER_LIST % section.encode(), name)
    answer = home.path / "answer"
    command = [sys.executable, find_extension.__file__, check, str(answer)]
    subprocess.run(command, env=home.environ(), cwd="/", capture_output=True, check=True)
    assert answer.read_text().startswith(f"{section}.extensions in {file} replaces the extensions")


def test_environment_without_the_package(home: Home, tmp_path: Path) -> None:
    """The lines load nothing where the package is missing, even above a folder of its name."""
    home.run()
    above = tmp_path / "above"
    (above / "reserve_gpu" / "reserve_gpu").mkdir(parents=True)
    code = "print('loaded:', 'reserve_gpu' in get_ipython().extension_manager.loaded)"
    path = [folder for folder in sys.path if folder.endswith("-packages")]
    blocked = tmp_path / "packages"
    blocked.mkdir()
    for folder in path:
        for entry in Path(folder).iterdir():
            if "reserve_gpu" not in entry.name and not (blocked / entry.name).exists():
                (blocked / entry.name).symlink_to(entry)
    command = [sys.executable, "-S", "-m", "IPython", "--no-banner", "-c", code]
    done = subprocess.run(
        command,
        env=home.environ(PYTHONPATH=blocked, TERM="dumb"),
        cwd=above,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "loaded: False" in done.stdout
    assert "Error" not in done.stdout + done.stderr
