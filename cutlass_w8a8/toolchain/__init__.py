"""Compilers and headers: finding them, and turning an emitted source into a loadable library."""
