"""The resident kernels: one file a kernel, beside it what it compiles (a Triton `*_kernel.py` or a CUDA C++ `.cuh`)."""
