"""The CUDA variables of what this process holds, and the caps of a part: set, looked at, mended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.gpus import cuda_environment, memory_caps, names
from reserve_gpu.render import notices as notice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.devices import Device
    from reserve_gpu.model.requests import Variables
    from reserve_gpu.reservation.holding import Holding

DECIDING = (cuda_environment.VISIBLE, cuda_environment.ORDER)  # what CUDA sees


class OurVariables:
    """What this process has done to the variables.

    changes: all of it, so that it can be undone.
    environ: The variables of what is held, as the user is told about them.
    notices: what there is to tell of the caps that keep frameworks within a part.
    """

    def __init__(self) -> None:
        self.changes = cuda_environment.Changes()
        self.environ: dict[str, str] = {}
        self.notices: list[str] = []
        self._told: str | None = None

    @property
    def are_hidden(self) -> bool:
        """Tell whether no device is visible, by our own doing."""
        return self.changes.written.get(cuda_environment.VISIBLE) == ""

    def inherited(self) -> dict[str, str | None]:
        """Return the variables without our changes, nor the refusal of a process above this one."""
        return cuda_environment.before_hiding(self.changes.inherited())

    def unset(self) -> None:
        """Give the variables the values that they had before."""
        self.changes = self.changes.apply({})

    def hide(self) -> None:
        """Let whatever starts from now on see no device, and know that we set it so."""
        self.changes = self.changes.apply(cuda_environment.hiding(self.changes.inherited()))

    def adopt(self, changes: cuda_environment.Changes) -> None:
        """Take over the changes of the program before this one in the same process."""
        self.changes, self.environ = changes, set_only(changes.written)

    def set_for(self, held: Holding) -> None:
        """Set the variables of what is held."""
        inherited = self.inherited()
        before = cuda_environment.inherited_caps(inherited)
        limits, self.notices = _caps(held, inherited | before)
        values = cuda_environment.variables(held.devices, held.terms.memory_limit_mib) | limits
        self.changes = self.changes.apply({cuda_environment.HIDDEN: None} | before | values)
        self.environ = set_only(values)

    def mend(self, held: Holding) -> list[str]:
        """Set again what other code has changed, or has taken away; returns what to tell."""
        notices: list[str] = []
        if changed := self._changed(held.devices, cuda_environment.CUDA, is_mended=True):
            own = {name: self.environ.get(name) for name in cuda_environment.CUDA}
            cuda_environment.write(own)
            notices.append(changed)
        return notices if held.terms.memory_limit_mib is None else notices + self._mend_caps(held)

    def _mend_caps(self, held: Holding) -> list[str]:
        """Set the caps again that are gone; one that somebody has changed is theirs from now on.

        What is said to be set is what frameworks find.
        """
        inherited = self.inherited()
        limits, notices = _caps(held, inherited | cuda_environment.inherited_caps(inherited))
        said = {name: v for name, v in self.environ.items() if name in cuda_environment.CAPS}
        if set_only(limits) == said and cuda_environment.read(limits) == limits:
            return []
        values = {name: self.environ.get(name) for name in cuda_environment.CUDA} | limits
        self.changes = self.changes.apply({cuda_environment.HIDDEN: None} | values)
        self.environ = set_only(values)
        return notices

    def are_as_set(self) -> bool:
        """Return whether the variables that decide what CUDA sees are as they were set."""
        if self.are_hidden or self._told:
            return False
        values = cuda_environment.read(DECIDING)
        return all(value == self.environ.get(name) for name, value in values.items())

    def changed_in_cell(self, devices: Sequence[Device]) -> list[str]:
        """Return what a cell has made of the variables that decide what CUDA sees, once."""
        if self.are_hidden:
            return []
        change = self._changed(devices, DECIDING)
        is_news, self._told = change != self._told, change
        return [change] if change and is_news else []

    def _changed(
        self, devices: Sequence[Device], variables: Sequence[str], *, is_mended: bool = False
    ) -> str | None:
        """Return how other code changed these variables, or None if they are as they were set."""
        now = cuda_environment.read(variables)
        values = {name: value for name, value in now.items() if value != self.environ.get(name)}
        if not values:
            return None
        seen = {*cuda_environment.cuda_uuids()}
        is_held = seen == {names.bare_uuid(device.uuid) for device in devices}
        is_late = cuda_environment.cuda_started() and not is_held
        return notice.changed(values, devices, is_late=is_late, is_mended=is_mended)


def set_only(values: Variables) -> dict[str, str]:
    """Return those that are set, for people; not what only processes below read."""
    return {n: v for n, v in values.items() if v is not None and n not in cuda_environment.OWN}


def _caps(held: Holding, inherited: Variables) -> tuple[dict[str, str], list[str]]:
    """Return the caps to set for what is held, and what to tell of them."""
    if held.terms.memory_limit_mib is None:
        return {}, []
    values = memory_caps.marked(held.devices, held.terms.memory_limit_mib, inherited)
    is_late = cuda_environment.cuda_started()
    return values, cap_notices(
        held.devices, held.terms.memory_limit_mib, inherited, values, is_late=is_late
    )


def cap_notices(
    devices: Sequence[Device],
    memory_limit_mib: float,
    inherited: Variables,
    written: Variables,
    *,
    is_late: bool,
) -> list[str]:
    """Return what to tell the user about the caps of a part of each of these devices.

    inherited: the variables without our changes. written: the caps that are set. is_late: CUDA runs
    in this process, and what has started reads no variable any more.
    """
    theirs, capped = (
        memory_caps.capped_by(inherited),
        memory_caps.capped_by({**inherited, **written}),
    )
    found = memory_caps.installed()
    stand: list[str] = [notice.caps_stand([*theirs.values()])] if theirs else []
    late = [notice.CAPS_ARE_LATE] if is_late else []
    lines = [
        notice.to_type(key, line)
        for key, line in memory_caps.to_type(devices, memory_limit_mib).items()
        if key in found and key not in (theirs if is_late else capped)
    ]
    return [*stand, *late, *lines]
