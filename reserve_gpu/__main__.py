# PYTHON_ARGCOMPLETE_OK
"""The start of the command line: `reserve-gpu`, and `python -m reserve_gpu`."""

import sys

# `python -m` puts the working directory first. A file there that is called like a module of
# Python's own, as a json.py beside a notebook, must not be imported in its place.
is_module = __name__ == "__main__" and __package__ in sys.orig_argv  # and not run by %run
if is_module and not getattr(sys.flags, "safe_path", False):  # which Python has from 3.11 on
    del sys.path[0]


def main() -> int:
    """Load the command line, and do what this process was started for; returns the exit code.

    Ctrl-C meanwhile ends the process as it ends `ls`, without a traceback.
    """
    try:
        import signal

        handler = signal.getsignal(signal.SIGINT)
        if handler is signal.default_int_handler:  # and not ignored
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from reserve_gpu.cli import main as command_line

        if handler is not None:  # one that Python has not installed
            signal.signal(signal.SIGINT, handler)
        return command_line.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
