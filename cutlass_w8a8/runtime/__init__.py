"""The GPU side: device facts, loading compiled kernels, launching them."""
