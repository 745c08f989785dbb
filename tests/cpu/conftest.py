"""One thread, because sums depend on the number of threads and the tests compare bits; and no test leaves anything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cpu.leftovers import nothing_left


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_test_leaves_anything(one_thread: None) -> Iterator[None]:
    with nothing_left():
        yield
