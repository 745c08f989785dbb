"""Tang et al., "DELTA", arXiv:2203.15980: its tables and figures."""
