"""One thread, deterministic algorithms: the tests compare bits."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first product


@pytest.fixture(autouse=True)
def the_same_twice() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    yield
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before
    torch.cuda.empty_cache()
