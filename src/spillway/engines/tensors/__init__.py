"""The tensor engine: storages of eager PyTorch, paged one by one."""
