"""Helpers of tests: parts_processes."""

from __future__ import annotations

# For a child: it allocates on its first device, with a CUDA context, which holds 300 MiB.
CUDA = """
import ctypes
cuda, context = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p()
def use(mib):
    '''Use so much more.'''
    cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    cuda.cuCtxSetCurrent(context)
    address = ctypes.c_uint64()
    return cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(mib << 20)) or address.value
"""
