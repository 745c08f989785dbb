"""Ops run plainly and watched: the same bits, dtypes, strides and aliases; an account that equals what was allocated.

What was allocated is told by torch's allocator through its profiler, and not by the engine's own table.
`python -m tests.cpu.watched_ops SAMPLES OTHERS PAIR ...` looks at pairs of an op and a dtype, on so many samples of
each in every way (OTHERS 1: and on all others in one way each), and prints a line of JSON for each pair.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import operator
import os
import subprocess
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast, final

import torch
from torch.autograd import ProfilerConfig, ProfilerState, _disable_profiler_legacy, _enable_profiler_legacy
from torch.utils._pytree import tree_leaves, tree_map_only

from spillway.engines.tensors.calls import inner_tensors
from spillway.engines.tensors.ops import OpInfo
from spillway.engines.tensors.sizes import Sizes
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.errors import BudgetInfeasible
from spillway.memory import ledger
from spillway.memory.budget import UNLIMITED
from spillway.methods import LRU, KeepAll
from tests.cpu.op_samples import MOST_SAMPLES, database, elements, fitting

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool)

SHARES: Final = (0.45, 0.75, 0.95)
"""Of what the program needs: the budgets under which things leave. The next is tried where one is refused."""

UNWRITTEN: Final = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "linalg.lstsq"}
)
"""Ops whose results hold memory that nobody wrote, or come from it, and so differ from one plain run to the next:
torch hands LAPACK's `gelsy` pivots that it has not set, and it has six results for one plain call."""


NUMBERS: Final = "accounts equal but for numbers that autograd keeps"


class Program(NamedTuple):
    """An op on one sample, and so many gradients of it."""

    name: str
    op: Any
    sample: Any
    order: int
    """0: the op alone; 1: and its gradients; 2: and gradients of these."""
    autocast: bool

    def run(self) -> list[Any]:
        """Every tensor that comes of it, and the tensors that it began with."""
        torch.default_generator.manual_seed(0)
        leaves: list[torch.Tensor] = []

        def own(tensor: torch.Tensor) -> torch.Tensor:
            copy = _copy(tensor)
            if tensor.requires_grad and self.order:
                leaves.append(copy.requires_grad_())
            return copy

        first, args, kwargs = tree_map_only(
            torch.Tensor, own, (self.sample.input, list(self.sample.args), dict(self.sample.kwargs))
        )
        with torch.autocast("cpu", enabled=self.autocast), torch.set_grad_enabled(self.order > 0):
            made = [self.op.op(first, *args, **kwargs)]
        results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        ends = results
        for order in range(self.order):
            ends = [end for end in ends if end.requires_grad]
            if not ends or not leaves:
                break
            ends = _gradients(ends, leaves, again=order + 1 < self.order)
            results += ends
        return [*results, *tree_leaves((first, args, kwargs))]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor over a storage of its own, of which it may be a part."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return tensor.clone()
    whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return torch.as_strided(whole.clone(), tensor.shape, tensor.stride(), tensor.storage_offset()).detach()


