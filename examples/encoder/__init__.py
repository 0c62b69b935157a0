"""A sentence encoder whose linear layers run on cutlass_w8a8, quantised three ways."""
