"""Window scheduling and virtual addressing for out-of-core training: its Table 1."""
