"""What a run did, for people to look at: a page to keep and a line to watch. No torch."""

from __future__ import annotations
