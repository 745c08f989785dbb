"""What a machine offers, and what Spillway does with it: `spillway doctor`. `on_torch` alone needs torch."""

from __future__ import annotations
