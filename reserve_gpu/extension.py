"""The IPython extension: the magic %reserve_gpu, its settings, and Tab completion.

Most shells load the extension from a configuration file and never reserve a GPU. Therefore, the
magic is imported only when it is first used.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class
from traitlets import CUnicode, Unicode, observe

from reserve_gpu.model.errors import PackageError, ReserveGPUError, WaitInterrupted
from reserve_gpu.system import executor, jupyter_kernel, lock_keeper, procfs, settings
from reserve_gpu.system.forks import no_fork
from reserve_gpu.system.jupyter_kernel import cells

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell


MAGIC_NAME = "%reserve_gpu"
MATCHER = "reserve_gpu.ipython.completion"
# This priority is higher than that of IPython's own matchers, so IPython does not call them for
# lines that contain the magic.
MATCHER_PRIORITY = 1000
SETTINGS = {"lock_directory": settings.LOCK_DIRECTORY, "idle_memory": settings.IDLE_MEMORY}


def _manual() -> str:
    """Return the magic's help text."""
    from reserve_gpu.ipython import parser

    return parser.magic_parser().format_help()


# -- the magic and its settings -------------------------------------------------------------------


@magics_class
class ReserveGPU(Magics):
    """The magic %reserve_gpu, its settings, and its hooks."""

    lock_directory = Unicode(
        help="The lock directory, which all users of this machine must share. Leave empty for "
        f"the default. Stored in ${settings.LOCK_DIRECTORY}, so child processes use the same "
        "directory."
    ).tag(config=True)
    idle_memory = CUnicode(  # also accepts a number such as 500
        help="A GPU without compute processes is idle if at most this amount of memory is in use "
        "(500MiB, 2GB). Leave empty for 1 GiB or 5 % of the GPU, whichever is less. "
        f"Stored in ${settings.IDLE_MEMORY}."
    ).tag(config=True)

    package: tuple[int, int] | None = None  # result of _package() when the extension was loaded
    must_report_change = True  # whether to report that the installed package has changed
    must_show_start = False  # whether the next cell must show the GPUs that the kernel started with
    must_show_kept = False  # whether the next cell must show the GPUs that are kept for this kernel

    @line_magic
    def reserve_gpu(self, line: str) -> None:
        """Reserve a GPU for this kernel, and set the CUDA variables for the code that it runs."""
        try:
            with no_fork:
                from reserve_gpu.ipython import magic
            magic.run(line)
        except (ReserveGPUError, UsageError):
            raise
        except Exception as error:
            if change := self._change():
                raise PackageError(change) from error
            raise

    # IPython prefers getdoc() to the docstring, so `%reserve_gpu?` shows the parser's help.
    reserve_gpu.getdoc = _manual  # type: ignore[union-attr]

    def begin_cell(self, info: ExecutionInfo) -> None:
        """Record that a cell is starting, and show any messages before the cell's output."""
        cells().begin(info)
        if not info.store_history:  # code that a frontend runs without showing it
            return
        try:
            if not (self.must_show_start or _has_session()):
                return
            with no_fork:
                from reserve_gpu.ipython import magic
            if _has_session() and (lines := magic.begin_cell()):
                magic.warn(lines)
            if self.must_show_start:
                self.must_show_start = False
                with no_fork:
                    from reserve_gpu.ipython import start_messages
                start_messages.show_start()
        except Exception:
            if not self._report_change():
                raise

    def end_cell(self, result: ExecutionResult | None) -> None:
        """Record that a cell has finished, and show any messages after the cell's output."""
        cells().end(result)
        try:
            if _has_session():
                with no_fork:
                    from reserve_gpu.ipython import magic
                if lines := magic.end_cell():
                    magic.warn(lines)
            info = result and result.info
            if self.must_show_kept and info and info.store_history:
                self.must_show_kept = False
                file = jupyter_kernel.connection_file()
                lock_keepers = procfs.own_processes(lock_keeper.WORDS)
                cells().has_lock_keeper = any(file in words for _, words in lock_keepers)
                if cells().has_lock_keeper:
                    with no_fork:
                        from reserve_gpu.ipython import start_messages
                    start_messages.show_kept()
        except Exception:
            if not self._report_change():
                raise

    def _change(self) -> str | None:
        """Return a message if the package has been updated or removed since it was loaded."""
        current = _package()
        if current == self.package:
            return None
        change, step = (
            ("updated", "Restart") if current else ("removed", "Install it again and restart")
        )
        return (
            f"The package reserve_gpu was {change} while this kernel was running. {step} the "
            "kernel. The GPUs that it holds stay reserved until then."
        )

    def _report_change(self) -> bool:
        """Return whether the package has changed, and print a message the first time.

        Hooks call this method after an error, because a changed package might be the cause.
        """
        change = self._change()
        if change and self.must_report_change:
            self.must_report_change = False
            print(change, file=sys.stderr)
        return change is not None

    def leave_to_restart(self, change: dict[str, Any]) -> None:
        """Keep the reservation for the next kernel if this kernel restarts.

        ipykernel sets `exit_now` on its control thread when a client requests a shutdown. A flag in
        the request says whether the kernel will restart:
        https://jupyter-client.readthedocs.io/en/stable/messaging.html#kernel-shutdown
        """
        try:
            request = self.shell.kernel.get_parent("control")  # type: ignore[union-attr]
            is_shutdown = request["header"]["msg_type"] == "shutdown_request"
            if change["new"] and is_shutdown and request["content"]["restart"] and _has_session():
                with no_fork:
                    from reserve_gpu.ipython import magic
                magic.leave_to_restart()
        except Exception:  # an error must not prevent the kernel's shutdown
            log = logging.getLogger("reserve_gpu")
            log.warning("The reservation can't be kept for the restart.", exc_info=True)

    @observe(*SETTINGS)
    def _export(self, change: dict[str, Any]) -> None:
        variable = SETTINGS[change["name"]]
        if change["new"]:
            os.environ[variable] = change["new"]
        else:
            os.environ.pop(variable, None)


