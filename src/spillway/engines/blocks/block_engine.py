"""The block engine: an action for every call of a block, and what each call took."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Final, Protocol, TypeAlias, TypeVar, final

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad

from spillway.budgets import parse_budget
from spillway.engines.blocks.arithmetic import compiled
from spillway.engines.blocks.block import Block, CallReport
from spillway.engines.blocks.call import BlockCall, BlockRuntime, Passing, Replay
from spillway.engines.blocks.compiled_blocks import (
    CompiledHook,
    check_compiled,
    check_still,
    hook_for,
    in_front_of,
    is_compiled,
)
from spillway.engines.blocks.compress import Compressor
from spillway.engines.blocks.containers import rebuilt
from spillway.engines.blocks.data_filter import ModuleCall, valid_calls
from spillway.engines.blocks.discovery import named
from spillway.engines.blocks.extra_forward import Seen, undone, without_locals
from spillway.engines.blocks.fingerprints import print_bytes
from spillway.engines.blocks.groups import Group, Grouped, by_sequential, first_children
from spillway.engines.blocks.hook import Hook, OwnForward
from spillway.engines.blocks.iterators import CannotCopyError
from spillway.engines.blocks.reach import Copies
from spillway.engines.environment import Environment, Generator
from spillway.errors import ModelError, UsageError
from spillway.internals.interrupts import by_signal
from spillway.internals.machine_memory import usable_memory
from spillway.internals.private import counted_storage, heard, traced, unheard_by_modes
from spillway.methods.actions import USUAL, Action, ActionOptions
from spillway.tiers.cuda_streams import CudaStreams
from spillway.tiers.disk import DiskTier
from spillway.tiers.host import HostPool
from spillway.tiers.spill_file import SpillIO
from spillway.tiers.transfer import DiskLanes, Freed, HostLanes, Store
from spillway.units import Bytes, Seconds

Unit: TypeAlias = tuple[str, int]
"""The name of a block and the number of one of its calls in a forward of the model, from 0."""
Actions: TypeAlias = Mapping[Unit, Action] | Callable[[str, int], Action]

T = TypeVar("T")

_CHECKPOINTED: Final = "torch.utils.checkpoint, which somebody put there, runs it again itself"


class Observer(Protocol):
    """Told at every seam, in the thread that runs the step. Blocks are numbered in the order in which their calls
    begin in a forward of the model, from 0."""

    def forward_begins(self) -> None:
        """The model's forward begins, under gradients."""

    def evaluation_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of the model begins without gradients, called with these."""

    def forward_is_over(self) -> None:
        """Another forward is about to begin: what the engine knows of the calls so far is forgotten after this."""

    def block_begins(self, number: int) -> Callable[[], None]:
        """A call of a block begins; its action is known already. What this returns is called when the backward asks for
        the first time for something that was saved in it."""

    def block_ended(self, number: int) -> None:
        """It ended, and what is not kept of it is gone."""


@final
class HeldCall:
    """A call that has ended, for whoever decides what becomes of its bytes, also after another forward has begun. Of a
    call that is over and done with nothing is there."""

    __slots__ = ("_call", "_lock", "report")

    def __init__(self, runtime: BlockRuntime, call: weakref.ref[BlockCall], report: CallReport) -> None:
        self._lock, self._call = runtime.lock, call
        self.report = report
        """Goes on to change."""

    def _ask(self, what: Callable[[BlockCall], T], otherwise: T) -> T:
        with self._lock:
            call = self._call()
            return what(call) if call is not None else otherwise

    def revoke(self) -> Bytes:
        return self._ask(BlockCall.revoke, 0)

    def send_input(self) -> Bytes:
        """Let what it would be recomputed on wait elsewhere, if it holds nothing else, nobody else holds that, and
        other calls have sent something there; how many bytes begin to leave. Raises SpillFullError if there was no room
        for an earlier block's bytes; they are where they were."""
        return self._ask(BlockCall.send_input, 0)

    def forget_arrivals(self) -> Bytes:
        """Give up what came back before anybody asked for it, and can come again; how many bytes that frees."""
        return self._ask(BlockCall.forget_arrivals, 0)

    def inputs_gone(self) -> dict[Any, Bytes]:
        """Bytes of what it was called with and is not in memory any more, by storage."""
        return self._ask(BlockCall.inputs_gone, {})

    def start_in(self, most: Bytes | None = None) -> Bytes:
        """Let up to so many bytes of what is away begin to come, in a backward; how many begin."""
        with self._lock:
            call = self._call()
            if call is None or call.options.waits or torch._C._current_graph_task_id() == -1:
                return 0
            before = sum(source.nbytes for source in call.waiting() if source.ahead)
            return call.start_in(None if most is None else before + most) - before

    @property
    def there(self) -> tuple[Bytes, bool]:
        """Of what was sent away, the bytes that are in memory or on their way there, and whether that is all."""
        with self._lock:
            call = self._call()
            sources = call.waiting() if call is not None else []
            here = sum(one.nbytes for one in sources if one.sent and not one.absent)
            return here, not any(one.absent for one in sources)

    @property
    def absent_bytes(self) -> Bytes:
        """Of what was sent away, the bytes that are not in memory and not on their way there."""
        return self._ask(lambda call: sum(one.nbytes for one in call.waiting() if one.absent), 0)

    def come_back(self) -> None:
        """Nothing of it waits elsewhere any more."""
        self._ask(BlockCall.come_back, None)

    @property
    def leaving_bytes(self) -> Bytes:
        """Of what was sent away, the bytes whose copies out are not done. A copy that a worker has begun holds its
        storage beyond the op that is the last to use it."""
        return self._ask(lambda call: sum(one.nbytes for one in call.waiting() if one.leaving), 0)


