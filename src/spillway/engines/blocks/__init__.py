"""The engine for eager PyTorch that works block by block, on saved-tensor hooks: no cost per op."""
