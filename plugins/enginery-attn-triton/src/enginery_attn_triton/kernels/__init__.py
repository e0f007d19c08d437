"""The kernels. Nothing here knows of batches or plans."""
