"""Epilogue visitor trees: a formula written once, walked by the emitter, the argument list and the evaluator."""
