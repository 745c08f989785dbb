"""Sessions of the block engine: plans per input size, at no cost per op."""

from __future__ import annotations

import functools
import math
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import torch
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from spillway.engines.blocks.block import CallReport
from spillway.engines.blocks.block_engine import BlockEngine, check_runs_once, environment_of, hooks_are_off
from spillway.engines.blocks.compiled_blocks import HOOKS, is_compiled
from spillway.engines.blocks.discovery import find_blocks, gathered_bytes, sharded_blocks
from spillway.engines.blocks.extra_forward import is_the_models, without_locals
from spillway.engines.blocks.hook import Hook
from spillway.engines.blocks.meter import meter_for
from spillway.engines.blocks.trace import AbstractTrace, trace_for
from spillway.engines.tensors.devices import device_of, engine_for
from spillway.engines.tensors.optimizers import Update
from spillway.engines.tensors.origins import line_of_forward
from spillway.engines.tensors.torch_compile import running_compiled
from spillway.engines.tensors.twins import others_hear
from spillway.errors import (
    BudgetInfeasible,
    ModelError,
    NoBlocksError,
    RecomputeError,
    SpillFullError,
    SpillwayError,
    pass_notes,
)
from spillway.internals.interrupts import by_signal, deliver
from spillway.internals.private import fully_sharded, local_of, unheard_by_modes
from spillway.internals.process_memory import HeldHeap, Reclaimer, ResidentSet, peak_rss, reset_peak
from spillway.ir import BlocksAtPeak, HeldByBlock, Kind, RunWriter, StepReport
from spillway.memory.budget import Budget
from spillway.methods import LRU, Action
from spillway.methods.by_block import (
    AbstractBlockMethod,
    BlockPlan,
    BlockSample,
    Decision,
    Forecast,
    InputSize,
    Phase,
    StepSample,
)
from spillway.native.arena import Arena
from spillway.session.abstract_session import AbstractStep, Session, header
from spillway.session.before import Before
from spillway.session.input_sizes import NO_COLUMNS, Columns, Shape, SizeReader
from spillway.session.inputs import (
    circumstances,
    gradient_of,
    leaves,
    modules_of,
    parameters_of,
    signature_of,
    storages,
)
from spillway.session.needs import Call, Kept, Needs, Rise, kept_by, least, recomputing
from spillway.session.options import BlockOptions, SpillOptions
from spillway.session.paging import UNINTERRUPTED, Paging
from spillway.session.planned_steps import watching
from spillway.session.ranks import Agreement
from spillway.session.tensor_session import TensorSession, report_of
from spillway.session.updates import Arguments, update_in_parts
from spillway.session.watch import SAMPLES, Gradient, Seam, StepWatch, in_backward
from spillway.tiers.disk import DiskTier
from spillway.tiers.transfer import Freed
from spillway.units import Bytes, KiB, Seconds, format_bytes

if TYPE_CHECKING:
    from spillway.engines.tensors.tensor_engine import TensorEngine
    from spillway.report.live import LiveLine, LiveView

UNHEARD: Final[Bytes] = 32 * KiB
"""What is smaller is malloc's and not the arena's: its death is heard at the next block."""
REMEMBERED: Final = 256
"""Measured steps that are kept, to be read again when other numbers make up the size."""
LOSS: Final[Bytes] = 4096
"""What a loop has in its hands besides when it calls an optimizer, at least."""
TELLING: Final = 3
"""Steps in a row that tell nothing of blocks after which nothing is expected of them."""
LOOKS: Final = 8
"""Times that blocks are looked for, in a model that goes on to be rebuilt, before it is left to the tensor engine."""
SLACK: Final = 1.05
"""How far the resident set may be above the budget before freed memory is returned."""


Key: TypeAlias = tuple[Shape, bool, Bytes]
"""An input, whether the step is planned or not, and what is there before it."""


@dataclass(slots=True)
class _Family:
    """Inputs of one structure: as many tensors, of as many dimensions."""

    reader: SizeReader
    method: AbstractBlockMethod
    columns: Columns = NO_COLUMNS
    """By which the method was told sizes."""
    learned: list[tuple[Shape, StepSample, list[BlockSample]]] = field(default_factory=list)
    traced: dict[Key, set[str]] = field(default_factory=dict)
    """What was measured, and what was done in these steps (`StepWatch.path`)."""
    seams: dict[Shape, dict[Seam, Bytes]] = field(default_factory=dict)
    """What steps took at most above what was there at each seam, until the next."""
    rises: dict[Shape, Bytes] = field(default_factory=dict)
    """What steps of these inputs took, at most, above what was there when they began."""
    unhindered: dict[Shape, Bytes] = field(default_factory=dict)
    """Of these, steps in which no block gave up what it was to hold, with what may be on its way beside that."""
    floors: dict[tuple[Shape, frozenset[str], Bytes], Bytes | None] = field(default_factory=dict)
    """What forwards and backwards of these inputs are told to take with every block recomputed, beside the gradients of
    these names, until optimizers have so much more state; None where that cannot be told."""
    tried: dict[Shape, tuple[int, Bytes]] = field(default_factory=dict)
    """The same of steps in which recomputing every block was enough, and of how many forwards they were."""

    def measured(self, key: Key, path: str) -> bool:
        """Whether a step like this one was measured that began in this way."""
        return any(one.startswith(path) for one in self.traced.get(key, ()))

    def holds(self, dimensions: Shape, forwards: int, free: Bytes) -> bool:
        """Whether recomputing every block was enough in a step with so many forwards, above what is there at first."""
        most, rise = self.tried.get(dimensions, (0, 0))
        return forwards <= most and rise <= free

    def size(self, dimensions: Shape) -> InputSize:
        """Of an input. If it shows that other numbers count, the method learns everything anew by those."""
        self.reader.learn(dimensions)
        if self.columns != self.reader.columns:
            self.method = self.method.fresh(batched=self.reader.columns.batched)
            self.columns = self.reader.columns
            for shape, step, blocks in self.learned:
                self._tell(shape, step, blocks)
        return self.reader.size(dimensions)

    def learn_rises(self, dimensions: Shape, rises: dict[Seam, Bytes]) -> None:
        """What a measured step took above what was there at its seams."""
        if dimensions in self.seams or len(self.seams) < REMEMBERED:
            known = self.seams.setdefault(dimensions, {})
            known |= {seam: max(rise, known.get(seam, 0)) for seam, rise in rises.items()}

    def learn(self, dimensions: Shape, step: StepSample, blocks: list[BlockSample]) -> None:
        """Tell the method of a measured step."""
        if len(self.learned) < REMEMBERED:
            self.learned.append((dimensions, step, blocks))
        self._tell(dimensions, step, blocks)

    def _tell(self, dimensions: Shape, step: StepSample, blocks: Sequence[BlockSample]) -> None:
        size = self.reader.size(dimensions)
        try:
            self.method.end(replace(step, size=size), [replace(block, size=size) for block in blocks])
        except BaseException:  # an interruption: half a sample is none, and a method cannot give it back
            self.method, self.learned, self.traced = self.method.fresh(batched=self.columns.batched), [], {}
            raise


