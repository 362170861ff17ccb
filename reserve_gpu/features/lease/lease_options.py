"""Request options that limit how long a reservation lasts."""

from reserve_gpu.model.option import DAYS, Option

FOR = Option(
    "--for DURATION", "release the GPU after 90s, 30m, 4h or 2d", "1h 4h 8h 1d", dest="for_"
)
UNTIL = Option(
    "--until TIME",
    "release the GPU at 18:00, 6pm, Fri, tomorrow, 2026-12-01 or 'Fri 18:00'",
    f"12:00 18:00 {DAYS}",
)
IDLE = Option(
    "--idle DURATION",
    "release the GPU when no cell has run and nothing has used it for DURATION",
    "30m 1h 2h",
    suits_commands=False,  # idleness is tracked only for notebooks and scripts
)
IF_WANTED = Option(
    "--if-wanted",
    "with --for, --until or --idle: release the GPU only if a process is waiting for one",
    suits_commands=False,
)
END_KERNEL = Option(
    "--end-kernel",
    "with --for, --until or --idle: end the kernel if it has started CUDA, because only that "
    "frees GPU memory",
    suits_commands=False,
)

OPTIONS = (FOR, UNTIL, IDLE, IF_WANTED, END_KERNEL)
