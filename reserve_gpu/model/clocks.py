"""Points in time as shown by both the wall clock and the boot clock."""

from typing import NamedTuple


class Instant(NamedTuple):
    """A point in time, as shown by both clocks.

    The wall clock can jump. For example, the clock of a board without a battery starts in 1970 and
    is wrong until NTP sets it. Durations are therefore measured with the boot clock. The wall clock
    is only used for times that a user typed.

    Attributes:
        wall: Seconds since the epoch. Users and NTP can set this clock.
        boot: Seconds since boot (CLOCK_BOOTTIME). This clock can't be set, and it keeps running
            while the machine is suspended.
    """

    wall: float
    boot: float

    def clock_set_s(self, wall: float, boot: float | None) -> float:
        """Return how far the wall clock was set forward between another instant and this one.

        Args:
            wall: The other instant, in seconds since the epoch.
            boot: The other instant, in seconds since boot, or None if unknown.

        Returns:
            The change in seconds, rounded to a whole number. It is negative if the clock was set
            back, and 0 if `boot` is None.
        """
        return 0.0 if boot is None else float(round(self.wall - self.boot - wall + boot))

    def later(self, seconds: float) -> "Instant":
        """Return the instant `seconds` after this one."""
        return Instant(self.wall + seconds, self.boot + seconds)

    def at(self, now: "Instant") -> "Instant":
        """Return this instant with `wall` adjusted for changes to the wall clock."""
        return self._replace(wall=self.wall + now.clock_set_s(self.wall, self.boot))
