"""A moment by the wall clock and by the boot clock."""

from typing import NamedTuple


class Instant(NamedTuple):
    """One moment by two clocks.

    The wall clock can jump: a board without a battery boots in 1970 until NTP sets its clock.
    Durations are therefore measured by the boot clock. The wall clock is only used for moments that
    a user typed.

    Attributes:
        wall: Seconds since the epoch. Users and NTP can set this clock.
        boot: Seconds since boot (CLOCK_BOOTTIME). This clock can't be set and counts suspend time.
    """

    wall: float
    boot: float

    def clock_set_s(self, wall: float, boot: float | None) -> float:
        """Return the seconds by which the wall clock was set between another moment and this one.

        Args:
            wall: The other moment in seconds since the epoch.
            boot: The other moment in seconds since boot, or None if unknown.

        Returns:
            Whole seconds, negative if the clock was set back, 0 if `boot` is None.
        """
        return 0.0 if boot is None else float(round(self.wall - self.boot - wall + boot))

    def later(self, seconds: float) -> "Instant":
        """Return the moment this many seconds later."""
        return Instant(self.wall + seconds, self.boot + seconds)

    def at(self, now: "Instant") -> "Instant":
        """Return the moment with `wall` corrected to the current setting of the wall clock."""
        return self._replace(wall=self.wall + now.clock_set_s(self.wall, self.boot))
