"""The functions that are made for ops: when ops come to them, and what they leave out."""

from __future__ import annotations

import threading

import torch

from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.internals.private import storage_address
from spillway.memory.budget import UNLIMITED
from spillway.methods import LRU, KeepAll

BUDGET = 1 << 30


def test_ops_arrive_only_while_a_step_is_watched() -> None:
    engine = TensorEngine(KeepAll(), UNLIMITED)
    for _ in range(2):
        engine.begin_step([])
        torch.rand(3) * torch.rand(3)
        engine.end_step()
        assert engine.ops == 3
        torch.rand(3) * torch.rand(3)
        assert engine.controller.clock - engine._first_op == 3
    engine.close()


def test_a_step_that_ended_in_another_thread_lets_ops_through() -> None:
    engine = TensorEngine(KeepAll(), UNLIMITED)
    engine.begin_step([])
    other = threading.Thread(target=engine.end_step)
    other.start()
    other.join()
    assert torch.ones(3).add(1).sum().item() == 6
    assert engine.ops == 0
    engine.close()


def test_while_a_step_is_watched_torch_takes_no_tensor_for_a_subclass() -> None:
    engine = TensorEngine(KeepAll(), UNLIMITED)
    engine.begin_step([])
    assert not torch._C._dispatch_isTensorSubclassLike(torch.ones(3))
    assert isinstance(torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter)
    engine.end_step()
    engine.close()


def test_a_write_begins_another_version_if_and_only_if_a_recipe_reads_the_present_one() -> None:
    read, unread = torch.rand(8), torch.rand(8)
    engine = TensorEngine(LRU(), BUDGET)
    engine.begin_step([("read", read), ("unread", unread)])
    values = [engine.table[storage_address(tensor)].value for tensor in (read, unread)]
    kept = read.exp()
    for tensor in (read, unread):
        tensor.mul_(2.0)
    now = [engine.table[storage_address(tensor)].value for tensor in (read, unread)]
    recipe = engine.current(engine.table[storage_address(kept)]).recipe
    assert recipe is not None
    assert recipe.reads == [values[0]]
    assert now[0] is not values[0]
    assert now[1] is values[1]
    again = now[0]
    read.mul_(2.0)  # no recipe reads this version
    assert engine.table[storage_address(read)].value is again
    engine.end_step()
    engine.close()


def test_what_read_a_value_before_it_was_written_is_never_recomputed_from_the_new_content() -> None:
    source = torch.rand(1024)
    engine = TensorEngine(LRU(), BUDGET)
    engine.begin_step([("source", source)])
    kept = source.exp()
    before = kept.clone()
    storage = engine.table[storage_address(kept)]
    assert not isinstance(engine.controller.way_back(storage), str)
    source.mul_(2.0)
    assert isinstance(engine.controller.way_back(storage), str)
    engine.end_step()
    assert torch.equal(kept, before)
    engine.close()
