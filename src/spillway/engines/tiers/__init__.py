"""Where absent bytes wait."""
