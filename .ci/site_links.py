"""A hook of mkdocs: what a document links outside of `docs/` is named there instead, as the site does not have it."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn `[text](../../papers/x/README.md)` into text and path."""
    up = page.file.src_uri.count("/") + 1
    return re.sub(rf"\[([^\]]+)\]\((?:\.\./){{{up}}}([^)#]+)[^)]*\)", r"\1 (`\2`)", markdown)
