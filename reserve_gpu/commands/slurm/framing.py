"""Encode messages as lines of JSON, so that they can pass through srun's standard streams.

Each line is a list that contains the message's kind, followed by the message's frames in Base64.
"""

from __future__ import annotations

import asyncio
import json
import os
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING

from reserve_gpu.model import untrusted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LONGEST = 2**31 - 1  # maximum length of a line, in bytes; a message might contain a large image


def line(kind: str, *frames: bytes) -> bytes:
    """Encode a message as a line.

    Args:
        kind: A Jupyter message's channel, or a command sent between the relay and the node.
        frames: The Jupyter message's frames, or the command's arguments.
    """
    return json.dumps([kind, *(b64encode(frame).decode() for frame in frames)]).encode() + b"\n"


def parsed(text: bytes) -> tuple[str, list[bytes]]:
    """Decode a line into its kind and frames. Return `("", [])` for an invalid line."""
    try:
        kind, *frames = untrusted.parsed(text, LONGEST)
        return str(kind), [b64decode(frame) for frame in frames]
    except (TypeError, ValueError):
        return "", []


async def each(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield each line from a stream, skipping lines longer than `LONGEST`."""
    while True:
        try:
            text = await stream.readline()
        except ValueError:
            continue
        if not text:
            return
        yield text


async def reader(descriptor: int) -> asyncio.StreamReader:
    """Return a stream reader for the read end of a pipe."""
    stream = asyncio.StreamReader(LONGEST)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", 0)
    )
    return stream


async def writer(descriptor: int) -> asyncio.StreamWriter:
    """Return a stream writer for the write end of a pipe."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()),
        os.fdopen(descriptor, "wb", 0),
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)
