"""What this machine measures of itself: its ops, its disk, and what the engine costs."""
