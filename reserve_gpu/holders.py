"""Who has a lock file locked, by the kernel's list and the record in it: no lock is tried."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu import descriptors, files, processes, witness
from reserve_gpu.device import Holder

if TYPE_CHECKING:
    from collections.abc import Iterable


class Holders:
    """Who has what locked in one lock directory.

    path, directory: its path and its descriptor.
    once: read the kernel's list once, as nobody else can take one of our locks meanwhile.
    """

    def __init__(self, path: str, directory: int, *, once: bool) -> None:
        self._path = path
        self._directory = directory
        self._once = once
        self._pids: dict[str, list[int]] | None = None

    def who(self, name: str) -> Holder:
        """Who has the file of that name locked, as far as that is known: somebody has."""
        return self._look(name)[0]

    def peek(self, name: str) -> Holder | None:
        """Who has the file of that name locked, if anybody has."""
        path = f"{self._path}/{name}"
        if not files.exists(self._directory, name, path):
            return witness.unlisted(path, shared=name.endswith(files.SHARED))
        holder, is_held = self._look(name)
        return holder if is_held else None

    def pids(self, name: str) -> list[int]:
        """The processes that have the file of that name locked, by the kernel's list."""
        try:
            file = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return []
        listed = self._listed().get(processes.file_key(file), [])
        return [processes.keeper(pid, file) for pid in listed]

    def locked(self, names: Iterable[str]) -> set[str]:
        """Those of the files that a process has locked, by the kernel's list."""
        listed, found = self._listed(), set()
        for name in names:
            with suppress(FileNotFoundError):
                file = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
                found |= {name} if processes.file_key(file) in listed else set()
        return found

    def record(self, name: str) -> dict[str, Any]:
        """What is written in the file of that name; foreign text."""
        descriptor = self._open(name)
        try:
            return processes.record(descriptor)
        finally:
            descriptors.close(descriptor)

    def _look(self, name: str) -> tuple[Holder, bool]:
        """What is known of who has the file locked, and whether anybody is known to have it."""
        descriptor = self._open(name)
        try:
            record, file = processes.record(descriptor), os.fstat(descriptor)
        finally:
            descriptors.close(descriptor)
        listed = self._listed().get(processes.file_key(file), ())
        is_shared = name.endswith(files.SHARED)
        witnessed = None if listed else witness.holder(f"{self._path}/{name}", shared=is_shared)
        holder = processes.merge(record, next(iter(listed), witnessed) or None, file.st_mtime)
        if holder.seen and holder.pid:
            holder = holder.replace(pid=processes.keeper(holder.pid, file))
        if is_shared and holder.seen and not holder.confirmed:
            holder = Holder(pid=holder.pid, seen=True)  # what is written there is another sharer's
        return holder, holder.seen or witnessed is not None  # 0: by whom can't be seen

    def _listed(self) -> dict[str, list[int]]:
        if self._pids is None or not self._once:
            self._pids = processes.locking_pids()
        return self._pids

    def _open(self, name: str) -> int:
        return descriptors.open_lock(self._directory, name, f"{self._path}/{name}")
