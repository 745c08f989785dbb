"""`python -m papers [NAME ...] [--quick]`."""

from __future__ import annotations

import os
import sys

from benchmarks.__main__ import ONE_THREAD


def main() -> int:
    """Limit torch to one thread, then run what was asked for."""
    os.environ.update(ONE_THREAD)
    # Only now, because torch reads the limit as it is loaded.
    from benchmarks.command import run
    from papers import PAPERS

    return run(sys.argv[1:], PAPERS)


if __name__ == "__main__":
    sys.exit(main())