@dataclass(slots=True)
class _FirstForwards:
    """What `BlockEngine.rehearses` has run."""

    record: list[tuple[ModuleCall, Unit, Bytes | None]] = field(default_factory=list)
    """The first forward of the outermost block that is running, and within it both of every other, in the order in
    which they began; with what the first ones left."""
    open: list[int] = field(default_factory=list)
    """Places in the record of those that are running."""
    running: int = 0
    """How many of them are first ones."""


@final
class BlockEngine:
    """Carries out an action for each call of each block of a model, under gradients; without them blocks run plainly.

    A block may lie inside another. `close` gives the model its forwards back.

    Args:
        model: On one device. Copies of it, by `deepcopy` or pickle, are plain.
        actions: By (block, call) or as a function of both; what is not named is kept. May be set at any time, and
            counts from the next call on.
        generators: Random streams that blocks draw from, beside the global ones of Python, NumPy and torch. Those that
            are attributes of modules are found.
        spill_directory: Where offloaded bytes wait; the file is made when the first do.
        spill_io: Through the page cache or past it, as for `spillway.manage`.
        host_budget: For models on CUDA, whose offloaded bytes wait in pinned host memory: the most that is pinned, in
            bytes, as "6GiB" or as a share of the memory that this process may use.
        lossy: Allows the actions that quantize: gradients are then other than plain PyTorch's.
        options: How actions are carried out, by action. May be set at any time, and counts from the next call on.

    Raises:
        UsageError: Nothing can be compiled here, or an action is lossy and that is not allowed; the latter also by a
            forward, where `actions` is a function.
        ModelError: No blocks, a name that is none, the model's own checkpointing is on, or it is compiled.
    """

    rehearses = False
    """Whether every block runs once more before it runs, is measured and forgotten: the published collector."""
    forwards = 0
    """How many have begun that blocks were told of."""
    most_copied: Bytes | None = None
    """The largest storage that may be copied for a second run. Calls that would copy more run as if nobody watched."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        *,
        actions: Actions | None = None,
        generators: Iterable[Generator] = (),
        spill_directory: str | PathLike[str] | None = None,
        spill_io: SpillIO = "buffered",
        host_budget: Bytes | str = "50%",
        lossy: bool = False,
        options: Mapping[Action, ActionOptions] = USUAL,
    ) -> None:
        check_runs_once(model)
        chosen = named(model, blocks)
        groups = {name: block for name, block in chosen.items() if isinstance(block, Group)}
        self._modules = {name: block.module if isinstance(block, Group) else block for name, block in chosen.items()}
        self.model, self._lossy = model, lossy
        self.blocks = tuple(chosen)
        self.actions = actions if actions is not None else {}
        check_compiled(model, self._modules | dict(first_children(model, groups.values())))
        self.when_freed: list[Freed] = []
        """Told of every storage that a thread of the engine's frees, by that thread."""
        where = partial(_open_store, _device_of(model), spill_directory, spill_io)
        open_store = partial(where, parse_budget(host_budget, usable_memory()), self.when_freed)
        self._runtime = BlockRuntime(environment_of(model, generators), open_store, Compressor())
        self.options = options
        self._reports: list[CallReport] = []
        self._beginning: tuple[Block, CallReport]
        self._calls: dict[Unit, weakref.ref[BlockCall]] = {}
        self.closed = False
        self.bypassed = False
        """Whether blocks run as if nobody watched, for forwards that are known to fit: no call added per op, nothing is
        counted and nothing can be revoked."""
        self._first = _FirstForwards()
        self.observer: Observer | None = None
        self.called: tuple[Any, dict[str, Any]] | None = None
        """What the model's forward was called with last, tensors without their bytes, where somebody observes."""
        self._hooks: list[Hook | CompiledHook] = []
        self._blocks: dict[str, Block] = {}
        self._copies = Copies()
        self._returned_to: set[tuple[type, str]] = set()
        self._fronts: dict[str, Hook | CompiledHook] = {}
        self._grouped: dict[nn.Module, Grouped] = {}
        try:
            self._take_over(groups)
            self._found = [self._blocks[name] for name in self.blocks]
            self._own = OwnForward(model)
            self._install(model, self._forward)
        except BaseException:
            self._remove_hooks()
            raise

    def __enter__(self) -> BlockEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def actions(self) -> Actions:
        """By (block, call), or as a function of both. Raises, when set, ModelError if one of them is for a block that
        is not there, and UsageError if one is lossy and that is not allowed."""
        return self._actions

    @actions.setter
    def actions(self, actions: Actions) -> None:
        unknown = [] if callable(actions) else [block for block, _ in actions if block not in self.blocks]
        if unknown:
            raise ModelError(
                f"There is an action for {unknown[0]!r}, which is none of the {len(self.blocks)} blocks: "
                f"`BlockEngine.blocks` names them, the first is {self.blocks[0]!r}."
            )
        for action in () if callable(actions) else actions.values():
            self._check_lossy(action)
        self._actions = actions

    @property
    def options(self) -> Mapping[Action, ActionOptions]:
        """How actions are carried out. Raises UsageError, when set, if something is to be compiled and nothing can be
        compiled here."""
        return self._options

    @options.setter
    def options(self, options: Mapping[Action, ActionOptions]) -> None:
        if any(one.compiled for one in options.values()):
            compiled(_device_of(self.model))
        self._options = {**USUAL, **options}

    @property
    def calls(self) -> list[CallReport]:
        """What each call took since the model's forward last began, in the order in which the calls began."""
        return [replace(report) for report in self._reports]

    @property
    def read_ahead(self) -> Bytes | None:
        """Bytes that a backward may have read before it wants them; None for those of one block."""
        return self._runtime.ahead

    @read_ahead.setter
    def read_ahead(self, nbytes: Bytes | None) -> None:
        self._runtime.ahead = nbytes

    @property
    def write_behind(self) -> Bytes | None:
        """Bytes that may still be on their way out when a block has ended; None for those of one block."""
        return self._runtime.behind

    @write_behind.setter
    def write_behind(self, nbytes: Bytes | None) -> None:
        self._runtime.behind = nbytes

    @property
    def spill_full(self) -> bool:
        """Whether there was no room for what was to leave, so that it stayed, and nothing leaves any more."""
        return self._runtime.store is not None and self._runtime.store.full

    def when_spill_is_full(self, asked: Callable[[], bool]) -> None:
        """Have it asked where there is no room, whether what was to leave may stay; else SpillFullError is raised."""
        self._runtime.when_full = asked

    @property
    def leaving_bytes(self) -> Bytes:
        """Bytes of offloaded storages that are still resident, since their copies out are not done."""
        return self._runtime.store.leaving_bytes if self._runtime.store is not None else 0

    @property
    def arrived_bytes(self) -> Bytes:
        """Bytes that are here, or coming, before the backward has asked for them."""
        return self._runtime.store.arrived_bytes if self._runtime.store is not None else 0

    @property
    def transfers(self) -> tuple[int, Bytes, Bytes, Seconds, Seconds]:
        """So far: storages sent away, their bytes, bytes that came back, and seconds for which ops waited: for room,
        until something was out, and for data, until something was in."""
        store = self._runtime.store
        if store is None:
            return 0, 0, 0, 0.0, 0.0
        return store.sent, store.bytes_out, store.bytes_in, store.room_seconds, store.data_seconds

    def send_to(self, store: Store) -> None:
        """What is to wait elsewhere waits there, in an engine that has sent nothing yet."""
        self._runtime.store = store

    def wait_out(self, nbytes: Bytes) -> None:
        """Wait until so many of the bytes that are leaving have left, or all. Raises SpillFullError if there was no
        room for them."""
        if self._runtime.store is not None:
            self._runtime.store.finish_out(max(self.leaving_bytes - nbytes, 0))

    def lane_rates(self) -> tuple[float, float]:
        """Bytes a second at which this step's copies went out and came in, while they ran; 0 where there were none."""
        return (0.0, 0.0) if self._runtime.store is None else self._runtime.store.rates()

    def settle(self) -> None:
        """Wait until what is offloaded has left. Raises SpillFullError if there was no room for it; it is where it
        was."""
        if self._runtime.store is not None:
            self._runtime.store.settle()

    @property
    def gathered(self) -> nn.Module | None:
        """A part of a block that `fully_shard` gathers by itself, if there is one: see `Block.gathers`."""
        return next((part for block in self._found for part in block.gathers), None)

    @property
    def reports(self) -> Sequence[CallReport]:
        """What `calls` copies: it goes on to change as long as the calls are run again."""
        return self._reports

    @property
    def running(self) -> bool:
        """Whether a block runs now, for the first time or again."""
        return self._runtime.replay is not None or self._runtime.call is not None

    @property
    def begun(self) -> int:
        """How many calls have begun since the model's forward last began."""
        return len(self._reports)

    def beside_share(self, unknown: float) -> float:
        """Of the call that begins, per byte that autograd saves in it: what a selective action keeps beside that. By
        what calls of such blocks kept; until there was one it is unknown."""
        return self._runtime.beside.get(type(self._beginning[0].module), unknown)

    def keep_nothing(self) -> None:
        """Of the call that begins: it is recomputed, whatever its action was to be."""
        self._beginning[1].action = Action.RECOMPUTE

    def module(self, number: int) -> nn.Module:
        """Whose call it was, by its number."""
        return self._modules[self._reports[number].block]

    def call(self, number: int) -> HeldCall:
        report = self._reports[number]
        return HeldCall(self._runtime, self._calls[report.block, report.call], report)

    @unheard_by_modes
    def revoke(self, block: str, call: int = 0) -> Bytes:
        """Give up what autograd saved in a call, to have it recomputed; how many bytes that freed.

        At any moment after the call has ended, in the forward or the backward. 0 if the call is over and done with, has
        nothing left, or cannot run again; `CallReport.kept_because` then says why.
        """
        held = self._calls.get((block, call), lambda: None)()
        if held is None:
            return 0
        with self._runtime.lock:
            return held.revoke()

    def hear_streams(self, heard: Callable[[list[Any]], None]) -> None:
        """Have it told of the states of random streams that blocks keep for their second run."""
        self._runtime.environment.heard = heard

    @property
    def print_bytes(self) -> Bytes:
        """Of the fingerprints of parameters that there are while a block runs, at most; with the parts that the largest
        is put together of."""
        prints = [[print_bytes(one.nbytes) for one in block.module.parameters()] for block in self._found]
        return max((sum(one) + max(one) for one in prints if one), default=0)

    def learn_from(self, other: BlockEngine) -> None:
        """Take over what calls of the same blocks, of a model of the same modules, have taught another engine."""
        for mine, theirs in zip(self._found, other._found, strict=True):
            mine.learn_from(theirs)

    @unheard_by_modes
    def close(self) -> None:
        """Give the model its own forwards back. Graphs that are still there can be run backward."""
        self.closed = True  # blocks run plainly; what follows may be done again, where it was interrupted
        self._remove_hooks()
        self._runtime.removed = tuple(self._hooks)
        self._runtime.close()

    def _remove_hooks(self) -> None:
        for hook in reversed(self._hooks):
            hook.remove()

    def _install(self, module: nn.Module, instead: Callable[..., Any]) -> Hook | CompiledHook:
        hook = hook_for(module, instead, self)
        self._hooks.append(hook)
        hook.install()
        return hook

    def _take_over(self, groups: Mapping[str, Group]) -> None:
        """Stand in front of every block; of a `Sequential` whose children run as blocks, behind what makes it one."""
        for sequential, own in by_sequential(groups):
            for name, group in own.items():
                self._blocks[name] = Block(
                    name, group.module, OwnForward(group.module), self._copies, self._returned_to
                )
            calls = {group: partial(self._call, self._blocks[name]) for name, group in own.items()}
            self._grouped[sequential] = Grouped(sequential, calls)
            self._fronts |= dict.fromkeys(own, self._install(sequential, self._grouped[sequential]))
        for name, module in self._modules.items():
            if name not in groups:
                block = Block(name, module, in_front_of(module), self._copies, self._returned_to)
                self._blocks[name] = block
                self._fronts[name] = self._install(module, partial(self._call, block))

    def goes_on(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of the model, for whoever calls what is behind all that stands in front of it: with groups of its
        own children as blocks, where it has some."""
        return self._grouped.get(self.model, forward)

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of the model begins, for whoever stands in front of the model and calls what is behind. One that
        somebody traces is none."""
        runtime = self._runtime
        runs = runtime.replay is None and runtime.call is None and not traced()
        watched = torch.is_grad_enabled() and runs
        if watched:  # else calls of blocks run plainly, and a graph that is there goes on to be told of
            if self.observer is not None:
                self.observer.forward_is_over()
            for block in self._found:
                if not self.closed:
                    check_still(self._fronts[block.name], block.name)
                block.calls = 0
            if self._runtime.homes.notes:
                self._know_what_is_written()
            self._runtime.homes.open = True
            self._reports, self._calls = [], {}
            self._first = _FirstForwards()
            if runtime.store is not None:
                runtime.store.begin_step()
            self.forwards += 1
            if self.observer is not None:
                self.called = without_bytes(args, kwargs)
                self.observer.forward_begins()
        elif self.observer is not None and not torch.is_grad_enabled() and runs:
            self.observer.evaluation_begins(args, kwargs)
        if self.closed:  # in the middle of an extra forward, which puts the modules back with the hooks they had
            self._remove_hooks()

    @unheard_by_modes
    def _know_what_is_written(self) -> None:
        """Of the forward before, which may be given up yet: aliases of what nobody asks for are forgotten."""
        for call in [held() for held in self._calls.values()]:
            if call is not None:
                call.locate(ended=False)
        self._runtime.homes.begin()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self.begin_forward(args, kwargs)
        own = self._own
        return (own.bound if type(self.model).forward is own.declared else own.now())(*args, **kwargs)

    def _call(self, block: Block, *args: Any, **kwargs: Any) -> Any:
        runtime = self._runtime
        replay = runtime.replay
        # Bypassed in the middle of a block around this one, it is so from the next block on.
        off = replay is None and (self.closed or (self.bypassed and runtime.call is None))
        if off or not torch.is_grad_enabled() or hooks_are_off() or isinstance(replay, Passing):
            own = block.own
            return (own.bound if type(block.module).forward is own.declared else own.now())(*args, **kwargs)
        if runtime.is_checkpointed() or block.checkpoints_itself():
            if replay is None and torch._C._current_graph_task_id() == -1:
                # A call that is only counted.
                self._reports.append(self._begun(block))
                self._reports[-1].kept_because = _CHECKPOINTED
            return block.forward()(*args, **kwargs)
        most = self.most_copied if replay is None and runtime.call is None else None
        if most is not None and _largest(block, args, kwargs) > most:
            return block.forward()(*args, **kwargs)
        return self._watched_call(block, replay, args, kwargs)

    @unheard_by_modes
    def _watched_call(self, block: Block, replay: Replay | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if replay is not None:
            return replay.call(block, args, kwargs)
        if self._first.running:
            return self._call_in_rehearsal(block, args, kwargs)
        self._runtime.homes.goes_on()
        report = self._begun(block)
        # Within a counted call what was saved twice would count twice; there the data filter takes nothing anyway.
        rehearses = self.rehearses and self._runtime.call is None and not block.may_communicate()
        interruption = self._rehearse(block, (report.block, report.call), args, kwargs) if rehearses else None
        observer, number = self.observer, len(self._reports)
        self._beginning = block, report
        reached = observer.block_begins(number) if observer is not None else None
        call = BlockCall(self._runtime, block, report, self._runtime.call, self._options[report.action])
        self._reports.append(report)
        self._calls[report.block, report.call] = weakref.ref(call)
        call.when_reached = reached
        output = call.run(args, kwargs)
        if rehearses:
            self._settle()
        if observer is not None:
            observer.block_ended(number)
        if interruption is not None:
            try:
                raise interruption
            finally:
                del interruption  # which holds this frame
        return output

    def _rehearse(
        self, block: Block, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BaseException | None:
        """The first of the two forwards of Mimose's shuttling collector (section 4.2): what it left is noted, without
        its result, and all is as it was. A call whose arguments cannot be copied has but one, and one that fails does
        so again where it counts.

        Returns what is no failure and is to be raised at the latest when the other one has ended.
        """
        seen = Seen()
        around = undone(self._runtime.environment, (block.module,), args, kwargs, seen)
        self._first.running += 1
        try:
            with self._entered(unit, checkpointed=False) as place:
                with around as (given, named):
                    output = heard(block.forward(), *given, **named)
                    left = seen.left(output)
                    del output
                self._first.record[place] = *self._first.record[place][:2], left
        except BaseException as error:
            if by_signal(error):
                raise
            return None if isinstance(error, Exception) else without_locals(error)
        finally:
            self._first.running -= 1
            if self.closed:
                self._remove_hooks()
        return None

    def _call_in_rehearsal(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Of a block within a first forward: it has both of its own there, and nothing is to be had of the second."""
        before = sum(
            one.name == block.name and one.checkpointed for one, _, _ in self._first.record[self._first.open[0] :]
        )
        unit = block.name, block.calls + before
        interruption = self._rehearse(block, unit, args, kwargs)
        with self._entered(unit, checkpointed=True):
            output = self._runtime.pass_through(args, kwargs, block, holds=False)
        if interruption is not None:
            raise interruption
        return output

    @contextmanager
    def _entered(self, unit: Unit, *, checkpointed: bool) -> Iterator[int]:
        """Around a forward of a block, with its place in the record."""
        inside = self._first.open[-1] if self._first.open else None
        place = len(self._first.record)
        self._first.record.append((ModuleCall(name=unit[0], inside=inside, checkpointed=checkpointed), unit, None))
        self._first.open.append(place)
        try:
            yield place
        finally:
            del self._first.open[self._first.open.index(place) :]

    def _settle(self) -> None:
        """When a block has ended that lies in no other: what the data filter leaves of the record is measured."""
        measured: dict[Unit, Bytes] = {}
        for (_, unit, left), valid in zip(
            self._first.record, valid_calls([one for one, _, _ in self._first.record]), strict=True
        ):
            if left is not None:
                measured[unit] = max(left if valid else 0, measured.get(unit, 0))
        for report in self._reports:
            report.rehearsed_bytes = measured.get((report.block, report.call), report.rehearsed_bytes)
        self._first.record = []

    def _begun(self, block: Block) -> CallReport:
        call, block.calls = block.calls, block.calls + 1
        if callable(self.actions):
            action = self.actions(block.name, call)
            self._check_lossy(action)
        else:
            action = self.actions.get((block.name, call), Action.KEEP)
        return CallReport(block=block.name, call=call, action=action)

    def _check_lossy(self, action: Action) -> None:
        if action.lossy and not self._lossy:
            raise UsageError(
                f"Action.{action.name} quantizes what the backward reads, so that gradients are other than plain "
                f"PyTorch's; allow that with lossy=True, or choose another action."
            )


def _open_store(
    device: torch.device,
    directory: str | PathLike[str] | None,
    io: SpillIO,
    pinned: Bytes,
    when_freed: Sequence[Freed],
) -> Store:
    if device.type == "cuda":
        streams = CudaStreams(device)
        return Store(HostLanes(streams, HostPool(streams.pin, pinned)))
    return Store(DiskLanes(DiskTier(directory, io), when_freed))


@unheard_by_modes
def _largest(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bytes:
    """Storage that a call may write to: of an argument, a buffer or an attribute. It is looked for in lists, tuples and
    dicts, and nothing is copied or run for that."""
    largest, seen, waiting = 0, set[int](), [args, kwargs, *map(vars, block.module.modules())]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, torch.Tensor):
            if not isinstance(thing, nn.Parameter) and torch._C._has_storage(thing):
                largest = max(largest, counted_storage(thing).nbytes())
        elif isinstance(thing, dict | list | tuple) and id(thing) not in seen:
            seen.add(id(thing))
            waiting += dict.values(thing) if isinstance(thing, dict) else thing
    return largest


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def environment_of(model: nn.Module, generators: Iterable[Generator] = ()) -> Environment:
    """What a forward of this model reads: the random streams of its devices and modules, and those that are named."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return Environment(devices, [*generators, *_generators_of(model)])


@unheard_by_modes
def without_bytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """What a forward is called with, tensors without their content; None where that cannot be told."""
    try:
        called: tuple[Any, dict[str, Any]] = rebuilt((args, kwargs), lambda tensor: tensor.detach().to("meta"))
    except (CannotCopyError, RuntimeError):  # or tensors without strides
        return None
    return called


def hooks_are_off() -> bool:
    """Whether nothing is saved for a later backward here that a second run could bring back: traced by a compiler or a
    mode, under a functional transform, or with tangents, which no saved tensor shows."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
        or forward_ad._current_level >= 0
        or traced()
    )


def _generators_of(model: nn.Module) -> list[Generator]:
    """Random streams that modules hold as attributes."""
    found: dict[int, Generator] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
                found[id(value)] = value
    return list(found.values())


def check_runs_once(model: nn.Module) -> None:
    """Raises ModelError for a model that checkpoints its layers itself, or is compiled as a whole."""
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            raise ModelError(
                f"{name or type(model).__name__} checkpoints its layers itself, so that they would run three times; "
                f"switch that off first: in transformers by model.activation_checkpointing_disable(), which older "
                f"versions call gradient_checkpointing_disable(), and by Trainer's own gradient_checkpointing=False."
            )
    if is_compiled(model):
        raise ModelError(
            "The model is compiled as a whole, and so passes its blocks by; compile the blocks instead "
            "(block.compile()) before they are managed, or do not compile it."
        )
