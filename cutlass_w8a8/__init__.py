"""W8A8 GEMM kernels for LLM inference: emitted, compiled on first use, cached and dispatched."""
