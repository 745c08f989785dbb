"""Where what was measured or compiled is kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Spillway's folder in the user's cache. A relative XDG_CACHE_HOME is ignored, as its standard has it; for a user
    without a home it is one in which nothing can be kept."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    folder = home if os.path.isabs(home) else os.path.expanduser("~/.cache")
    return Path(folder if os.path.isabs(folder) else os.devnull) / "spillway"
