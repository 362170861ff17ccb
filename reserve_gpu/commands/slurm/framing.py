"""What passes through srun's streams: lines of JSON, of a word and the frames of a message."""

from __future__ import annotations

import asyncio
import json
import os
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING

from reserve_gpu.model import untrusted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LONGEST = 2**31 - 1  # a message may have a large picture


def line(kind: str, *frames: bytes) -> bytes:
    """Return the line; kind: the name of the message's channel, or what is to be done."""
    return json.dumps([kind, *(b64encode(frame).decode() for frame in frames)]).encode() + b"\n"


def parsed(text: bytes) -> tuple[str, list[bytes]]:
    """Parse a line into its kind and frames; a foreign or incomplete line has neither."""
    try:
        kind, *frames = untrusted.parsed(text, LONGEST)
        return str(kind), [b64decode(frame) for frame in frames]
    except (TypeError, ValueError):
        return "", []


async def each(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield each line of a stream; what is too long for a line is left out."""
    while True:
        try:
            text = await stream.readline()
        except ValueError:
            continue
        if not text:
            return
        yield text


async def reader(descriptor: int) -> asyncio.StreamReader:
    """Return what reads a pipe."""
    made = asyncio.StreamReader(LONGEST)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(made), os.fdopen(descriptor, "rb", 0)
    )
    return made


async def writer(descriptor: int) -> asyncio.StreamWriter:
    """Return what writes to a pipe."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()),
        os.fdopen(descriptor, "wb", 0),
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)
