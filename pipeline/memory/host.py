"""The host's allocator, set for training on a CPU.

glibc gives blocks of 32 MiB and more back to the kernel the moment they are freed, and takes them anew, page
by page, at the next step: thousands of page faults a step, the same ones each time. Told to keep them, a
training saves that time (`python benchmarks/allocator.py`). The cost: memory once used stays with the process
until it ends, which for a training loop is the memory that it needs at every step.
"""

import ctypes
import platform

# mallopt(3): parameter numbers of <malloc.h>, and values in bytes
M_TRIM_THRESHOLD, KEEP_AT_THE_TOP = -1, 2**31 - 1  # the most that the int argument can say
M_MMAP_THRESHOLD, FROM_THE_HEAP = -3, (2**30, 2**25)  # older ones take no more than 32 MiB


def keep_freed_memory() -> bool:
    """Sets glibc's thresholds for the whole process; returns whether that was possible (Linux with glibc)."""
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    # the first alone would do harm: it ends glibc's own adjustment of the other
    from_the_heap = any(library.mallopt(M_MMAP_THRESHOLD, size) == 1 for size in FROM_THE_HEAP)
    return from_the_heap and library.mallopt(M_TRIM_THRESHOLD, KEEP_AT_THE_TOP) == 1
