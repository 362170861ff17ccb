"""An instant by two clocks: the wall clock, and the clock since boot."""

from typing import NamedTuple


class Instant(NamedTuple):
    """One instant by two clocks.

    A board without a battery boots with its clock at 1970 until NTP sets it. So durations count by
    the boot clock, and only moments that people have typed by the wall clock.

    Attributes:
        wall: Seconds since the epoch. People and NTP set this clock.
        boot: Seconds since the boot (CLOCK_BOOTTIME). It can't be set, and it counts suspension.
    """

    wall: float
    boot: float

    def clock_set_s(self, wall: float, boot: float | None) -> float:
        """Return the whole seconds by which the wall clock was set since another instant.

        Args:
            wall: The other instant by the wall clock.
            boot: The same by the boot clock; None if it is not known.
        """
        return 0.0 if boot is None else float(round(self.wall - self.boot - wall + boot))

    def later(self, seconds: float) -> "Instant":
        """Return the instant so many seconds later."""
        return Instant(self.wall + seconds, self.boot + seconds)

    def at(self, now: "Instant") -> "Instant":
        """Return the same instant, by the wall clock as that is set now."""
        return self._replace(wall=self.wall + now.clock_set_s(self.wall, self.boot))
