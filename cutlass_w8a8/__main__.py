"""``python -m cutlass_w8a8``: the command line."""

import sys

from cutlass_w8a8.cli import main

sys.exit(main())
