"""Which user has the other end of a TCP connection of this machine, as the kernel reports it."""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

NETLINK_SOCK_DIAG = 4  # https://man7.org/linux/man-pages/man7/sock_diag.7.html
SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, ALL_STATES = 20, 1, 0xFFFFFFFF
# struct nlmsghdr and struct inet_diag_req_v2; of the reply, the type, the state, the UID and inode.
QUESTION = struct.Struct("=IHHII 4BI 2s2s 16s16s I8s")
ANSWER = struct.Struct("=4xH 11xB 62xII")
NO_COOKIE = b"\xff" * 8
ANSWER_BYTES = 4096
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")  # Documentation/networking/proc_net_tcp.rst
LOCAL, REMOTE, STATE, UID, INODE = 1, 2, 3, 7, 9  # columns of such a table
ESTABLISHED = 1
MAPPED = "0000000000000000FFFF0000"  # in front of an IPv4 address in the table of IPv6

Address = tuple[str, int]


class Found(NamedTuple):
    """A socket of this machine.

    Attributes:
        state: The number of its TCP state, 0 if the socket does not exist.
        uid: The user who created it.
        inode: Its inode, 0 once its process has closed it.
    """

    state: int = 0
    uid: int = 0
    inode: int = 0


if TYPE_CHECKING:
    Finder = Callable[[Address, Address], Found]


def owner(find: Finder, client: Address, server: Address) -> int | None:
    """Return the UID of the process at the other end of a TCP connection.

    None if that process is on another machine, or has closed its end: the kernel then gives UID 0.

    Args:
        find: Finds a socket by its own and its peer's address.
        client: The IPv4 address and port of the other end.
        server: The address and port of this end.
    """
    found = find(client, server)
    return found.uid if found.state == ESTABLISHED and found.inode else None


def finder(listening: socket.socket) -> Finder:
    """Return `ask` if it finds this socket, else `look_up`.

    A kernel without sock_diag reports the same error as for a socket that does not exist.
    """
    return ask if ask(listening.getsockname(), ("0.0.0.0", 0)).state else look_up  # noqa: S104


def ask(local: Address, remote: Address) -> Found:
    """Ask the kernel for one socket, which takes microseconds however many sockets there are."""
    ends = [(socket.inet_aton(host), port.to_bytes(2, "big")) for host, port in (local, remote)]
    (source, source_port), (target, target_port) = ends
    question = QUESTION.pack(
        QUESTION.size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0,
        socket.AF_INET, socket.IPPROTO_TCP, 0, 0, ALL_STATES,
        source_port, target_port, source, target, 0, NO_COOKIE,
    )  # fmt: skip
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
            kernel.send(question)
            kind, *values = ANSWER.unpack_from(kernel.recv(ANSWER_BYTES))
    except (OSError, struct.error):  # an error message is shorter
        return Found()
    return Found(*values) if kind == SOCK_DIAG_BY_FAMILY else Found()


def look_up(local: Address, remote: Address) -> Found:
    """Read all sockets of the machine to find one."""
    ends = tuple(map(_as_listed, (local, remote)))
    pairs = (ends, tuple(f"{MAPPED}{end}" for end in ends))
    for table in TABLES:
        with suppress(OSError), open(table, encoding="ascii") as lines:
            for line in lines:
                row = line.split()
                if (row[LOCAL], row[REMOTE]) in pairs:
                    return Found(int(row[STATE], 16), int(row[UID]), int(row[INODE]))
    return Found()


def _as_listed(address: Address) -> str:
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"
