"""Distinguish exceptions raised by signal handlers from exceptions raised by other code."""

from types import FrameType

HAS_MORE_ARGUMENTS = 0x04  # inspect.CO_VARARGS


def is_of_handler(error: BaseException) -> bool:
    """Return whether an exception was raised by a signal handler, not by the interrupted code.

    Python passes the interrupted frame to the handler as an argument. In the traceback, the
    interrupted frame comes just before the handler's frame. So a frame belongs to a handler if one
    of its arguments is the previous frame. A frame of the import
    system is also accepted, because `import` might remove its own frames from the traceback. The
    built-in SIGINT handler has no frame, so KeyboardInterrupt is always attributed to a handler.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    interrupted, trace = None, error.__traceback__
    while trace:
        frames = [each for each in _arguments(trace.tb_frame) if isinstance(each, FrameType)]
        if any(each is interrupted or _is_of_import(each) for each in frames):
            return True
        interrupted, trace = trace.tb_frame, trace.tb_next
    return False


def _is_of_import(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith("<frozen importlib")


def _arguments(frame: FrameType) -> list[object]:
    """Return the current values of a frame's parameters."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    arguments = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    if code.co_flags & HAS_MORE_ARGUMENTS:
        arguments += frame.f_locals.get(code.co_varnames[count], ())
    return arguments
