"""Ops that read bytes past the dispatcher, on bytes that have left: run in a process of its own, which they may end."""

from __future__ import annotations

import itertools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import spillway
from spillway.internals.dispatch_key import unwatched
from spillway.memory.ledger import SMALLEST_MOVABLE
from spillway.methods import DTR, LRU, AbstractPolicy, Delta, Drop, Move
from spillway.session import Session
from tests.cpu.pressure import PLENTY, Way, image, is_dropped, is_moved, put_away

Put = Callable[[Tensor], Tensor]
"""Makes a tensor's bytes leave."""

NESTED = "sizes of nested tensors"
"""A case whose ops are not known to need little."""

MANY = 512
"""Whole numbers that take a page."""


def ctc(put: Put, dtype: torch.dtype = torch.int64, every: int = 1) -> list[Tensor]:
    scores = torch.randn(4, MANY, 8).requires_grad_()
    targets = put(torch.randint(1, 8, (MANY, 2)))
    of_inputs, of_targets = (put(torch.full((MANY * every,), n, dtype=dtype) + 0)[::every] for n in (4, 2))
    loss = F.ctc_loss(scores.log_softmax(-1), targets, of_inputs, of_targets)
    loss.backward()
    return [loss, scores.grad]  # type: ignore[list-item]


def packed(put: Put, kind: type[nn.RNNBase]) -> list[Tensor]:
    network = kind(4, 4)
    batch_sizes = put(torch.ones(MANY, dtype=torch.int64) + 0)
    out, _ = network(PackedSequence(torch.randn(MANY, 4).requires_grad_(), batch_sizes))
    out.data.sum().backward()
    return [out.data, *(parameter.grad for parameter in network.parameters())]


def padded(put: Put) -> list[Tensor]:
    x = torch.randn(MANY, 3, 2).requires_grad_()
    sequences = pack_padded_sequence(x * 2, torch.tensor([MANY, 100, 3]))
    put(sequences.batch_sizes)
    out, lengths = pad_packed_sequence(sequences)
    put(sequences.batch_sizes)
    out.square().sum().backward()
    return [out, lengths, x.grad]  # type: ignore[list-item]


def split(put: Put) -> list[Tensor]:
    return list(torch.tensor_split(torch.randn(2 * MANY), put(torch.arange(MANY) + 1)))


def split_without_autograd(put: Put) -> list[Tensor]:
    with torch.inference_mode():
        return [part.clone() for part in split(put)]


def grid_of_matrices(put: Put) -> list[Tensor]:
    try:
        torch.meshgrid(put(torch.randn(40, 40) + 1), torch.ones(3), indexing="ij")
    except RuntimeError as error:
        return [torch.tensor([ord(letter) for letter in str(error)])]
    return []


def sobol(put: Put) -> list[Tensor]:
    draws = torch.quasirandom.SobolEngine(30, scramble=True, seed=1)
    put(draws.sobolstate)
    first = draws.draw(5)
    draws.fast_forward(3)
    put(draws.sobolstate)
    torch._sobol_engine_scramble_(draws.sobolstate, torch.ones(30, 30, 30, dtype=torch.int64).tril(), 30)
    put(draws.sobolstate)
    return [first, draws.draw(5), draws.sobolstate * 1]


def views_of_sparse(put: Put) -> list[Tensor]:
    values, places, made = torch.randn(MANY * 4) + 1, torch.arange(MANY * 4), []
    coo = torch.sparse_coo_tensor(torch.stack([places % 64, places % 63]), values, (64, 64))
    csr = torch.sparse_csr_tensor(torch.arange(65) * 32, places % 32, values, (64, 64))
    for sparse in (coo, csr):
        for view in (Tensor.t, lambda t: t[3], lambda t: t.transpose(0, 1), Tensor.detach):
            put(values)
            made.append(view(sparse).to_dense())
    return made


def nested(put: Put) -> list[Tensor]:
    rows = [torch.randn(1 + n % 3, 2) for n in range(MANY)]
    whole = torch.nested.nested_tensor(rows)
    put(whole._nested_tensor_size())
    put(whole._nested_tensor_strides())
    put(whole._nested_tensor_storage_offsets())
    sizes, strides = whole._nested_tensor_size() + 0, whole._nested_tensor_strides() + 0
    offsets = whole._nested_tensor_storage_offsets() + 0
    again = torch._nested_view_from_buffer(whole.values() * 2, sizes, strides, offsets)
    put(sizes), put(strides), put(offsets)
    return [part * 1 for tensor in (whole, again) for part in (*tensor.unbind()[::50], tensor.to_padded_tensor(0.0))]


