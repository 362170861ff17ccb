"""The parser of %reserve_gpu."""

from __future__ import annotations

from reserve_gpu import request_options
from reserve_gpu.ipython.parser import magic_parser
from reserve_gpu.model.requests import Request


def test_no_arguments_are_the_default_request() -> None:
    """The magic does not parse an empty line, so the parser's defaults equal its request."""
    assert request_options.to_request(magic_parser().parse_args([])) == (Request(), None)