# -- loading and unloading ------------------------------------------------------------------------


def load(shell: InteractiveShell) -> None:
    """Register the magic and its settings with the shell."""
    unload(shell)
    # Environment variables take precedence over a configuration file.
    values: dict[str, Any] = {
        trait: os.environ[name] for trait, name in SETTINGS.items() if os.environ.get(name)
    }
    magics = ReserveGPU(shell=shell, parent=shell, **values)
    magics.package = _package()
    shell.register_magics(magics)
    cells().watch(shell)
    shell.events.register("pre_run_cell", magics.begin_cell)
    shell.events.register("post_run_cell", magics.end_cell)
    if not shell.custom_exceptions:  # don't replace a handler that the user has set
        shell.set_custom_exc((WaitInterrupted,), _show_interrupted)  # type: ignore[no-untyped-call]
    _add_completion(shell)
    if hasattr(shell, "kernel"):
        shell.observe(magics.leave_to_restart, "exit_now")
        magics.must_show_kept = True
    magics.must_show_start = _has_handover()


def unload(shell: InteractiveShell) -> None:
    """Remove the magic and its settings from the shell."""
    _remove_completion(shell)
    cells().leave()
    if shell.custom_exceptions == (WaitInterrupted,):
        shell.set_custom_exc((), None)  # type: ignore[no-untyped-call]
    shell.magics_manager.magics["line"].pop("reserve_gpu", None)
    if magics := shell.magics_manager.registry.pop("ReserveGPU", None):
        shell.configurables.remove(magics)
        shell.events.unregister("pre_run_cell", magics.begin_cell)
        shell.events.unregister("post_run_cell", magics.end_cell)
        with suppress(ValueError):  # the shell does not belong to a kernel
            shell.unobserve(magics.leave_to_restart, "exit_now")


def _package() -> tuple[int, int] | None:
    """Return the inode and modification time of the package's `__init__.py`.

    Installing the package replaces this file, so at least one of the two values changes. None means
    that the package has been removed.
    """
    with suppress(OSError):
        status = os.stat(os.path.join(os.path.dirname(__file__), "__init__.py"))
        return status.st_ino, status.st_mtime_ns
    return None


def _has_handover() -> bool:
    """Return whether the previous program in this process handed over GPUs or a message.

    The session takes over the GPUs when it is created (see `api.before_exec`). This must happen
    before the shell starts a child process, because the child process would inherit the locks.
    """
    if procfs.reservation_pid() != os.getpid():
        return False
    with no_fork:
        from reserve_gpu.reservation.session import session
    return bool(session().reason or session().held)


def _show_interrupted(*details: Any, **_options: Any) -> None:
    """Print an interrupted wait's message without a traceback. `Run All Cells` still stops."""
    _shell, _kind, error, _traceback = details
    print(error)


_sessions: dict[int, object] = executor.survive_reload("sessions", dict)


def _has_session() -> bool:
    """Return whether this process has a session, or was handed one by its previous program."""
    return bool(_sessions) or procfs.reservation_pid() == os.getpid()


def _add_completion(shell: InteractiveShell) -> None:
    """Register Tab completion, whose module is loaded only when the user first presses Tab."""
    try:
        from IPython.core.completer import context_matcher
    except ImportError:  # before IPython 8.6

        def endings(_shell: InteractiveShell, event: Any) -> Any:
            from reserve_gpu.ipython import completion

            return completion.endings(shell, event)

        shell.set_hook("complete_command", endings, str_key=MAGIC_NAME)  # type: ignore[no-untyped-call]
        return

    def matcher(context: Any) -> Any:
        if "reserve_gpu" not in context.full_text:
            return {"completions": []}
        from reserve_gpu.ipython import completion

        return completion.matches(shell, context)

    if shell.Completer is not None:
        # Insert the matcher at the front, because other code appends its own matcher, and later
        # removes the last matcher in the list.
        shell.Completer.custom_matchers.insert(
            0, context_matcher(identifier=MATCHER, priority=MATCHER_PRIORITY)(matcher)
        )


def _remove_completion(shell: InteractiveShell) -> None:
    matchers = getattr(shell.Completer, "custom_matchers", [])
    matchers[:] = [m for m in matchers if getattr(m, "matcher_identifier", "") != MATCHER]
    if hooks := shell.strdispatchers.get("complete_command"):
        hooks.strs.pop(MAGIC_NAME, None)
