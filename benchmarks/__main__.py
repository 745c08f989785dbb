"""`python -m benchmarks [NAME ...] [--quick]`."""

from __future__ import annotations

import os
import sys

from spillway.processes import ONE_THREAD


def main(offered: str) -> int:
    """Limit torch to one thread, then run what was asked for of the benchmarks or the papers."""
    os.environ.update(ONE_THREAD)
    # Only now, because torch reads the limit as it is loaded.
    from benchmarks.command import BENCHMARKS, run
    from papers import PAPERS

    return run(sys.argv[1:], PAPERS if offered == "papers" else BENCHMARKS)


if __name__ == "__main__":
    sys.exit(main("benchmarks"))
