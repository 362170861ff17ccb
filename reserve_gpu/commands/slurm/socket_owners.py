"""Ask the Linux kernel which local user owns the other end of a TCP connection."""

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
# A request consists of struct nlmsghdr and struct inet_diag_req_v2. ANSWER unpacks only the reply's
# type and the socket's state, UID, and inode.
QUESTION = struct.Struct("=IHHII 4BI 2s2s 16s16s I8s")
ANSWER = struct.Struct("=4xH 11xB 62xII")
NO_COOKIE = b"\xff" * 8
ANSWER_BYTES = 4096
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")  # Documentation/networking/proc_net_tcp.rst
LOCAL, REMOTE, STATE, UID, INODE = 1, 2, 3, 7, 9  # column indexes in these tables
ESTABLISHED = 1
MAPPED = "0000000000000000FFFF0000"  # prefix of an IPv4 address in the IPv6 table

Address = tuple[str, int]


class SocketInfo(NamedTuple):
    """The Linux kernel's information about a TCP socket on this machine.

    Attributes:
        state: The TCP state's number, or 0 if the socket does not exist.
        uid: The ID of the user who created the socket.
        inode: The socket's inode number, or 0 if its process has closed it.
    """

    state: int = 0
    uid: int = 0
    inode: int = 0


if TYPE_CHECKING:
    Finder = Callable[[Address, Address], SocketInfo]


def owner(find: Finder, client: Address, server: Address) -> int | None:
    """Return the UID of the process at the other end of a TCP connection.

    Args:
        find: A function that finds a socket by its local and remote addresses.
        client: The IPv4 address and port of the other end.
        server: The IPv4 address and port of this end.

    Returns:
        The UID, or None if the process is on another machine or has closed its socket. The Linux
        kernel reports UID 0 for a closed socket, so the inode is also checked.
    """
    info = find(client, server)
    return info.uid if info.state == ESTABLISHED and info.inode else None


def finder(listening: socket.socket) -> Finder:
    """Return `ask` if it can find this listening socket, otherwise `look_up`.

    This test is needed because a Linux kernel without sock_diag reports the same error as one that
    can't find a socket.
    """
    return ask if ask(listening.getsockname(), ("0.0.0.0", 0)).state else look_up  # noqa: S104


def ask(local: Address, remote: Address) -> SocketInfo:
    """Find a socket through sock_diag. This takes microseconds, even with many sockets."""
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
    except (OSError, struct.error):  # an error reply is too short for ANSWER
        return SocketInfo()
    return SocketInfo(*values) if kind == SOCK_DIAG_BY_FAMILY else SocketInfo()


def look_up(local: Address, remote: Address) -> SocketInfo:
    """Find a socket in the Linux kernel's tables of all TCP sockets."""
    ends = tuple(map(_as_listed, (local, remote)))
    pairs = (ends, tuple(f"{MAPPED}{end}" for end in ends))
    for table in TABLES:
        with suppress(OSError), open(table, encoding="ascii") as lines:
            for line in lines:
                row = line.split()
                if (row[LOCAL], row[REMOTE]) in pairs:
                    return SocketInfo(int(row[STATE], 16), int(row[UID]), int(row[INODE]))
    return SocketInfo()


def _as_listed(address: Address) -> str:
    """Format an IPv4 address and port in the same way as /proc/net/tcp."""
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"
