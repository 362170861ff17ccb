"""NVML's error codes, grouped by what they mean for a GPU."""


class Code:
    """NVML's error codes (nvmlReturn_t in nvml.h)."""

    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    INSUFFICIENT_POWER = 8
    DRIVER_NOT_LOADED = 9
    IRQ_ISSUE = 11
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    OPERATING_SYSTEM = 17
    LIB_RM_VERSION_MISMATCH = 18
    ARGUMENT_VERSION_MISMATCH = 25
    DEPRECATED = 26
    GPU_NOT_FOUND = 28
    UNKNOWN = 999


# The driver does not support the query, or a sandbox blocks it. gVisor returns OPERATING_SYSTEM for
# some queries even if the GPU is healthy (https://github.com/google/gvisor/issues/10627).
NOT_OFFERED = frozenset({
    Code.NOT_SUPPORTED, Code.NO_PERMISSION, Code.FUNCTION_NOT_FOUND, Code.OPERATING_SYSTEM,
    Code.ARGUMENT_VERSION_MISMATCH, Code.DEPRECATED,
})  # fmt: skip
# The GPU itself is down, whichever query returned the code.
DOWN = frozenset({
    Code.INSUFFICIENT_POWER, Code.IRQ_ISSUE, Code.GPU_IS_LOST, Code.RESET_REQUIRED,
    Code.GPU_NOT_FOUND,
})  # fmt: skip
# The GPU needs a reset, or is gone. Its memory contents are lost.
LOST = frozenset({Code.GPU_IS_LOST, Code.RESET_REQUIRED, Code.GPU_NOT_FOUND})
# If a GPU's firmware hangs, queries return UNKNOWN
# (https://github.com/NVIDIA/open-gpu-kernel-modules/issues/446). Some drivers also return UNKNOWN
# for a healthy GPU's name or process list, so only some queries treat it as a fault.
DOWN_OR_HUNG = DOWN | {Code.UNKNOWN}
# The driver does not support memory limits for control groups, or this control group has none.
NO_LIMIT = NOT_OFFERED | {Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.UNKNOWN}
# No GPU supports confidential computing. The driver itself knows the query.
NOT_CONFIDENTIAL = frozenset({Code.NOT_SUPPORTED, Code.NOT_FOUND})
