"""`python -m papers [NAME ...] [--quick]`."""

from __future__ import annotations

import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
    sys.exit(main("papers"))
