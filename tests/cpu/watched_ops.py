"""Ops run plainly and watched: the same bits, dtypes and strides, and an account that equals what was allocated.

What was allocated is told by torch's allocator through its profiler, and not by the engine's own table.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast, final

import torch
from torch.autograd import ProfilerConfig, ProfilerState, _disable_profiler_legacy, _enable_profiler_legacy
from torch.utils._pytree import tree_leaves, tree_map_only

from spillway.engines import controller
from spillway.engines.controller import UNLIMITED
from spillway.engines.tensors.engine import TensorEngine
from spillway.errors import BudgetInfeasible
from spillway.methods import LRU, KeepAll
from tests.cpu.op_samples import MOST_SAMPLES, database, elements, fitting

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool)

SHARES: Final = (0.45, 0.75)
"""Of what the program needs: the budgets under which things leave. The next is tried where one is refused."""

UNWRITTEN: Final = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Ops whose results hold memory that nobody wrote, and so differ from one plain run to the next."""

UNCOUNTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "sparse": "what a sparse tensor consists of is not in the account",
        "to_sparse": "what a sparse tensor consists of is not in the account",
        "nn.functional.gaussian_nll_loss": "autograd keeps a number in 8 bytes that no op made",
        "nn.functional.multilabel_soft_margin_loss": "autograd keeps a number in 8 bytes that no op made",
    }
)
"""By the name of an op or its first part: why the account is not what the allocator gave."""


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


def programs(*, dtypes: Sequence[torch.dtype], samples: int, ops: Iterable[Any] | None = None) -> Iterator[Program]:
    """All ops of torch's database, on the largest samples of each dtype."""
    for op in database() if ops is None else ops:
        for dtype in (dtype for dtype in dtypes if dtype in op.supported_dtypes("cpu")):
            inexact = dtype.is_floating_point or dtype.is_complex
            differentiable = op.supports_autograd and inexact and dtype in op.supported_backward_dtypes("cpu")
            torch.default_generator.manual_seed(0)
            given = op.sample_inputs_func(op, "cpu", dtype, differentiable)
            name = ".".join(filter(None, (op.name, op.variant_test_name))) + f"[{str(dtype)[6:]}]"
            chosen = sorted(filter(fitting, itertools.islice(given, MOST_SAMPLES)), key=elements, reverse=True)
            for number, sample in enumerate(chosen[:samples]):
                for autocast in (False, True) if dtype.is_floating_point else (False,):
                    for order in (1, 2) if differentiable else (0,):
                        yield Program(f"{name} {number}", op, sample, order, autocast)


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
class Watching:
    """Runs programs plainly, watched without a budget, and watched under budgets in which not everything fits."""

    def __init__(self) -> None:
        self.findings = Findings()
        self._free = TensorEngine(KeepAll(), UNLIMITED)
        self._tight = [
            TensorEngine(LRU(short_chain=32, worth=float("inf")), UNLIMITED - 1),
            TensorEngine(LRU(short_chain=0), UNLIMITED - 1),
        ]

    def close(self) -> None:
        for engine in (self._free, *self._tight):
            engine.close()

    def look(self, program: Program) -> None:
        """Run it in all ways."""
        counts = self.findings.counts
        try:
            expected = [image(tensor) for tensor in program.run()]
        except Exception as error:
            counts["plainly refused by torch"] += 1
            self._refused(program, type(error))
            return
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
        before = engine.controller.resident
        try:
            with measured() as allocated:
                results = program.run()
                held, peak = engine.controller.resident - before, engine.controller.peak
        except Exception as error:
            self.findings.blame("fails watched", program, f"{type(error).__name__}: {str(error)[:120]}")
            return None
        finally:
            engine.end_step()
        self._compare("watched", program, expected, results)
        if held != sum(allocated) and UNCOUNTED.keys() & {program.op.name, program.op.name.partition(".")[0]}:
            self.findings.counts["accounts with a reason"] += 1
        elif held != sum(allocated):
            self.findings.blame("another account", program, f"{held} bytes, not {sum(allocated)}")
        else:
            self.findings.counts["accounts equal"] += 1
        return peak

    def _tightly(self, program: Program, expected: list[Any], engine: TensorEngine, budget: int) -> bool:
        engine.controller.allowed = budget
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
            engine.controller.allowed = UNLIMITED - 1
        if engine.controller.peak > budget:
            self.findings.blame("over the budget", program, f"{engine.controller.peak} of {budget} bytes")
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
        found = [image(tensor) for tensor in results]
        if found == expected:
            self.findings.counts[f"identical {how}"] += 1
        elif program.op.name in UNWRITTEN and [one[:-1] for one in found] == [one[:-1] for one in expected]:
            self.findings.counts[f"unwritten memory {how}"] += 1
        else:
            where = [place for place, (one, other) in enumerate(zip(found, expected, strict=False)) if one != other]
            self.findings.blame(f"other results {how}", program, f"tensors {where[:5]} of {len(expected)}")


def image(value: Any) -> tuple[Any, ...]:
    """All that a tensor is, by value; the bytes come last."""
    if not isinstance(value, torch.Tensor):
        return (repr(value),)
    kind = (value.dtype, value.layout, tuple(value.shape), value.is_conj(), value.is_neg())
    if value.layout is not torch.strided:
        coo = value.detach().to_sparse_coo().coalesce()
        return (*kind, image(coo.indices()), image(coo.values()))
    if value.is_quantized or value.is_nested or value._is_zerotensor() or not value.numel():
        return (*kind, repr(value.shape))
    whole = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return (*kind, value.stride(), value.storage_offset(), whole.view(torch.uint8).numpy().tobytes())


@contextlib.contextmanager
def measured() -> Iterator[list[int]]:
    """Bytes that torch's allocator gave out, and below zero those that it got back, in their order."""
    config = ProfilerConfig(
        ProfilerState.CPU, False, True, False, False, False, cast(Any, torch._C)._profiler._ExperimentalConfig()
    )
    changes: list[int] = []
    _enable_profiler_legacy(config)
    try:
        yield changes
    finally:
        for events in _disable_profiler_legacy():
            changes += [event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"]


def look_at(found: Iterable[Program], tell: Any = None) -> Findings:
    """Everything that is found about these programs. Storages of any size may leave."""
    smallest = controller.SMALLEST_MOVABLE
    watching = Watching()
    controller.SMALLEST_MOVABLE = 1
    try:
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")  # the database tries what is deprecated too
            for number, program in enumerate(found):
                watching.look(program)
                if tell is not None and number % 500 == 499:
                    tell(f"{number + 1} programs, {dict(watching.findings.counts)}")
    finally:
        controller.SMALLEST_MOVABLE = smallest
        watching.close()
    return watching.findings
