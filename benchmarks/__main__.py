"""`python -m benchmarks [NAME ...] [--quick]`."""

from __future__ import annotations

import os
import sys

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def main() -> int:
    """Limit torch to one thread, then run what was asked for."""
    os.environ.update(ONE_THREAD)
    # Only now, because torch reads the limit as it is loaded.
    from benchmarks.command import BENCHMARKS, run

    return run(sys.argv[1:], BENCHMARKS)


if __name__ == "__main__":
    sys.exit(main())