CASES: dict[str, Callable[[Put], list[Tensor]]] = {
    "ctc": ctc,
    "ctc, numbers of 32 bits": lambda put: ctc(put, torch.int32),
    "ctc, every second number": lambda put: ctc(put, every=2),
    "lstm": lambda put: packed(put, nn.LSTM),
    "gru": lambda put: packed(put, nn.GRU),
    "rnn": lambda put: packed(put, nn.RNN),
    "padded": padded,
    "split": split,
    "split without autograd": split_without_autograd,
    "grid of matrices": grid_of_matrices,
    "sobol": sobol,
    "views of sparse tensors": views_of_sparse,
    NESTED: nested,
}

METHODS: dict[str, Callable[[], AbstractPolicy]] = {"lru": LRU, "dtr": DTR, "delta": Delta}


@contextmanager
def leaving_between_ops(memory: Session) -> Iterator[None]:
    """Before each of the first ops that are watched, and many later ones, everything leaves that may."""
    engine, watcher = memory._engine, memory._engine._dispatch._watcher
    learn, ops = watcher.learn, itertools.count()

    def leave(func: object) -> object:
        handler = learn(func)

        def handle(*args: object, **kwargs: object) -> object:
            nth = next(ops)
            with engine.controller.lock, unwatched():
                for storage in list(engine.table.values()) if nth < 100 or nth % 16 == 0 else ():
                    if storage.nbytes >= SMALLEST_MOVABLE:
                        any(engine.controller.grant(way(storage)) for way in (Drop, Move))
            return handler(*args, **kwargs)

        watcher.handlers[id(func)] = handle
        return handle

    watcher.learn = leave  # type: ignore[assignment]
    try:
        yield
    finally:
        watcher.learn = learn


def run(name: str, put: Put) -> list[object]:
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", "Sparse |The PyTorch API of nested")
    return [image(tensor) for tensor in CASES[name](put)]


def leave_when_told() -> None:
    """Every case with every way to leave, and everything leaving again before every op."""
    plain = {name: run(name, lambda tensor: tensor) for name in CASES}
    with spillway.manage(nn.Linear(8, 8), budget=PLENTY, method=LRU()) as memory:
        for name, expected in plain.items():
            for way in (Move, Drop):

                def put(tensor: Tensor, way: Way = way) -> Tensor:
                    put_away(memory, tensor, way)
                    return tensor

                with memory.step(), leaving_between_ops(memory):
                    got = run(name, put)
                assert got == expected, (name, way)
                assert memory.history[-1].moves + memory.history[-1].drops > 0, (name, way)


def crowding(memory: Session, budget: int, left: list[bool]) -> Put:
    """What takes the whole budget for a moment, and notes whether a tensor left for it."""

    def crowd(tensor: Tensor) -> Tensor:
        others = [torch.ones(1024) + 0 for _ in range(budget // 4096)]
        left.append(is_moved(memory, tensor) or is_dropped(memory, tensor))
        del others
        return tensor

    return crowd


def leave_for_room() -> None:
    """Every case under every method, in a budget that others fill whenever something is to leave.

    All ops take the same time, so that what a method weighs by seconds is the same on a busy machine.
    """
    absent: Counter[str] = Counter()
    time.perf_counter = itertools.count().__next__
    for name in sorted({*CASES} - {"gru", "rnn", NESTED}):
        expected = run(name, lambda tensor: tensor)
        for method, policy in METHODS.items():
            with spillway.manage(nn.Linear(8, 8), budget=PLENTY, method=policy()) as memory:
                with memory.step():
                    run(name, lambda tensor: tensor)
                budget = 2 * memory.history[-1].peak_bytes
            with spillway.manage(nn.Linear(8, 8), budget=budget, method=policy()) as memory, memory.step():
                left: list[bool] = []
                assert run(name, crowding(memory, budget, left)) == expected, (name, method)
                absent.update([name, method] if any(left) else [])
    assert absent.keys() >= {*CASES, *METHODS} - {"gru", "rnn", NESTED}, absent
