"""Set, check and restore the CUDA variables and memory limits for the reserved devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.gpus import cuda_environment, memory_caps, names
from reserve_gpu.render import notices as notice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.devices import Device
    from reserve_gpu.model.requests import Variables
    from reserve_gpu.reservation.holding import Holding

# The environment variables that determine which devices CUDA sees.
DECIDING = (cuda_environment.VISIBLE, cuda_environment.ORDER)


class OurVariables:
    """The environment variables that this process has changed.

    Attributes:
        changes: The changes to the variables, with their previous values.
        environ: The variables that are set for the held devices, except internal ones.
        notices: Notices about the memory limits that keep frameworks within the reserved part of a
            GPU, and about GPUs that PyTorch counted earlier.
    """

    def __init__(self) -> None:
        self.changes = cuda_environment.Changes()
        self.environ: dict[str, str] = {}
        self.notices: list[str] = []
        self._reported_change: str | None = None

    @property
    def are_hidden(self) -> bool:
        """Return whether this process has hidden all devices from itself."""
        return self.changes.written.get(cuda_environment.VISIBLE) == ""

    def inherited(self) -> dict[str, str | None]:
        """Return the variables' values without this process's changes.

        If an ancestor process has hidden the GPUs, return the values from before it did so.
        """
        return cuda_environment.before_hiding(self.changes.inherited())

    def unset(self) -> None:
        """Restore all changed variables to their previous values."""
        self.changes = self.changes.apply({})

    def hide(self) -> None:
        """Hide all devices from child processes, and from this process unless CUDA has started."""
        self.changes = self.changes.apply(cuda_environment.hiding(self.changes.inherited()))

    def adopt(self, changes: cuda_environment.Changes) -> None:
        """Take over the changes that this process made before its exec."""
        self.changes, self.environ = changes, set_only(changes.written)

    def set_for(self, held: Holding) -> None:
        """Set the variables for the held devices."""
        inherited = self.inherited()
        before = cuda_environment.inherited_caps(inherited)
        limits, self.notices = _memory_limits(held, inherited | before)
        values = cuda_environment.variables(held.devices, held.terms.memory_limit_mib) | limits
        self.changes = self.changes.apply({cuda_environment.HIDDEN: None} | before | values)
        self.environ = set_only(values)
        count = cuda_environment.kept_torch_count()
        if count not in (None, len(held.devices)):
            self.notices = [*self.notices, notice.early_count(count)]

    def restore(self, held: Holding) -> list[str]:
        """Restore variables that other code has changed or removed, and return notices."""
        notices: list[str] = []
        if changed := self._changed(held.devices, cuda_environment.CUDA, is_restored=True):
            values = {name: self.environ.get(name) for name in cuda_environment.CUDA}
            cuda_environment.write(values)
            notices.append(changed)
        if held.terms.memory_limit_mib is None:
            return notices
        return notices + self._restore_memory_limits(held)

    def _restore_memory_limits(self, held: Holding) -> list[str]:
        """Restore memory limits that other code has removed, but not limits that it has changed."""
        inherited = self.inherited()
        limits, notices = _memory_limits(
            held, inherited | cuda_environment.inherited_caps(inherited)
        )
        shown = {name: v for name, v in self.environ.items() if name in cuda_environment.CAPS}
        if set_only(limits) == shown and cuda_environment.read(limits) == limits:
            return []
        values = {name: self.environ.get(name) for name in cuda_environment.CUDA} | limits
        self.changes = self.changes.apply({cuda_environment.HIDDEN: None} | values)
        self.environ = set_only(values)
        return notices

    def are_as_set(self) -> bool:
        """Return whether the variables that determine which devices CUDA sees are unchanged."""
        if self.are_hidden or self._reported_change:
            return False
        values = cuda_environment.read(DECIDING)
        return all(value == self.environ.get(name) for name, value in values.items())

    def changed_in_cell(self, devices: Sequence[Device]) -> list[str]:
        """Return a notice, once per change, if a cell has changed which devices CUDA sees."""
        if self.are_hidden:
            return []
        change = self._changed(devices, DECIDING)
        is_new, self._reported_change = change != self._reported_change, change
        return [change] if change and is_new else []

    def _changed(
        self, devices: Sequence[Device], variables: Sequence[str], *, is_restored: bool = False
    ) -> str | None:
        """Return a notice about variables that other code has changed, if there are any."""
        current = cuda_environment.read(variables)
        values = {name: value for name, value in current.items() if value != self.environ.get(name)}
        if not values:
            return None
        seen = {*cuda_environment.cuda_uuids()}
        sees_held = seen == {names.bare_uuid(device.uuid) for device in devices}
        is_late = cuda_environment.cuda_started() and not sees_held
        return notice.changed(values, devices, is_late=is_late, is_restored=is_restored)


def set_only(values: Variables) -> dict[str, str]:
    """Return the variables that have a value, except those that only child processes read."""
    return {n: v for n, v in values.items() if v is not None and n not in cuda_environment.OWN}


def _memory_limits(held: Holding, inherited: Variables) -> tuple[dict[str, str], list[str]]:
    """Return the memory limits to set for the held devices, and notices about the limits."""
    if held.terms.memory_limit_mib is None:
        return {}, []
    values = memory_caps.marked_variables(held.devices, held.terms.memory_limit_mib, inherited)
    is_late = cuda_environment.cuda_started()
    return values, memory_limit_notices(
        held.devices, held.terms.memory_limit_mib, inherited, values, is_late=is_late
    )


def memory_limit_notices(
    devices: Sequence[Device],
    memory_limit_mib: float,
    inherited: Variables,
    written: Variables,
    *,
    is_late: bool,
) -> list[str]:
    """Return notices about the frameworks' memory limits on these devices.

    Args:
        devices: The partially reserved devices.
        memory_limit_mib: The memory reserved on each device, in MiB.
        inherited: The variables' values without this process's changes.
        written: The memory limits that this process has set.
        is_late: Whether CUDA has already started in this process, in which case frameworks ignore
            new limits.
    """
    user_limits, all_limits = (
        memory_caps.capped_by(inherited),
        memory_caps.capped_by({**inherited, **written}),
    )
    frameworks = memory_caps.installed()
    kept: list[str] = [notice.memory_limits_kept([*user_limits.values()])] if user_limits else []
    late = [notice.CAPS_ARE_LATE] if is_late else []
    lines = [
        notice.framework_limit_hint(key, line)
        for key, line in memory_caps.code_lines(devices, memory_limit_mib).items()
        if key in frameworks and key not in (user_limits if is_late else all_limits)
    ]
    return [*kept, *late, *lines]
