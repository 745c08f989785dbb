"""What a machine offers, and what Spillway does with it: `spillway doctor`. Only `on_torch` needs torch."""

from __future__ import annotations
