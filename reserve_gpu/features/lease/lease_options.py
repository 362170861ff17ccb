"""The options of a request that say until when a reservation lasts."""

from reserve_gpu.model.option import DAYS, Option

FOR = Option("--for DURATION", "release it after 90s, 30m, 4h, 2d", "1h 4h 8h 1d", dest="for_")
UNTIL = Option(
    "--until TIME",
    "release it at 18:00, 6pm, Fri, tomorrow, 2026-12-01 or 'Fri 18:00'",
    f"12:00 18:00 {DAYS}",
)
IDLE = Option(
    "--idle DURATION",
    "release it when no cell has run, and nothing has used it, for DURATION",
    "30m 1h 2h",
    suits_commands=False,  # one ends by itself, or at a moment: nobody knows whether it is idle
)
IF_WANTED = Option(
    "--if-wanted", "release it then only if somebody waits for it", suits_commands=False
)
END_KERNEL = Option(
    "--end-kernel",
    "end the kernel then, if it has started CUDA: nothing else frees the memory",
    suits_commands=False,
)

OPTIONS = (FOR, UNTIL, IDLE, IF_WANTED, END_KERNEL)
