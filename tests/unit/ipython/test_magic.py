"""%reserve_gpu in real IPython shells, most of them in the test process."""

from __future__ import annotations

from reserve_gpu import request_options
from reserve_gpu.ipython.parser import magic_parser
from reserve_gpu.model.requests import Request


def test_an_empty_line_has_the_parsers_defaults() -> None:
    """A bare line, which is not parsed, is the request that the parser makes of an empty line."""
    assert request_options.to_request(magic_parser().parse_args([])) == (Request(), None)
