"""A hook of mkdocs: the site's address is the one that errors link to, and what a document links outside of `docs/` is
named there instead, as the site does not have it."""

from __future__ import annotations

import re
from typing import Any

from spillway.errors import SITE


def on_config(config: Any) -> Any:
    """Before anything is built."""
    config.site_url = SITE or None
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn `[text](../../papers/x/README.md)` into text and path."""
    up = page.file.src_uri.count("/") + 1
    return re.sub(rf"\[([^\]]+)\]\((?:\.\./){{{up}}}([^)#]+)[^)]*\)", r"\1 (`\2`)", markdown)
