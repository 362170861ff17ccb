"""Tell the exception of a signal handler from that of the code that the handler interrupted."""

from types import FrameType

HAS_MORE_ARGUMENTS = 0x04  # CO_VARARGS of inspect


def is_of_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised the error, and not the code that it interrupted.

    Python calls a handler with the frame that it interrupts, which comes before the handler's own
    frame in the traceback. `import` may take its own frames out of the traceback. The built-in
    handler of SIGINT has no frame.
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
    """Return the arguments that a function was called with, as far as it still has them."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    arguments = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    if code.co_flags & HAS_MORE_ARGUMENTS:
        arguments += frame.f_locals.get(code.co_varnames[count], ())
    return arguments
