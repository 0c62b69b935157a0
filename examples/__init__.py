"""Programs that show what cutlass_w8a8 is for; not part of the installed package."""
