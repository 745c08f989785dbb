"""Kirisame et al., "Dynamic Tensor Rematerialization", arXiv:2006.09616: its simulator, run for run."""