def _gradients(ends: list[torch.Tensor], leaves: list[torch.Tensor], *, again: bool) -> list[torch.Tensor]:
    weights = [torch.randn_like(end) for end in ends]
    found = torch.autograd.grad(ends, leaves, weights, create_graph=again, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def programs(
    *, dtypes: Sequence[torch.dtype], samples: int, others: bool = False, ops: Iterable[Any] | None = None
) -> Iterator[Program]:
    """All ops of torch's database, on the largest samples of each dtype, in every way: without gradients, with them and
    with theirs, under autocast and not. And on all `others`, in one way each, in turn."""
    for op in database() if ops is None else ops:
        for dtype in (dtype for dtype in dtypes if dtype in op.supported_dtypes("cpu")):
            inexact = dtype.is_floating_point or dtype.is_complex
            differentiable = op.supports_autograd and inexact and dtype in op.supported_backward_dtypes("cpu")
            torch.default_generator.manual_seed(0)
            given = op.sample_inputs_func(op, "cpu", dtype, differentiable)
            some = given if others else filter(fitting, itertools.islice(given, MOST_SAMPLES))
            orders, casts = (
                (0, 1, 2) if differentiable else (0,),
                (False, True) if dtype.is_floating_point else (False,),
            )
            ways = list(itertools.product(orders, casts))
            for number, sample in enumerate(sorted(some, key=elements, reverse=True)):
                if number >= samples and not others:
                    break
                for way in ways if number < samples else ways[number % len(ways) :][:1]:
                    yield Program(f"{name_of(op, dtype)} {number}", op, sample, *way)


def name_of(op: Any, dtype: torch.dtype) -> str:
    return ".".join(filter(None, (op.name, op.variant_test_name))) + f"[{str(dtype)[6:]}]"


@final
@dataclass(slots=True)
class Findings:
    """What became of the programs."""

    counts: Counter[str] = field(default_factory=Counter)
    found: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Complaints: for each kind where it came up, and the numbers."""

    def blame(self, kind: str, program: Program, numbers: str) -> None:
        what = f"order {program.order}" + (", autocast" if program.autocast else "")
        self.found[kind].append(f"{program.name} {what}: {numbers}")


@final
@final
class Asked:
    """Stands before what an engine knows of sizes, keeps from it what it would learn, and finds what was expected too
    small."""

    def __init__(self) -> None:
        self._sizes = Sizes()
        self.smaller: list[str] = []

    def expected(self, info: OpInfo, args: Any, kwargs: Any) -> tuple[Any, int]:
        _, nbytes = self._sizes.expected(info, args, kwargs)
        return (info.name, nbytes), nbytes

    def learn(self, key: tuple[str, int], created: int) -> None:
        name, nbytes = key
        if created > nbytes:
            self.smaller.append(f"{name} created {created} bytes, not {nbytes}")


@final
class Watching:
    """Runs programs plainly, watched without a budget, and watched under budgets in which not everything fits."""

    def __init__(self) -> None:
        self.findings = Findings()
        self._free = TensorEngine(KeepAll(), UNLIMITED)
        self._tight = [
            TensorEngine(LRU(short_chain=32, worth=float("inf")), UNLIMITED - 1),
            TensorEngine(LRU(short_chain=0), UNLIMITED - 1),
        ]
        self._asked = Asked()
        for engine in self._tight:
            cast(Any, engine).sizes = self._asked

    def close(self) -> None:
        for engine in (self._free, *self._tight):
            engine.close()

    def look(self, program: Program) -> None:
        """Run it in all ways."""
        counts = self.findings.counts
        try:
            plain = program.run()
        except Exception as error:
            counts["plainly refused by torch"] += 1
            self._refused(program, type(error))
            return
        expected = images(plain)
        counts["programs"] += 1
        peak = self._account(program, expected)
        if peak is None:
            return
        engine = self._tight[counts["programs"] % 2]
        for share in SHARES:
            if self._tightly(program, expected, engine, int(peak * share)):
                return

    def _refused(self, program: Program, kind: type[Exception]) -> None:
        with contextlib.suppress(kind):
            self._watched(self._free, program)
            self.findings.blame("runs watched and not plainly", program, kind.__name__)

    def _account(self, program: Program, expected: list[Any]) -> int | None:
        """Watched without a budget; what the program takes at most by the account."""
        engine = self._free
        given = [
            leaf
            for leaf in tree_leaves((program.sample.input, program.sample.args, program.sample.kwargs))
            if isinstance(leaf, torch.Tensor)
        ]
        engine.begin_step([("sample", tensor) for tensor in given])
        before = engine.controller.budget.resident
        try:
            with measured() as allocated:
                results = program.run()
                held, peak = engine.controller.budget.resident - before, engine.controller.budget.peak
            numbers = numbers_kept(results, engine) if held != sum(allocated) else 0
        except Exception as error:
            self.findings.blame("fails watched", program, f"{type(error).__name__}: {str(error)[:120]}")
            return None
        finally:
            engine.end_step()
        self._compare("watched", program, expected, results)
        if held + numbers != sum(allocated):
            self.findings.blame("another account", program, f"{held} bytes, not {sum(allocated)}")
        else:
            self.findings.counts[NUMBERS if numbers else "accounts equal"] += 1
        return peak

    def _tightly(self, program: Program, expected: list[Any], engine: TensorEngine, budget: int) -> bool:
        engine.controller.budget.allow(budget)
        counts, counters = self.findings.counts, engine.controller.counters
        try:
            results = self._watched(engine, program)
        except BudgetInfeasible:
            counts["refused under a budget"] += 1
            return False
        except Exception as error:
            self.findings.blame("fails under a budget", program, f"{type(error).__name__}: {str(error)[:120]}")
            return True
        finally:
            engine.controller.budget.allow(UNLIMITED - 1)
        if engine.controller.budget.peak > budget:
            self.findings.blame("over the budget", program, f"{engine.controller.budget.peak} of {budget} bytes")
        for told in self._asked.smaller:
            self.findings.blame("more created than expected", program, told)
        self._asked.smaller.clear()
        counts["under a budget"] += 1
        counts["things left"] += bool(counters.drops + counters.moves)
        self._compare("under a budget", program, expected, results)
        return True

    def _watched(self, engine: TensorEngine, program: Program) -> list[Any]:
        engine.begin_step([])
        try:
            return program.run()
        finally:
            engine.end_step()

    def _compare(self, how: str, program: Program, expected: list[Any], results: list[Any]) -> None:
        found = images(results)
        if found == expected:
            self.findings.counts[f"identical {how}"] += 1
        elif program.op.name in UNWRITTEN and [one[:-1] for one in found] == [one[:-1] for one in expected]:
            self.findings.counts[f"unwritten memory {how}"] += 1
        else:
            where = [place for place, (one, other) in enumerate(zip(found, expected, strict=False)) if one != other]
            self.findings.blame(f"other results {how}", program, f"tensors {where[:5]} of {len(expected)}")


def numbers_kept(results: Sequence[Any], engine: TensorEngine) -> int:
    """Bytes of numbers in the program, such as the divisor of a tensor, that autograd keeps as tensors. Torch makes
    these before it calls the op, and shows the op as given a number."""
    found: dict[int, int] = {}
    seen: set[Any] = set()
    stack = [tensor.grad_fn for tensor in results if isinstance(tensor, torch.Tensor)]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [function for function, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                with contextlib.suppress(RuntimeError):  # it is given up already
                    saved = getattr(node, name)
                    if isinstance(saved, torch.Tensor) and not saved.dim() and engine.find(saved) is None:
                        found[saved.untyped_storage()._cdata] = saved.untyped_storage().nbytes()
    return sum(found.values())


def images(values: Sequence[Any]) -> list[Any]:
    """All that they are, by value; and which of them lie in one storage."""
    first: dict[int, int] = {}
    strided = [value if isinstance(value, torch.Tensor) and value.layout is torch.strided else None for value in values]
    addresses = [0 if tensor is None else tensor.untyped_storage()._cdata for tensor in strided]
    aliases = tuple(first.setdefault(address, place) for place, address in enumerate(addresses) if address)
    return [*map(image, values), aliases]


def image(value: Any) -> tuple[Any, ...]:
    """All that a tensor is, by value; the bytes come last."""
    if not isinstance(value, torch.Tensor):
        return (repr(value),)
    kind = (value.dtype, value.layout, tuple(value.shape), value.requires_grad, value.is_conj(), value.is_neg())
    if value.layout is not torch.strided:
        return (*kind, value.is_sparse and value.is_coalesced(), *map(image, inner_tensors(value.detach())))
    if value.is_nested:
        return (*kind, *map(image, value.detach().unbind()))
    if value.is_quantized or value._is_zerotensor() or not value.numel():
        return (*kind, repr(value.shape))
    whole = value.detach().resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
    return (*kind, value.stride(), value.storage_offset(), whole.view(torch.uint8).numpy().tobytes())


@contextlib.contextmanager
def measured() -> Iterator[list[int]]:
    """Bytes that torch's allocator gave out, and below zero those that it got back, in their order. Garbage of what was
    measured before, such as a gradient's graph that holds itself, is not collected meanwhile."""
    config = ProfilerConfig(
        ProfilerState.CPU, False, True, False, False, False, cast(Any, torch._C)._profiler._ExperimentalConfig()
    )
    changes: list[int] = []
    collects = gc.isenabled()
    gc.disable()
    _enable_profiler_legacy(config)
    try:
        yield changes
    finally:
        if collects:
            gc.enable()
        for events in _disable_profiler_legacy():
            changes += [event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"]


def look_at(found: Iterable[Program]) -> Findings:
    """Everything that is found about these programs."""
    with watching() as judge:
        for program in found:
            judge.look(program)
    return judge.findings


@contextlib.contextmanager
def watching() -> Iterator[Watching]:
    """Storages of any size may leave."""
    smallest = ledger.SMALLEST_MOVABLE
    judge = Watching()
    ledger.SMALLEST_MOVABLE = 1
    try:
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")  # the database tries what is deprecated too
            yield judge
    finally:
        ledger.SMALLEST_MOVABLE = smallest
        judge.close()


# ---------------------------------------------------------------------- many ops


@functools.cache
def pairs() -> list[tuple[Any, torch.dtype]]:
    """Every op of torch's database with each of the dtypes that it has."""
    return [(op, dtype) for op in database() for dtype in DTYPES if dtype in op.supported_dtypes("cpu")]


WAY: Final = operator.attrgetter("order", "autocast")
"""In what ways an op runs: those of a pair are told apart."""


def _row(judge: Watching, way: Any, alike: Iterable[Program]) -> dict[str, Any]:
    judge.findings = Findings()
    for program in alike:
        judge.look(program)
    found = judge.findings.found
    wrong, some = sum(map(len, found.values())), {kind: told[:3] for kind, told in found.items()}
    return {"way": way, "counts": judge.findings.counts, "wrong": wrong, "found": some}


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    samples, others, *numbers = map(int, arguments)
    with watching() as judge:
        for number in numbers:
            op, dtype = pairs()[number]
            every = sorted(programs(dtypes=[dtype], samples=samples, others=bool(others), ops=[op]), key=WAY)
            print(json.dumps(_pair(number, [_row(judge, *way) for way in itertools.groupby(every, WAY)])), flush=True)


def _pair(number: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"pair": number, "name": name_of(*pairs()[number]), "rows": rows}


def many(numbers: Sequence[int], samples: int, *, others: bool) -> Iterator[dict[str, Any]]:
    """The same in a process of its own, which may crash: then that is what is said of the pair that ran."""
    left = list(numbers)
    while left:
        given = map(str, (samples, int(others), *left))
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.cpu.watched_ops", *given]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
                left.pop(0)
        if left:
            found = {"crashed": [f"{name_of(*pairs()[left[0]])}: {process.returncode}"]}
            yield _pair(left.pop(0), [{"way": (0, False), "counts": {}, "wrong": 1, "found": found}])


if __name__ == "__main__":
    main(sys.argv[1:])
