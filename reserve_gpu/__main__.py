# PYTHON_ARGCOMPLETE_OK
"""The entry point for `reserve-gpu` and `python -m reserve_gpu`."""

import sys

# `python -m` puts the working directory first on sys.path. Remove it, so that a file such as
# json.py in that directory is not imported instead of the standard library's module.
is_module = __name__ == "__main__" and __package__ in sys.orig_argv  # False under %run
if is_module and not getattr(sys.flags, "safe_path", False):  # safe_path was added in Python 3.11
    del sys.path[0]


def main() -> int:
    """Load and run the command line, and return the exit code.

    If the user presses Ctrl-C while modules are loading, the process ends without a traceback.
    """
    try:
        import signal

        handler = signal.getsignal(signal.SIGINT)
        if handler is signal.default_int_handler:  # leave any other handler alone
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from reserve_gpu.cli import main as command_line

        if handler is not None:  # None if the handler was not installed by Python
            signal.signal(signal.SIGINT, handler)
        return command_line.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
