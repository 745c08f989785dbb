"""One thread, because sums depend on the number of threads and the tests compare bits; and no test leaves anything."""

from __future__ import annotations

import random
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
    random.seed(0)  # states that are compared have Python's stream, and some are kept from one test to another
    with nothing_left():
        yield
