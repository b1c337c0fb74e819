"""What counts as out of memory: torch's own type, and texts of backends that raise plain RuntimeErrors."""

import torch

# What a backend says when it cannot allocate. All of it is matched as it stands.
TEXTS = (
    "CUDA out of memory",  # torch before 2.5 and third-party extensions; today's is a type
    "CUDA error: out of memory",  # the driver's, outside of the caching allocator
    "CUBLAS_STATUS_ALLOC_FAILED",  # cuBLAS's workspace
    "CUBLAS_STATUS_NOT_INITIALIZED",  # cublasCreate: most often no memory is left for the handle
    "CUDNN_STATUS_ALLOC_FAILED",
    "HIP out of memory",  # ROCm
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "XPU out of memory",
    "MPS backend out of memory",
    "DefaultCPUAllocator: can't allocate memory",  # c10/core/impl/alloc_cpu.cpp, Linux
    "DefaultCPUAllocator: not enough memory",  # the same on Windows
    "could not create a primitive",  # oneDNN, when its scratchpad cannot be allocated
    "could not create a memory object",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller micro-batch could help; any other error is for whoever can mend it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in TEXTS)
