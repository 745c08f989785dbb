"""Liao et al., "Mimose", arXiv:2209.02478: its tables and figures."""