@final
class BlockSession(Session):
    """A session that watches the seams between blocks.

    The blocks are found in the first forward inside a step, which runs once more for that, unless they are named.

    Args:
        traces: Whether the peak of every step is measured; otherwise of those of which something is to be learned.
        pinned: For a model on CUDA: the most host memory that is pinned for what is moved.

    Raises ModelError for more than one model, or one that a block engine cannot have.
    """

    _planner: AbstractBlockMethod | None = None
    """What planned the latest step."""
    _told_nothing = 0
    """Steps in a row of which nothing was learned."""
    _agreement: Agreement | None = None
    """On which blocks run again, where that adds collectives."""
    _untried = False
    """Whether a step that was to show if recomputing is enough had no backward, and the next one is to."""
    _partly = 0
    """Steps that were to show it, in which some call failed, or fewer ended than in others."""
    _most_calls = 0
    """That ended in one forward."""
    blockless = False
    """Whether blocks were looked for in vain, and the model is left to the tensor engine."""
    _uninterrupted: tuple[str, ...] = (
        "spillway.session.abstract_session",
    )  # the model's own code runs inside of all others
    _heaviest: tuple[StepReport, Sequence[CallReport]] | None = None
    """The step with the highest peak, and the calls of the forward that saved most in it."""
    _blocks_written = False

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        writer: RunWriter | None,
        live: LiveLine | LiveView | None,
        allowed: Bytes,
        *,
        method: AbstractBlockMethod,
        traces: bool,
        pinned: Bytes,
        spill: SpillOptions,
        blocks: BlockOptions,
    ) -> None:
        super().__init__(models, optimizers, writer, live)
        self._model = _one(models)
        self._takes_shards = any(map(fully_sharded, self._model.modules()))
        check_runs_once(self._model)
        self._method = method
        self._budget = Budget(allowed)
        self._size_of = blocks.size
        self._generators = tuple(blocks.generators)
        self._lossy = blocks.lossy
        self._pinned = pinned
        self._spill = spill
        self._traces = traces
        self._device = device_of(models)
        if method.moves and self._device.type == "cpu":
            DiskTier(spill.directory, spill.io).close()  # what is wrong with it is said now, and not within a step
        self._arena = Arena.for_session() if self._device.type == "cpu" else None
        self._meter = meter_for(self._device)
        self._families: dict[tuple[tuple[int, ...], tuple[tuple[str, bool, torch.dtype], ...]], _Family] = {}
        self._engine: BlockEngine | None = None
        self._finder: Hook | None = None
        self._told_unseen = self._told_above = self._told_full = False
        self._needs = Needs()
        self._before: Before | None = None
        """Made in the first step, under a budget."""
        self._largest: Bytes = 0
        self._paging: Paging | None = None
        self._resident_set: ResidentSet | None = None
        self._heap: HeldHeap | None = None
        self._base_rss: Bytes | None = None
        """What the process takes beside tensors, where freed memory is returned."""
        self._reclaimer = self._watch_resident_set() if spill.return_freed and self._device.type == "cpu" else None
        self._before_updates = [one.register_step_pre_hook(self._optimizer_begins) for one in optimizers]
        self._handles = [one.register_step_post_hook(self._optimizer_ended) for one in optimizers]
        self._pages = blocks.page
        self._names = blocks.names
        self._parts = tuple(modules_of(models))
        """All modules of the model when a step was last begun."""
        self._looked = 0
        """How often they were looked for."""
        try:
            self._limit()
            self._open_or_find()
        except BaseException:
            self.close()
            raise

    def _open_or_find(self) -> None:
        """Blocks that are named, or sharded by themselves; others are found in the step that is next."""
        names = self._names if self._names is not None else sharded_blocks(self._model)
        if names or self._names is not None:
            replicated = self._model is not self._models[0]
            self._open([name.removeprefix("module.") for name in names] if replicated else names)
            return
        self._looked += 1
        self.blockless = self._looked > LOOKS and self._leaves_to_ops
        self._finder = Hook(self._model, self._find, self)
        self._finder.install()

    def tells_size(self, batch: Any) -> bool:
        """Whether blocks can be planned by the size of this batch."""
        if self._size_of is not None and batch is not None:
            return True
        return any(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in leaves(batch))

    def _is_whole(self, ended: int) -> bool:
        """Whether a forward in which so many calls ended may be one of all blocks, or there are none of these."""
        self._most_calls = max(self._most_calls, ended)
        return ended >= max(self._most_calls, len(self.blocks)) or self._partly >= TELLING

    def _look_again(self) -> None:
        """Where the model was rebuilt nothing of what was learned is of this one."""
        before, self._parts = self._parts, tuple(modules_of(self._models))
        engine = self._engine
        if engine is None or self._parts == before:
            return
        self._engine = None
        engine.close()
        self._families.clear()
        if self._paging is not None:
            self._paging.forget_all()
            if self._paging.plans is not None:
                self._paging.plans.forget()
        self._open_or_find()

    @functools.cached_property
    def _under_way(self) -> Bytes:
        """What collectives of sharded modules take at a moment of one step and not of another, by when they end."""
        return gathered_bytes(self._model)

    def _of_gradients(self) -> list[Bytes]:
        """Of each that is there and has bytes of its own."""
        return [local_of(one).nbytes for one in self._gradients if one.layout is torch.strided]

    @property
    def _gradients(self) -> list[torch.Tensor]:
        """That are there."""
        return [one for parameter in parameters_of(self._parts) if (one := gradient_of(parameter)) is not None]

    @property
    def _unknown(self) -> bool:
        """Whether nobody has named the blocks, or found them yet, and a model without any is left to another engine."""
        return self._finder is not None and self._engine is None and not self._method.needs_blocks

    @property
    def bypassed(self) -> bool:
        """Whether nobody looks for blocks now, or it does not matter if a forward runs without that."""
        return self._running is None or not self._method.needs_blocks

    @property
    def allowed(self) -> Bytes:
        return self._budget.allowed

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks; empty before the first step if they have to be found."""
        return () if self._engine is None else self._engine.blocks

    @property
    def explanation(self) -> tuple[str, ...]:
        if self._engine is None or self._planner is None:
            return ()
        told = self._planner.explained([report.block for report in self._engine.reports])
        left = self._paging.left if self._paging is not None else 0
        if left:
            sizes = "one input size" if left == 1 else f"{left} input sizes"
            told += (f"Steps of {sizes} are watched op by op, since what their blocks take did not fit.",)
        followed = [report for report in self.history if report.projected_seconds > 0]
        if not told or not followed:
            return told
        times = median(report.seconds / report.projected_seconds for report in followed)
        peaks = max(report.peak_bytes / report.projected_bytes for report in followed)
        return *told, (
            f"Of the seconds that plans expected {times:.0%} were taken, at the median of {len(followed)} "
            f"steps, and of the bytes {peaks:.1%}, at most."
        )

    @property
    def when_freed(self) -> list[Freed]:
        """Told of every storage that a thread of the engine's frees, by that thread; nobody before the first step."""
        return [] if self._engine is None else self._engine.when_freed

    def _limit(self) -> None:
        """What a budget takes besides its number; called again, it does what was not done."""
        budget, spill = self._budget, self._spill
        if not budget.limited:
            return
        if self._pages and self._paging is None:
            decides = LRU() if self._method.needs_blocks else watching()
            engine = engine_for(self._device, decides, budget, self._pinned, spill.directory, spill.io)
            engine.graph_grows = self._graph_grows
            self._paging = Paging(engine, self._base_rss, self._models, self._optimizers)
            self._pending, self._uninterrupted = engine.interrupts, UNINTERRUPTED
        if self._reclaimer is not None and self._base_rss is not None:
            self._reclaimer.limit = self._base_rss + int(SLACK * budget.allowed)

    def _allow(self, allowed: Bytes) -> None:
        for method in (self._method, *(family.method for family in self._families.values())):
            method.forget_plans()
        for family in self._families.values():
            family.traced.clear()  # what was measured under another budget need not fit in this one
        if self._paging is not None and self._paging.plans is not None:
            self._paging.plans.forget()
        if self._paging is not None and allowed > self._budget.named:
            self._paging.forget_all()
        self._budget.allow(allowed)
        self._limit()

    @property
    def watching(self) -> TensorEngine | None:
        """The engine of steps that are watched op by op, with all that is away; None without a budget. A session that
        takes over goes on with it: if all came back meanwhile, that might not fit."""
        return self._paging.engine if self._paging is not None and self._budget.limited else None

    def _leave_to(self, other: Session) -> None:
        watching = self.watching
        if watching is not None and isinstance(other, TensorSession):
            watching.graph_grows = None
            other._base_rss, self._paging = self._base_rss, None
        super()._leave_to(other)

    def _make_step(self, batch: Any, owner: weakref.ref[Any]) -> AbstractStep:
        return _Step(self, batch, owner)

    def _give_up(self) -> None:
        with ExitStack() as stack:
            if self._resident_set is not None:
                stack.callback(self._resident_set.close)
            if self._heap is not None:
                stack.callback(self._heap.release)
            if self._arena is not None:
                stack.callback(self._arena.release)
            stack.callback(self._meter.close)
            if self._writer is not None:
                stack.callback(self._writer.close)
                stack.callback(self._write_blocks)
            if self._live is not None:
                stack.callback(self._live.close)
            if self._engine is not None:
                stack.callback(self._engine.close)
            if self._paging is not None:
                stack.callback(self._paging.close)
            if self._finder is not None:
                stack.callback(self._finder.remove)
            for handle in (*self._before_updates, *self._handles):
                stack.callback(handle.remove)

    def _leave(self, step: AbstractStep, error: BaseException | None) -> None:
        if isinstance(step, _Step) and isinstance(error, Exception) and not isinstance(error, SpillwayError):
            step.failed()
        if isinstance(error, SpillFullError):
            self._does_without_spill()
        if isinstance(error, RecomputeError) and self._leaves_to_ops and not error.once:
            self.blockless = True
            error.add_note("From the next step on every op is watched, where that is no obstacle (method='lru').")
        super()._leave(step, error)

    def _write_blocks(self) -> None:
        """Into the run file, once."""
        held = self._held_by_blocks()
        if held is not None and not self._blocks_written:
            self._write({"blocks": held.to_json()})
            self._blocks_written = True

    def _does_without_spill(self) -> bool:
        """There is no room for what was to leave: whether methods plan from here on without that."""
        methods = [self._method, *(family.method for family in self._families.values())]
        without = [method.does_without_spill() for method in methods]
        if all(without) and not self._told_full:
            self._told_full = True
            warnings.warn(
                "There is no room where bytes of blocks were to wait: from here on blocks are kept or recomputed.",
                stacklevel=2,
            )
        return all(without)

    def _held_by_blocks(self) -> BlocksAtPeak | None:
        if self._heaviest is None:
            return None
        report, calls = self._heaviest
        modules = dict(self._model.named_modules())
        return BlocksAtPeak(
            step=report.step, peak_bytes=report.peak_bytes, start_bytes=report.start_bytes,
            blocks=[
                HeldByBlock(
                    block=call.block, kind=type(module).__name__ if module is not None else "",
                    line="" if module is None else line_of_forward(module), action=call.action.value,
                    saved_bytes=call.own_bytes, held_bytes=max(call.resident_bytes, 0),
                )
                for call in calls for module in [modules.get(call.block)]
            ],
        )  # fmt: skip

    def _header(self) -> dict[str, Any]:
        return header(self._budget.allowed, self._method.name, self._device)

    @property
    def _leaves_to_ops(self) -> bool:
        """Whether a model without blocks is left to the tensor engine."""
        return self._paging is not None and not self._method.needs_blocks

    def _watch_resident_set(self) -> Reclaimer:
        self._resident_set = resident_set = ResidentSet()
        self._heap = HeldHeap()
        self._base_rss = max(resident_set.read() - self._named_bytes(()), 0)
        return Reclaimer(resident_set)

    # ------------------------------------------------------------------ blocks

    @unheard_by_modes
    def _open(self, names: Sequence[str]) -> BlockEngine:
        there = dict(self._model.named_modules())
        above = [there.get(name, there.get(name.rpartition(".")[0], self._model)) for name in names]  # of a group
        taken = [name for name, one in zip(names, above, strict=True) if isinstance(vars(one).get("forward"), HOOKS)]
        if taken:
            raise ModelError(
                f"The block {taken[0]} is managed by another session, as a part of another model; close that first."
            )
        self._engine = BlockEngine(
            self._model, names, generators=self._generators, spill_directory=self._spill.directory,
            spill_io=self._spill.io, host_budget=self._pinned, lossy=self._lossy, options=self._method.action_options,
        )  # fmt: skip
        self._engine.bypassed = True
        self._engine.when_spill_is_full(self._does_without_spill)
        self._agreement = None if self._engine.gathered is None else Agreement(self._engine.gathered)
        return self._engine

    def _find(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's forward, until the first one inside a step; and for good if somebody, as Accelerate
        does, has put something in front of it that calls it."""
        assert self._finder is not None
        forward, running = self._finder.original, self._running
        if (
            self._engine is not None
            or self._closed
            or not isinstance(running, _Step)
            or not torch.is_grad_enabled()
            or hooks_are_off()
            or self.blockless
        ):
            return forward(*args, **kwargs)
        if self._method.needs_blocks:
            check_runs_once(self._model)
        try:
            if self._unknown and running_compiled():
                raise NoBlocksError("What calls the model is compiled, and passes blocks by.", reason="compiled")
            names, failure = self._found(forward, args, kwargs)
        except NoBlocksError as error:
            names, failure = [], error
        engine: BlockEngine | None = None
        if failure is None and not self._given_up:
            try:
                self._finder.remove()
                engine = self._open(names)
            except BaseException as error:
                self._finder.install()
                if not isinstance(error, ModelError) or not self._leaves_to_ops:
                    raise
                failure = error  # its blocks cannot be had, as where another session has them
        if isinstance(failure, ModelError) and self._leaves_to_ops and not self._given_up:
            failure = None  # which holds this frame, and so what the forward gives back
            running.page_from_here()
            output = forward(*args, **kwargs)  # which may have failed before, and then fails again
            self._finder.remove()
            self.blockless = True
            return output
        if self._given_up:  # closed in the middle of it
            self._finder.remove()
            return forward(*args, **kwargs)
        if failure is not None:
            try:
                forward(*args, **kwargs)  # fails in the same way, with all that it has changed by then
                raise failure
            finally:
                del failure  # which holds this frame
        assert engine is not None
        running.watch()
        engine.begin_forward(args, kwargs)  # not through what stands in front, which is running
        return engine.goes_on(forward)(*args, **kwargs)

    @unheard_by_modes
    def _found(
        self, forward: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[str], BaseException | None]:
        """Names of the blocks, or what is raised where the forward that counts does not fail as well."""
        environment = environment_of(self._model, self._generators)
        try:
            return find_blocks(self._model, forward, args, kwargs, environment), None
        except BaseException as error:
            refused = isinstance(error, SpillwayError) or not isinstance(error, Exception)
            if by_signal(error) or (refused and not is_the_models(error)):
                raise
            without_locals(error)
            return [], self._unfound(error) if isinstance(error, Exception) else error

    def _unfound(self, error: Exception) -> NoBlocksError:
        """What the forward that was to find the blocks ended in. In the frame of whoever caught that, a name for it
        would close a circle."""
        failure = NoBlocksError(
            f"The blocks of {type(self._model).__name__} cannot be found in a forward that runs once more: it "
            f"ended in {type(error).__name__} ({error}); name them with blocks=BlockOptions(names=[...]).",
            reason="the forward in which they are looked for failed",
        )
        failure.__cause__ = error
        return failure

    def _optimizer_begins(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        return update_in_parts(optimizer, partial(self._update_begins, optimizer), args, kwargs)

    def _update_begins(self, optimizer: torch.optim.Optimizer, at_once: bool) -> Bytes | None:
        return self._running.optimizer_begins(optimizer, at_once) if isinstance(self._running, _Step) else None

    @_disable_dynamo
    def _optimizer_ended(self, *_: Any) -> None:
        if isinstance(self._running, _Step):
            self._running.optimizer_ended()

    def _graph_grows(self) -> None:
        running = self._running
        if isinstance(running, _Step) and running.thread is threading.current_thread():
            running.graph_grows()

    def _needs_of_all(self, *, at_once: bool = False) -> Update:
        """Of all optimizers, which step one after the other."""
        needs = (self._needs.of(one, at_once=at_once) for one in self._optimizers)
        return functools.reduce(Update.beside, needs, Update())

    # ------------------------------------------------------------------ for _Step

    def _beside_models(self, batch: Any) -> Iterator[tuple[Kind, torch.Tensor]]:
        yield from super()._beside_models(batch)
        if self._takes_shards:  # which wholes take the place of, after an evaluation also between steps
            groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
            yield from ((Kind.PARAMETER, one) for group in groups for one in group["params"])
        if self._before is not None:
            yield from ((Kind.BUFFER, copy) for copy in self._before.copies)

    def _remember(self, *, large: bool) -> None:
        """What a refusal is to put back."""
        if self._budget.limited:
            if self._before is None:
                self._before = Before(environment_of(self._model, self._generators))
            self._before.remember(self._parts, large=large)

    def _transfers(self) -> tuple[float, ...]:
        return (0, 0, 0, 0.0, 0.0) if self._engine is None else self._engine.transfers

    def _family(self, batch: Any) -> _Family:
        structure = tuple(leaf.dim() for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
        # What is frozen saves nothing, so that what was learned until then says nothing of steps that train it.
        # Nor do steps before a mask, as of pruning, or another dtype tell of those with it.
        named = (pair for part in self._parts for pair in part._parameters.items())
        trained = tuple((name, one.requires_grad, one.dtype) for name, one in named if one is not None)
        key = structure if self._size_of is None else (), trained
        if key not in self._families:
            reader = SizeReader(self._size_of, takes_vectors=self._method.takes_vectors)
            self._families[key] = _Family(reader, self._method.fresh(batched=False))
        return self._families[key]


@final
class _Step(AbstractStep):
    """One step, whose blocks are watched once they are known."""

    _session: BlockSession

    def __init__(self, session: BlockSession, batch: Any, owner: weakref.ref[Any]) -> None:
        super().__init__(session, batch, owner)
        self._planning: Seconds = 0.0
        self._watch: StepWatch | None = None
        self._trace: AbstractTrace | None = None
        self._optimized = self._updated = False
        """Whether an optimizer has begun, and whether it was granted what it needs."""
        self._update: Bytes = 0
        """What is foretold to be there at most while optimizers update."""
        self._evaluates: torch.optim.Optimizer | None = None
        """The one that is updating, and may call its closure again."""
        self._lost: str | None = None
        """What could not be put back, once that was tried."""
        self._unheard: Bytes = 0
        """Bytes of small buffers that the step has put others in the place of, as observers do: nobody hears that they
        are gone, which depends on where the others lie."""
        self._updates: list[Kept] = []
        """Optimizers that have begun, as long as blocks are watched."""
        self._watched: tuple[Kept, Bytes] | None = None
        """The one of which every op is watched since nobody knows what it takes, and what was there when it began."""
        self._forwards: StepWatch | None = None
        """What was measured before it."""
        self._alone: Bytes = 0
        """What a step without a forward of the model took, above what was there when it began."""
        self._asked: list[tuple[_Family, Shape]] = []
        """Of each forward that a method was asked about, what it was called with."""
        self._paged = self._tries = False
        """Whether every op is watched, and whether blocks are recomputed besides, to see if that is enough."""
        self._forwards_before = 0
        """Forwards of the engine's, until every op was watched, that were none of this step's."""
        self._until: Bytes = 0
        """What was taken at most before every op was."""
        self._guarded = False
        """Whether what it takes above the budget is lent."""
        self._lent: Bytes = 0
        """How much that was."""

    @unheard_by_modes
    def begin(self) -> None:
        session = self._session
        session._look_again()
        for handle in session._before_updates:  # the user's come first, which may change what is updated, and by what
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                hooks.move_to_end(handle.id)
        self._family = session._family(self._batch)
        sized = not session._leaves_to_ops or session.tells_size(self._batch)
        self._dimensions = self._family.reader.dimensions(self._batch) if sized else ()
        self._size = self._family.size(self._dimensions) if sized else ()
        self._signature = signature_of(self._batch)
        self._entered = self._family, self._signature, self._dimensions
        session._remember(large=session._paging is None or not session._paging.knows(self._entered[1:]))
        known = session._bytes_by_address(self._batch)
        self._start = self._named = sum(known.values())
        if session._device.type == "cuda":
            self._start = session._meter.read()
        self._gradients = [Gradient.of(one) for one in storages((Kind.GRADIENT, one) for one in session._gradients)]
        self._before = session._transfers()
        reset_peak()
        self._began = time.perf_counter()
        collecting = self._family.method.collects(self._size)
        self._key = self._dimensions, collecting, self._start
        self._new = collecting or self._key not in self._family.traced
        self._base = session._meter.begin(self._start)
        if session._paging is not None:
            untried = sized and (session._unknown or session._untried) and not self._compiled
            if sized:
                self._tries, session._untried = untried and self._may_be_enough, False
            session._paging.come_back(self._entered[1:], self._holds)
            if session._paging.wanted(self._entered[1:], self._start) or untried or not sized:
                parameters = parameters_of(session._parts)
                self._page(0, circumstances(self._signature, session._device, session._parts, parameters))
                return
        session._budget.begin(self._start)
        wanted = session._traces or self._new or session._budget.limited
        self._trace = trace_for(session._device, known) if wanted else None
        if self._trace is not None:
            if session._leaves_to_ops and session._paging is not None:
                self._guarded = session._paging.guards(self._trace, self._start)
            self._trace.mark()
        if session._engine is not None:
            self.watch()

    def _holds(self, free: Bytes) -> bool:
        """Whether a plan for blocks is known to leave so many bytes free."""
        available = self._session._budget.allowed - self._start - free
        if self._session._engine is None:
            return False
        return self._family.method.holds(self._size, available) or self._family.holds(self._dimensions, 1, available)

    def micro_batch(self, batch: Any) -> None:
        """Forwards from here on are planned by the size of this batch, and teach what they take at this one."""
        if not any(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in leaves(batch)):
            return
        family = self._session._family(batch)
        dimensions = family.reader.dimensions(batch)
        if (family, dimensions) == (self._family, self._dimensions):
            return
        self._family, self._dimensions, self._size = family, dimensions, family.size(dimensions)
        self._signature += f", {signature_of(batch)}"
        if self._watch is not None:
            self._watch.path += f"{list(dimensions)}"

    def _page(self, nameless: Bytes, kind: Hashable | None = None) -> None:
        """From here on every op is watched, see `session.paging`; so many bytes were made that have no name. A whole
        step, in which blocks run plainly, is of some kind."""
        session = self._session
        assert session._paging is not None
        session._paging.remember(self._entered[1:])
        self._paged = True
        if session._engine is not None:
            self._forwards_before = session._engine.forwards - self._begun
        self._stop()
        self._watch = self._trace = None
        if session._engine is not None:
            self.watch()
        named = partial(session._tensors, self._batch)
        session._paging.begin(
            self, named, self._signature, session._models, nameless, self.deferred.shut,
            None if self._tries else kind, self._batch,
        )  # fmt: skip

    @unheard_by_modes
    def page_from_here(self) -> bool:
        """Watch every op of the rest of the step; whether that can begin here."""
        session, watch = self._session, self._watch
        if self._paged or session._paging is None or hooks_are_off():  # within torch.func nothing can leave
            return self._paged
        if watch is not None and (self._compiled or not watch.leave()):
            return False
        level = self._trace.level() if self._trace is not None else None
        if level is None:
            level = session._meter.read() - self._base
        self._page(max(level - session._named_bytes(self._batch) + self._named, 0))
        self._until = watch.peak if watch is not None else 0
        return True

    @property
    def rebuilt(self) -> bool:
        return self._session._parts != tuple(modules_of(self._session._models))

    def failed(self) -> None:
        """The user's own code has: whether recomputing is enough is left to the next step to show."""
        if self._paged and self._tries and self._session._paging is not None:
            self._session._paging.forget(self._entered[1:])
            self._session._untried = True

    @unheard_by_modes
    def graph_grows(self) -> None:
        """A backward is about to begin that makes a graph of itself."""
        if self._watch is not None and self._watch.graph_grows():
            self.page_from_here()

    @property
    def _compiled(self) -> bool:
        """Whether a part is compiled: watched, it runs op by op, to other bits than compiled."""
        return any(map(is_compiled, self._session._model.modules()))

    @property
    def _begun(self) -> int:
        """Forwards, before every op is watched."""
        return self._watch.path.count("f") if self._watch is not None else 0

    def pages(self, level: Bytes, call: Call) -> bool:
        session, family, at, allowed = self._session, self._family, self._dimensions, self._session._budget.allowed
        if session._paging is None or not torch.is_grad_enabled() or hooks_are_off():
            return False
        later, begun = self._watch is not None and len(self._watch.passes) > 1, self._begun
        if session._method.needs_blocks or (session._engine is not None and self._compiled):
            rise = self.recomputing(call) if not later else None
            if later or max(level + (rise.most if rise else 0), self._start + self.update) <= allowed:
                return False  # or nobody can tell, and the next one like it is
        elif _fits(family.rises, at, allowed - level) or family.holds(at, begun, allowed - self._start):
            return False
        else:
            self._tries = self._may_be_enough
        if later:
            return self.page_from_here()
        self._page(max(level - self._start, 0))
        return True

    @unheard_by_modes
    def watch(self) -> None:
        """From here on the engine's blocks are told what to do, and measured."""
        session = self._session
        assert session._engine is not None
        session._engine.most_copied = None
        if self._paged and session._paging is not None:
            session._engine.observer = None
            session._engine.rehearses = False
            if self._tries:
                session._engine.most_copied = session._paging.room_for_copies
            session._engine.bypassed = not (session._method.needs_blocks or self._tries)
            session._engine.actions = lambda block, call: Action.RECOMPUTE
            return
        self._watch = StepWatch(
            session._engine,
            session._meter,
            self._trace,
            base=self._base,
            start=self._start,
            gradients=self._gradients,
            budget=session._budget,
            known=lambda: session._named_bytes(self._batch),
            foresight=self,
            measured=partial(self._entered[0].measured, self._key),
            decide=self._decide,
            new=self._new or session._traces or session._method.moves,
            largest=session._largest,
            reclaimer=session._reclaimer,
        )
        self._gradients = []
        session._engine.observer = self._watch

    def call(self, called: tuple[Any, dict[str, Any]]) -> Call:
        engine, model = self._session._engine, self._session._model
        assert engine is not None
        named = model.named_parameters() if self._session._gradients else ()  # names take longest, and seldom matter
        there = ((name, gradient_of(one)) for name, one in named)  # of sparse ones each forward makes others
        dense = {name: one.nbytes for name, one in there if one is not None and one.layout is torch.strided}
        return Call(engine, called, dense)

    def rise(self, seam: Seam) -> Bytes:
        return self._family.seams.get(self._dimensions, {}).get(seam, 0)

    def least(self, call: Call, level: Bytes) -> Bytes | None:
        """None as well for a size that should fit by what smaller and larger ones took."""
        enough = self._session._budget.allowed - level
        if not self._session._budget.limited or _fits(self._family.rises, self._dimensions, enough):
            return None
        if self._session._takes_shards:
            return None  # a sharded model has no copy without content
        return least(call, environment_of(self._session._model, self._session._generators), enough)

    def recomputing(self, call: Call, *, loss: bool = True, action: Action = Action.RECOMPUTE) -> Rise | None:
        if self._session._takes_shards:
            return None
        environment = environment_of(self._session._model, self._session._generators)
        rise = recomputing(call, environment, loss=loss, action=action)
        if rise is None:
            return None
        slack = max(rise.now, rise.later) // SAMPLES + call.engine.print_bytes
        return rise._replace(sure=rise.sure and self.hears_all, state=self.state, slack=slack)

    def floor(self, call: Call, level: Bytes) -> Bytes | None:
        if _fits(self._family.unhindered, self._dimensions, self._session._budget.allowed - level):
            return 0
        key = self._dimensions, frozenset(call.gradients), self.state
        if not self._dimensions or key not in self._family.floors:
            rise = self.recomputing(call)
            self._family.floors[key] = rise.most if rise is not None else None
        return self._family.floors[key]

    @property
    def hears_all(self) -> bool:
        return not others_hear(self._session._model)

    @property
    def under_way(self) -> Bytes:
        return self._session._under_way

    @property
    def state(self) -> Bytes:
        return self._session._needs_of_all().meanwhile

    @property
    def _missing(self) -> Bytes:
        """Of gradients that a backward creates."""
        groups = [group for optimizer in self._session._optimizers for group in optimizer.param_groups]
        without = [one for group in groups for one in group["params"] if one.requires_grad and one.grad is None]
        return sum(local_of(one).numel() * one.element_size() for one in without)

    @property
    def _may_be_enough(self) -> bool:
        """Whether recomputing every block may be, beside what no block has a say in."""
        return self._start + self._missing <= self._session._budget.allowed

    @property
    def update(self) -> Bytes:
        needs = self._session._needs_of_all()
        return self._missing + needs.state + needs.later + needs.working + LOSS

    def _decide(self, available: Bytes) -> tuple[Decision, Forecast | None, InputSize, bool]:
        decision, forecast, size, bypassed = self._decide_alone(available)
        session = self._session
        if session._agreement is None:
            return decision, forecast, size, bypassed
        plan, method = decision.plan, session._method
        again = [number for number, action in enumerate(plan.actions) if action.recomputes and not bypassed]
        everything = not plan.actions and plan.otherwise.recomputes and not bypassed
        if session._agreement.reached([-1] if everything else again, len(plan.actions)):
            return decision, forecast, size, bypassed
        nothing = BlockPlan.nothing_kept(size, available, options=method.action_options)
        return Decision(Phase.PLANNED, nothing, decision.collects), forecast, size, False

    def _decide_alone(self, available: Bytes) -> tuple[Decision, Forecast | None, InputSize, bool]:
        deliver(self._session._pending)  # a signal at the last line of entering
        self._asked.append((self._family, self._dimensions))
        engine = self._session._engine
        assert engine is not None
        if not self._session._budget.limited:  # nothing is in want of room
            method = self._session._method
            nothing = BlockPlan.nothing_kept(self._size, available, method.action, method.action_options)
            return Decision(Phase.PLANNED, nothing, False), None, self._size, True
        method = self._family.method
        if not method.needs_blocks:  # a gradient that is there has the new one beside it for a moment
            available -= max(self._session._of_gradients(), default=0)
        missed = self._session._paging.missed(self._entered[1:]) if self._session._paging is not None else 0
        needs = self._session._needs_of_all(at_once=True)
        available -= missed + self._session._under_way + needs.held
        if not self._asked[1:]:  # of later forwards gradients are there
            self._update = min(self._start + self._missing + needs.state + needs.working, self._session.allowed)
        began = time.perf_counter()
        decision = method.begin(self._size, available)
        self._session._planner = method
        self._new |= decision.phase is Phase.COLLECTING
        self._planning += time.perf_counter() - began
        engine.rehearses = decision.collects and method.forwards > 1
        forecast = method.forecast(self._size)
        fits = decision.phase is Phase.PLANNED and decision.plan.holds and not decision.plan.given_up and not missed
        watch = self._watch
        return decision, forecast, self._size, fits and watch is not None and not watch.unmeasured

    @unheard_by_modes
    def optimizer_begins(self, optimizer: torch.optim.Optimizer, at_once: bool) -> Bytes | None:
        """An optimizer is about to change something: in parts of so many bytes, or all at once, as it may have to."""
        self._optimized = True
        session, watch, room = self._session, self._watch, None
        if watch is None and self._trace is not None and session._budget.limited and not self._guarded:
            room = self._check_alone(self._trace, session._needs.of(optimizer, at_once=at_once))
        if watch is not None and session._budget.limited:
            needs, told = session._needs.of(optimizer, at_once=at_once), session._needs.tells(optimizer)
            if told and self._evaluates is optimizer:
                needs = Update()  # its closure ran again, and it was granted all that it needs
            try:
                room = watch.optimizer_begins(needs, told=told or self._guarded)
                self._evaluates = optimizer
            except BudgetInfeasible as refusal:
                if session._needs.assumes(optimizer):
                    refusal.add_note(_assumption(optimizer, needs))
                raise
            self._updates.append(kept_by(optimizer))
            if self._watch is None and not told and session._paging is not None:
                session._paging.forget(self._entered[1:])  # the rest of the step fits
                self._forwards, self._watched = watch, (self._updates.pop(), session._budget.resident)
        self._updated = True
        return None if room is None or at_once else session._needs.part_bytes(optimizer, room)

    def _check_alone(self, trace: AbstractTrace, needs: Update) -> Bytes | None:
        """Of a step in which no block was heard of, as where `torch.func` calls the model; what is left for
        temporaries."""
        trace.mark()  # whose level is what is there now
        windows = trace.so_far()
        if not windows:
            return None
        peak = self._start + max(window.peak for window in windows)
        most, smallest = needs.step(peak, self._start + windows[-1].level)
        if most > self._session._budget.allowed:
            # The next one may begin with gradients and give them up: of small ones nobody hears that they are gone.
            small = sum(nbytes for nbytes in self._session._of_gradients() if nbytes < UNHEARD)
            raise self._session._budget.refusal(most, "the step", 0, smallest + small, exact=not in_backward())
        return self._session._budget.allowed - self._start - windows[-1].level - needs.state

    @unheard_by_modes
    def optimizer_ended(self) -> None:
        """It has changed what it was to change."""
        self._evaluates = None
        if self._watch is not None:
            self._watch.optimizer_ended()
        if self._watched is not None and self._session._paging is not None:
            (key, before), self._watched = self._watched, None
            budget, counters = self._session._budget, self._session._paging.engine.controller.counters
            if not (counters.moves or counters.drops):
                state = max(budget.resident - before, 0)
                self._session._needs.learn(key, Update(state, max(budget.peak - before - state, 0)))

    @unheard_by_modes
    def end(self) -> SpillwayError | None:
        refusal = self._end()
        if refusal is not None or self.refused is not None:
            self._put_back()
        return refusal

    def forget(self) -> None:
        super().forget()
        if self._session._paging is not None and self._session._paging.plans is not None:
            self._session._paging.plans.over()
        self._watch = self._forwards = self._trace = None
        self._asked, self._gradients = [], []

    def _put_back(self) -> None:
        """Of a step that was refused, whatever the user's code makes of the refusal."""
        if self._lost is None and self._session._before is not None:
            replaced = storages((Kind.BUFFER, one) for one in self._session._before.replaced)
            self._unheard = sum(nbytes for one in replaced if (nbytes := one.nbytes()) < UNHEARD)
            self._lost = self._session._before.put_back(updated=self._updated)

    def _end(self) -> SpillwayError | None:
        session = self._session
        if session._engine is not None:
            session._engine.observer = None
            session._engine.bypassed = True
            session._engine.actions = {}
        self._stop()
        if self._watch is not None:
            session._largest = max(session._largest, self._watch.largest)
        if self._paged and session._paging is not None:
            return session._paging.end()
        return self._refusal()

    def _stop(self) -> None:
        """Blocks are not measured any more. Called again, it does what was not done."""
        session = self._session
        if self._watch is not None:
            self._watch.stop()
        elif self._trace is not None:
            self._alone = max((window.peak for window in self._trace.stop()), default=0)
        if self._guarded and session._paging is not None:
            self._lent = session._paging.lent(partial(session._tensors, self._batch))
            self._guarded = False
            if self._lent:
                session._paging.remember(self._entered[1:], self._lent)

    def _refusal(self) -> BudgetInfeasible | None:
        """Of a step that took too much after the last seam, and not in its optimizer."""
        session, watch = self._session, self._watch
        taken = watch.passed if watch is not None else 0 if self._optimized else self._start + self._alone
        if taken <= session._budget.allowed:
            return None
        calls = session._engine.begun if watch is not None and session._engine is not None else 0
        sure = watch is None or watch.recomputes
        return session._budget.refusal(taken, "the step", calls, taken, exact=sure)

    @property
    def refused(self) -> BudgetInfeasible | None:
        return self._session._budget.refused

    @unheard_by_modes
    def told(self, refusal: BudgetInfeasible) -> BudgetInfeasible:
        self._put_back()
        told = self._told(refusal)
        pass_notes(refusal, told)
        watch = self._watch if self._session._paging is None else None
        kept = watch.keeping_gradients() if watch is not None else None
        if kept is not None and kept > told.smallest_budget:
            told.add_note(
                f"Where gradients stay allocated from one backward to the next forward, as in accumulation and with "
                f"zero_grad(set_to_none=False), it takes {kept} bytes ({format_bytes(kept)})."
            )
        if self._lost:
            told.add_note(self._lost)
        return told

    def _told(self, refusal: BudgetInfeasible) -> BudgetInfeasible:
        """What this step has left behind, such as gradients, is there when one like it begins."""
        session, watch = self._session, self._watch
        if session._paging is not None:
            if self._paged:
                copies = session._before.copies if session._before is not None else []
                return session._paging.told(refusal, session._models, session._optimizers, self._batch, copies)
            session._paging.refused(self._entered[1:])
            refusal.add_note(
                "The next step of this size is watched op by op, so that it fits (BlockOptions(page=True))."
            )
        left, smallest, exact = session._named_bytes(self._batch), refusal.smallest_budget, refusal.exact
        if refusal.op == "the step" and not self._optimized and left > self._start and watch is not None:
            rise = watch.recomputing_again()
            if rise is not None:
                smallest, exact = max(smallest, left + rise.most), rise.sure
        smallest += session._under_way + self._unheard
        if (smallest, exact) == (refusal.smallest_budget, refusal.exact):
            return refusal
        return BudgetInfeasible(
            needed=refusal.needed, allowed=refusal.allowed, op=refusal.op, op_index=refusal.op_index,
            smallest_budget=smallest, exact=exact,
        )  # fmt: skip

    def conclude(self) -> None:
        seconds = time.perf_counter() - self._began
        session = self._session
        if session._unknown and (self._optimized or session._gradients):
            session.blockless = True  # it was trained without being called
        try:
            if session._before is not None:
                session._before.learn()
            self._learn(seconds)
            self._report(seconds)
            if self._paged and session._paging is not None:
                session._say_what_ran_eagerly(session._paging.engine)
        finally:
            self._say_if_unseen()

    def _say_if_unseen(self) -> None:
        if (
            self._optimized
            and not self._paged
            and not (self._watch is not None and self._watch.passes)
            and not (self._session._engine is not None and self._session._engine.forwards)
            and not self._session._told_unseen
        ):
            self._session._told_unseen = True
            warnings.warn(
                f"This step updated {type(self._session._model).__name__} without calling it: only what its forward "
                f"runs is kept under the budget. Give manage() the module that the steps call.",
                stacklevel=6,
            )

    @unheard_by_modes
    def _learn(self, seconds: Seconds) -> None:
        watch = self._watch or self._forwards
        if watch is None:
            return
        for key, took in zip(self._updates, watch.updates, strict=False):
            self._session._needs.learn(key, took)
        more = any(0 < one.expected < watch.peak for one in watch.passes)
        moves = any(one.moves for one in watch.passes)  # how long copies take is not the same in every step
        if not (self._new or more or moves or watch.unmeasured):
            return  # there is nothing to learn from it
        entered, _, dimensions = self._entered
        if not watch.traced or self._lent:
            entered.traced.pop(self._key, None)  # measure it the next time
            return
        shapes = [dimensions, *(shape for family, shape in self._asked if family is entered)]
        largest = tuple(map(max, zip(*shapes, strict=False)))
        if any(self._session._is_whole(len(one.ended)) for one in watch.passes):
            entered.rises[largest] = max(entered.rises.get(largest, 0), watch.peak - self._start)
            if not any(one.revoked for one in watch.passes):
                entered.unhindered[largest] = entered.rises[largest] + watch.on_its_way
        samples = watch.samples()
        heard = any(one.ended for one in watch.passes)  # where all is known to fit, nobody listens to blocks
        self._session._told_nothing = 0 if samples or not heard else self._session._told_nothing + 1
        if self._session._told_nothing == TELLING and self._session._leaves_to_ops:
            self._session.blockless = True
            warnings.warn(
                f"{TELLING} steps of {type(self._session._model).__name__} have told nothing of its blocks, as where "
                f"two forwards come before their backward: from here on every op is watched (method='lru').",
                stacklevel=7,
            )
        asked = dict(zip(map(id, watch.passes), self._asked, strict=True))
        for one, step, blocks, rises in samples:
            family, dimensions = asked[id(one)]
            family.learn_rises(dimensions, rises)
            family.learn(dimensions, replace(step, seconds=seconds / len(watch.passes)), blocks)
            unlimited = not self._session._budget.limited
            if unlimited or step.peak <= one.decision.plan.projected or one.decision.phase is Phase.COLLECTING:
                entered.traced.setdefault(self._key, set()).add(watch.path)

    def _foretold(self) -> dict[str, Any]:
        watch = self._watch or self._forwards
        planned = watch.passes if watch is not None else []
        expected = max((one.expected for one in planned), default=0)
        return {
            "projected_bytes": max(expected, self._update) if expected and self._optimized else expected,
            "projected_seconds": sum(one.decision.plan.step_seconds for one in planned),
            "planning_seconds": self._planning,
        }

    def _report_paged(self, paging: Paging, seconds: Seconds) -> None:
        session = self._session
        ran = () if session._engine is None else session._engine.reports
        engine, number = paging.engine, len(session.history)
        told = report_of(engine, number, self._signature, seconds, self.logged)
        if self._until:
            told = replace(told, start_bytes=self._start, peak_bytes=max(told.peak_bytes, self._until))
        told = replace(told, beyond_bytes=max(told.beyond_bytes, self._lent))
        # And what earlier steps have left elsewhere, which was not wanted in this one: it will be in memory then.
        most = max(told.peak_bytes, told.device_peak_bytes) + max(self._start - engine.start_bytes, 0)
        twice = sum(call.recomputes > 0 for call in ran)
        trained = self._optimized or twice > 0 or bool(session._gradients)
        partly = self._tries and not session._is_whole(sum(call.seconds > 0 for call in ran))
        session._partly += partly
        if partly or not trained:
            session._untried |= self._tries
        # Recomputing is enough; but not where a kernel has taken for itself what is in a file, and does not count.
        elif self._tries and not (told.drops or told.moves or told.beyond_bytes or most > session.allowed):
            paging.forget(self._entered[1:])
            self._family.rises[self._dimensions] = rise = most - self._start
            forwards = 0 if session._engine is None else session._engine.forwards - self._forwards_before
            known, _ = self._family.tried.get(self._dimensions, (0, 0))
            if forwards >= known:  # the latest: the first steps make the optimizer's state
                self._family.tried[self._dimensions] = forwards, rise
        told = replace(told, input_size=list(self._size), blocks=len(ran), recomputed_blocks=twice)
        session._finish(replace(told, **self._foretold()))
        if paging.plans is not None:
            paging.plans.conclude(seconds)

    @unheard_by_modes
    def _report(self, seconds: Seconds) -> None:
        session, watch = self._session, self._watch
        if self._paged and session._paging is not None:
            self._report_paged(session._paging, seconds)
            return
        passes = watch.passes if watch is not None else []
        calls = [call for one in passes for call in one.calls]
        again = [call for call in calls if call.recomputes]
        peak = watch.peak if watch is not None else self._start + self._alone
        sent, bytes_out, bytes_in, room, data = (
            now - then for now, then in zip(session._transfers(), self._before, strict=True)
        )
        report = StepReport(
            step=len(session.history), signature=self._signature, managed=bool(calls), allowed=session.allowed,
            start_bytes=self._start, peak_bytes=peak,
            end_bytes=session._named_bytes(self._batch),
            peak_rss_bytes=peak_rss(), working_bytes=0, seconds=seconds, stall_seconds=room + data, recomputed_ops=0,
            recomputed_seconds=sum(call.recompute_seconds for call in calls), ops=0,
            bytes_out=int(bytes_out), bytes_in=int(bytes_in),
            dropped_bytes=sum(call.own_bytes for call in again), drops=len(again), moves=int(sent), refusals={},
            escaped=0, unmanaged=0, logged=self.logged, input_size=list(self._size), blocks=len(calls),
            recomputed_blocks=len(again), revoked_blocks=sum(len(one.revoked) for one in passes),
            **self._foretold(), room_seconds=room, peak_measured=watch is not None and watch.traced,
            beyond_bytes=self._lent,
        )  # fmt: skip
        session._finish(report)
        if passes and (session._heaviest is None or peak > session._heaviest[0].peak_bytes):
            forwards = [one.calls for one in passes]
            session._heaviest = report, max(forwards, key=lambda calls: sum(call.own_bytes for call in calls))
        if report.peak_measured and peak > session.allowed and not session._told_above:
            session._told_above = True  # it has updated the model: the next one is refused before its optimizer begins
            warnings.warn(
                f"This step took {format_bytes(peak)} where {format_bytes(session.allowed)} are allowed, in what its "
                f"optimizer needs for itself, which could not be told beforehand.",
                stacklevel=7,
            )


def _fits(rises: Mapping[Shape, Bytes], dimensions: Shape, free: Bytes) -> bool:
    """Whether one of these tells that a step of this size does, if it grows with the square of the size."""
    return any(
        rise * math.prod(max(mine / one, 1) ** 2 for mine, one in zip(dimensions, other, strict=True)) <= free
        for other, rise in rises.items()
        if len(other) == len(dimensions) and all(other)
    )


def _assumption(optimizer: torch.optim.Optimizer, needs: Update) -> str:
    return (
        f"What {type(optimizer).__name__} needs cannot be told before it has stepped once, and is taken to be no more "
        f"than {format_bytes(needs.state)} of state and {format_bytes(needs.working)} of temporaries. A method that "
        f"watches every op, or BlockOptions(page=True), needs no such bound."
    )


def _one(models: Sequence[torch.nn.Module]) -> torch.nn.Module:
    if len(models) != 1:
        raise ModelError(
            f"The block engine takes one model, and got {len(models)}; give several to a method of the tensor engine, "
            f"such as method='delta'."
        )
    model = models[0]
    if isinstance(model, DistributedDataParallel):
        model = model.module  # its own forward prepares a backward, so that an extra one would leave something
    if isinstance(vars(model).get("forward"), Hook):
        raise ModelError("This model is managed by another session; close that first.")
    return model
