"""The kernels, one file for each kind of operation. A launch never synchronises and works inside a CUDA graph."""
