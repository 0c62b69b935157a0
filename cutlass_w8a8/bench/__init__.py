"""The benchmark behind ``cutlass-w8a8 bench``: shapes, providers, timing, reports."""
