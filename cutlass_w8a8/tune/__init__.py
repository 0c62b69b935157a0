"""The tuner behind ``cutlass-w8a8 tune``: plan candidates, compile them, measure them, fit a table to the times."""
