"""What IPython loads: the name %reserve_gpu, its settings, and Tab.

Most shells that load it, by a configuration file, never reserve anything. So what does the work is
imported when the first line asks for it.
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
FIRST = 1000  # before IPython's own matchers, so that those that it keeps out are not even asked
SETTINGS = {"lock_directory": settings.LOCK_DIRECTORY, "idle_memory": settings.IDLE_MEMORY}


def _manual() -> str:
    """Return the help of the magic."""
    from reserve_gpu.ipython import parser

    return parser.magic_parser().format_help()


# -- the magic and its settings -------------------------------------------------------------------


@magics_class
class ReserveGPU(Magics):
    """Settings of %reserve_gpu."""

    lock_directory = Unicode(
        help="Directory of the locks, one for all users of this machine; empty for the default. "
        f"Kept in ${settings.LOCK_DIRECTORY}, so that what this kernel starts uses the same."
    ).tag(config=True)
    idle_memory = CUnicode(  # people also write the number 500 here
        help="Memory in use up to which a GPU without compute processes is idle (500MiB, 2GB); "
        "empty for 1 GiB or 5 % of the GPU, whichever is less. "
        f"Kept in ${settings.IDLE_MEMORY}."
    ).tag(config=True)

    package: tuple[int, int] | None = None  # the installed one, as it was loaded
    is_to_tell_change = True  # that it has changed since
    is_to_tell_start = False  # in its first cell: earlier nobody reads
    is_to_tell_kept = False  # after that, if it has not asked for what is kept for it

    @line_magic
    def reserve_gpu(self, line: str) -> None:
        """Reserve a GPU for this kernel, and set the CUDA variables for what it runs next."""
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

    # Where IPython looks before the docstring; %reserve_gpu? shows what the parser says of itself.
    reserve_gpu.getdoc = _manual  # type: ignore[union-attr]

    def begin_cell(self, info: ExecutionInfo) -> None:
        """Watch a cell that begins, and say before it what a person is to know."""
        cells().begin(info)
        if not info.store_history:  # code of a front end, which runs unseen
            return
        try:
            if not (self.is_to_tell_start or _has_session()):
                return
            with no_fork:
                from reserve_gpu.ipython import magic
            if _has_session() and (lines := magic.begin_cell()):
                magic.warn(lines)
            if self.is_to_tell_start:
                self.is_to_tell_start = False
                with no_fork:
                    from reserve_gpu.ipython import start_messages
                start_messages.tell_start()
        except Exception:
            if not self._is_told_of_change():
                raise

    def end_cell(self, result: ExecutionResult | None) -> None:
        """Let others see after a cell that this kernel is in use, and say what there is to say."""
        cells().end(result)
        try:
            if _has_session():
                with no_fork:
                    from reserve_gpu.ipython import magic
                if lines := magic.end_cell():
                    magic.warn(lines)
            info = result and result.info
            if self.is_to_tell_kept and info and info.store_history:
                self.is_to_tell_kept = False
                file = jupyter_kernel.connection_file()
                if any(file in about for _, about in procfs.own_processes(lock_keeper.WORDS)):
                    with no_fork:
                        from reserve_gpu.ipython import start_messages
                    start_messages.tell_kept()
        except Exception:
            if not self._is_told_of_change():
                raise

    def _change(self) -> str | None:
        """Return a message if the package was updated or removed since it was loaded."""
        now = _package()
        if now == self.package:
            return None
        what, then = ("updated", "Restart") if now else ("removed", "Install it again and restart")
        return (
            f"The package reserve_gpu was {what} while this kernel was running. {then} the kernel. "
            "The GPUs that it holds stay reserved until then."
        )

    def _is_told_of_change(self) -> bool:
        """Return whether the package has changed, which explains an error; print that once."""
        change = self._change()
        if change and self.is_to_tell_change:
            self.is_to_tell_change = False
            print(change, file=sys.stderr)
        return change is not None

    def leave_to_restart(self, change: dict[str, Any]) -> None:
        """Leave what this kernel holds to the next one, where it ends by a restart.

        ipykernel sets `exit_now` when a client asks it to end, on its control thread, and the
        request says whether it restarts:
        https://jupyter-client.readthedocs.io/en/stable/messaging.html#kernel-shutdown
        """
        try:
            request = self.shell.kernel.get_parent("control")  # type: ignore[union-attr]
            is_asked = request["header"]["msg_type"] == "shutdown_request"
            if change["new"] and is_asked and request["content"]["restart"] and _has_session():
                with no_fork:
                    from reserve_gpu.ipython import magic
                magic.leave_to_restart()
        except Exception:  # whatever comes of it, the kernel has to end
            log = logging.getLogger("reserve_gpu")
            log.warning("The GPU can't be kept for the restart.", exc_info=True)

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
    # What the environment says prevails over a configuration file.
    given: dict[str, Any] = {
        trait: os.environ[name] for trait, name in SETTINGS.items() if os.environ.get(name)
    }
    magics = ReserveGPU(shell=shell, parent=shell, **given)
    magics.package = _package()
    shell.register_magics(magics)
    cells().watch(shell)
    shell.events.register("pre_run_cell", magics.begin_cell)
    shell.events.register("post_run_cell", magics.end_cell)
    if not shell.custom_exceptions:  # a person may have set something there
        shell.set_custom_exc((WaitInterrupted,), _show_interrupted)  # type: ignore[no-untyped-call]
    _add_completion(shell)
    if hasattr(shell, "kernel"):
        shell.observe(magics.leave_to_restart, "exit_now")
        magics.is_to_tell_kept = True
    magics.is_to_tell_start = _was_given_something()


def unload(shell: InteractiveShell) -> None:
    """Take the magic and its settings out of the shell."""
    _remove_completion(shell)
    cells().leave()
    if shell.custom_exceptions == (WaitInterrupted,):
        shell.set_custom_exc((), None)  # type: ignore[no-untyped-call]
    shell.magics_manager.magics["line"].pop("reserve_gpu", None)
    if magics := shell.magics_manager.registry.pop("ReserveGPU", None):
        shell.configurables.remove(magics)
        shell.events.unregister("pre_run_cell", magics.begin_cell)
        shell.events.unregister("post_run_cell", magics.end_cell)
        with suppress(ValueError):  # it is no kernel
            shell.unobserve(magics.leave_to_restart, "exit_now")


def _package() -> tuple[int, int] | None:
    """Return the device and inode of the installed package, None if it is gone.

    An installation replaces all files. A new one of the same path has another inode or time.
    """
    with suppress(OSError):
        status = os.stat(os.path.join(os.path.dirname(__file__), "__init__.py"))
        return status.st_ino, status.st_mtime_ns
    return None


def _was_given_something() -> bool:
    """Tell whether the program before this one, in the same process, has left it GPUs or a reason.

    Asking takes over what that program held (see api.before_exec), which must not come later: a
    child that the shell starts before would inherit the locks.
    """
    if procfs.held_by() != os.getpid():
        return False
    with no_fork:
        from reserve_gpu.reservation.session import session
    return bool(session().reason or session().held)


def _show_interrupted(*about: Any, **_options: Any) -> None:
    """Say how things stand after Ctrl-C; Run All stops, but nothing is red as if it had failed."""
    _shell, _kind, error, _traceback = about
    print(error)


_sessions: dict[int, object] = executor.survive_reload("sessions", dict)


def _has_session() -> bool:
    """Tell whether this process has ever asked for anything, or was left something."""
    return bool(_sessions) or procfs.held_by() == os.getpid()


def _add_completion(shell: InteractiveShell) -> None:
    """Let Tab complete the magic's line; the module that knows how is loaded at the first Tab."""
    try:
        from IPython.core.completer import context_matcher
    except ImportError:  # before 8.6

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
        # Other code adds one of its own at the end, and takes the last one away again.
        shell.Completer.custom_matchers.insert(
            0, context_matcher(identifier=MATCHER, priority=FIRST)(matcher)
        )


def _remove_completion(shell: InteractiveShell) -> None:
    matchers = getattr(shell.Completer, "custom_matchers", [])
    matchers[:] = [m for m in matchers if getattr(m, "matcher_identifier", "") != MATCHER]
    if hooks := shell.strdispatchers.get("complete_command"):
        hooks.strs.pop(MAGIC_NAME, None)
