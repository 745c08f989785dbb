"""One call of a block, and everything it takes to run it again.

NOTE [Calls]. While a block runs, every tensor that autograd saves inside it is packed into a `SavedTensor`. When the
block has ended its call can let the bytes of all of them go, then or at any later moment, and bring them back by
running the block again. So "recompute" is "keep", revoked at the end of the block, and what a call learns while the
block runs decides whether that is allowed:

 1. Nothing is dropped while the block runs. Autograd may save a tensor before it is filled (`rrelu`), and only the end
    shows what the block wrote to. The peak does not rise by that: the second run needs the same room.
 2. A block runs again with the arguments, buffers, attributes, random streams and settings that it was called with.
    What it is known to write to was copied first; what nobody knows yet is copied in the first call that recomputes.
 3. If something was written to that was not copied, a kept block stays kept, and a recomputed one raises
    `RecomputeError`: never silently a second run on other numbers.
 4. Calls hold no graph: arguments are held detached. A graph holds saved tensors, those hold calls; a call that held
    its graph would never be freed.
 5. A write to a saved tensor is found by its version counter, which a tensor without bytes shares with it.
 6. A block inside a block is a call of its own, called a child. A call that drops what it holds drops what its
    children hold, arguments included, and its second run hands each of its children their part: their values, or, if
    they recompute by themselves, their arguments.
 7. What was brought back dies with the node that it was for. Where the graph is retained it dies when it has been
    handed out, and what was not wanted at the end of that backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias, cast, final

import torch
import torch.utils.checkpoint
from torch import Tensor

from spillway.engines.blocks.block import Block, CallReport, collectives_begun
from spillway.engines.blocks.compiled_blocks import CompiledHook
from spillway.engines.blocks.compress import Compressor
from spillway.engines.blocks.containers import freeze, tensors, thaw
from spillway.engines.blocks.fingerprints import first_changed, remember_some
from spillway.engines.blocks.functorch_hooks import Packing, outside_of_transforms, under_transforms
from spillway.engines.blocks.homes import COMPRESSED, Homes
from spillway.engines.blocks.hook import Hook
from spillway.engines.blocks.iterators import CannotCopyError
from spillway.engines.blocks.quiet import quiet
from spillway.engines.blocks.reach import unhung
from spillway.engines.blocks.saved import (
    FrozenTensor,
    SavedRef,
    SavedTensor,
    Spilled,
    bring_saved_for,
    come_back,
    compress_frozen,
    compress_saved,
    detached,
    held_alone,
    is_sizeless,
    locate,
    may_leave,
    send_frozen,
    send_saved,
    start_in,
    storages,
    waiting,
)  # fmt: skip
from spillway.engines.blocks.selective import Keeping, Selection, Supplying
from spillway.engines.environment import Environment
from spillway.errors import EngineError, RecomputeError
from spillway.internals.locks import renew_in_children
from spillway.internals.private import grad_mode, heard, unheard_by_modes
from spillway.internals.private import storage_address as address
from spillway.methods.actions import Action, ActionOptions
from spillway.tiers.transfer import Store
from spillway.units import Bytes

Hooks: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]


@final
class BlockRuntime:
    """Knows, for every thread, which call is running and which is running again. The environment is read at the
    beginning of each call; the spill file is opened when something is to wait there for the first time."""

    def __init__(self, environment: Environment, open_store: Callable[[], Store], compressor: Compressor) -> None:
        self.environment = environment
        self.compressor = compressor
        self.homes = Homes()
        self.lock = threading.RLock()
        """One second run at a time: it changes random streams and modules for a while."""
        renew_in_children(self, "lock")
        self.removed: tuple[Hook | CompiledHook, ...] = ()
        """Hooks of an engine that was closed."""
        self.ahead: Bytes | None = None
        """Bytes that may be read before the backward asks for them; None for those of one block."""
        self.behind: Bytes | None = None
        """Bytes that may still be leaving when a block has ended; None for those of one block."""
        self.store: Store | None = None
        self.when_full: Callable[[], bool] = lambda: False
        """See `Store.when_full`."""
        self.sent = 0
        """How many calls have sent something away."""
        self.beside: dict[type, float] = {}
        """By the class of a block, the most that a selective action kept and autograd did not save, per byte saved."""
        self._open_store = open_store
        self._away: weakref.WeakValueDictionary[int, BlockCall] = weakref.WeakValueDictionary()
        self._local = _Local()

    @property
    def replay(self) -> Replay | Passing | None:
        """The second run that this thread is in."""
        return self._local.replays[-1] if self._local.replays else None

    @property
    def call(self) -> BlockCall | None:
        """The call of a block that this thread is in."""
        return self._local.calls[-1] if self._local.calls else None

    @contextlib.contextmanager
    def inside(self, call: BlockCall) -> Iterator[None]:
        """The first run of a call."""
        self._local.calls.append(call)
        try:
            yield
        finally:
            self._local.calls.pop()

    @contextlib.contextmanager
    def replaying(self, replay: Replay | Passing) -> Iterator[None]:
        """A second run."""
        self._local.replays.append(replay)
        try:
            yield
        finally:
            self._local.replays.pop()

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """What an engine that was closed has removed is there again: a second run finds blocks inside by it."""
        with contextlib.ExitStack() as stack:
            for hook in self.removed:
                stack.enter_context(hook.back())
            yield

    def pass_through(self, args: tuple[Any, ...], kwargs: dict[str, Any], block: Block, *, holds: bool) -> Any:
        """Call a block from which nothing is wanted any more."""
        passing = Passing(holds=holds)
        with self.replaying(passing), Packing(passing.fill, lambda value: value):
            return heard(block.forward(), *args, **kwargs)

    def hooks_around(self) -> Hooks | None:
        """Hooks for saved tensors that somebody else has put around the block."""
        top: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
        around = getattr(top[0], "__self__", None) if top is not None else None
        return around.outer if isinstance(around, BlockCall) else top

    def is_checkpointed(self) -> bool:
        """Whether `torch.utils.checkpoint` stands around what runs now: it holds nothing of it, and runs it again."""
        top: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is not None and getattr(top[0], "__module__", "") == torch.utils.checkpoint.__name__

    @contextlib.contextmanager
    def sending(self, call: BlockCall) -> Iterator[Store]:
        """Where something of this call is going to wait; it is sent inside."""
        if self.store is None:
            self.store = self._open_store()
            self.store.when_full = self.when_full
        self._away[self.sent] = call
        self.sent += 1
        self.store.write_behind = self.behind
        self.store.begin_block()
        before = self.store.bytes_out
        yield self.store
        call.report.moved_bytes += self.store.bytes_out - before
        self.store.end_block()
        if call.options.waits:
            self.store.finish_out()

    def read_ahead(self, call: BlockCall) -> None:
        """A backward has come to this call: let come what it will want next, which is what was sent before."""
        if self.store is None or self.ahead == 0 or torch._C._current_graph_task_id() == -1:
            return
        left = self.ahead
        earlier = (number for number in list(self._away.keys()) if number < call.sent)
        for number in sorted(earlier, reverse=True):
            other = self._away.get(number)
            if other is None or other.options.waits or not other.waiting():
                continue
            if left is None:
                other.start_in(None)
                return
            left -= other.start_in(left)
            if any(source.absent for source in other.waiting()):
                return  # there is no room for more

    def close(self) -> None:
        """Bring back what waits in the spill file, and give that back."""
        self.homes.close()
        if self.store is None:
            return
        try:
            for call in list(self._away.values()):
                call.come_back()
        finally:
            self.store.close()
            self.store = None


class _Local(threading.local):
    def __init__(self) -> None:
        self.calls: list[BlockCall] = []
        self.replays: list[Replay | Passing] = []


_SETTLE: Final = 3
"""An op that fills a tensor after autograd saved it may save so many more before it does."""


@final
class BlockCall:
    """One call of a block under gradients."""

    def __init__(
        self, runtime: BlockRuntime, block: Block, report: CallReport, parent: BlockCall | None, options: ActionOptions
    ) -> None:
        self.runtime = runtime
        self.block = block
        self.report = report
        self.number = report.call
        self.action = report.action
        self.options = options
        self.parent = parent
        self.children: list[weakref.ref[BlockCall]] = []
        self.child_blocks: list[Block] = []
        self.saved: list[SavedRef] = []
        self.frozen: Any = None
        """Arguments for another run: a pair of positional and named ones. None if the parent has to bring them."""
        self.armed = False
        """The parent's second run brought the arguments."""
        self.outer = runtime.hooks_around()
        """Hooks of the user's for saved tensors, around the block."""
        self.sent = 0
        """How many calls had sent something away when this one ended."""
        self.selection: Selection | None = None
        """Results that the next run is given."""
        self.ended = False
        self.when_reached: Callable[[], None] | None = None
        """Called once, when the backward asks for the first time for something that was saved here."""
        self.differentiates = False
        """A backward ran inside the block, so that its second run has to hold what it saves."""
        self.stops_early = False
        self.calm = False
        """All runs that this one is part of have ended, and its first saved tensor was asked for."""
        self.running_again = False
        """A second run is filling what was saved; what it has brought back is not given up before somebody took it."""
        kept = block.kept.get(self.number, 0) > 1 and self.number not in block.judged
        self._is_uncopied = self.action.recomputes and kept
        """It is expected not to run again, so that nothing is copied of which nobody knows whether it is written to."""
        self._found: list[FrozenTensor] = []
        """The tensors among the arguments."""
        self._outputs: set[int] = set()
        self._last_needs_grad = False
        self._unsettled = -_SETTLE - 1
        self._cleared_by = -1
        """The backward at whose end this is cleared."""
        self._before_child = -1
        """How many tensors had been saved when the last child began."""
        if parent is not None:
            parent._before_child = len(parent.saved)
            parent.children.append(weakref.ref(self))
            parent.child_blocks.append(block)

    @property
    def name(self) -> str:
        return f"call {self.number} of {self.block.name}"

    # ------------------------------------------------------------------------------------------------ the first run

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the block for the first time."""
        self._notes = self.runtime.homes.notes
        self.environment = self.runtime.environment.capture()
        self._forward = self.block.forward()
        self.snapshot = self.block.state.snapshot()
        try:
            self._freeze(args, kwargs, copied=self._to_copy)
        except CannotCopyError as error:
            self.report.kept_because = str(error)
        if self.block.scripted:
            self.report.kept_because = "a part of it is TorchScript, which may take other kernels when it runs again"
        began = time.perf_counter()
        if self.action.selects and not self.block.compiled and not self._above_recomputes():
            self.selection = Selection(self.number, self.block.overwritten, self.runtime.homes)
        mode = Keeping(self.selection) if self.selection is not None else contextlib.nullcontext()
        begun = collectives_begun()
        with Packing(self._pack, _unpack), self.runtime.inside(self), mode:
            output = heard(self._forward, *args, **kwargs)
        if isinstance(mode, Keeping) and mode.left:
            self.selection = None
        self.block.has_begun(collectives_begun() - begun)
        self.report.seconds = time.perf_counter() - began
        self._end(output)
        return output

    def _freeze(self, args: Any, kwargs: Any, copied: Callable[[int, Tensor], bool]) -> None:
        found: list[FrozenTensor] = []
        copies: dict[int, torch.UntypedStorage] = {}
        homes = self.runtime.homes

        def make(tensor: Tensor) -> FrozenTensor:
            found.append(FrozenTensor(tensor, copies if copied(len(found), tensor) else None, homes))
            return found[-1]

        self.frozen, self._found = freeze((args, kwargs), make), found

    def _to_copy(self, number: int, tensor: Tensor) -> bool:
        """Rule 2: an argument is copied if the block, or who comes after it, may write to it."""
        unknown = self.action.recomputes and self.number not in self.block.judged and not self._is_uncopied
        return (unknown and not isinstance(tensor, torch.nn.Parameter)) or self._is_written(number, tensor)

    def _is_written(self, number: int, _: Tensor) -> bool:
        return (self.number, number) in self.block.written

    @unheard_by_modes
    def _pack(self, tensor: Tensor) -> SavedTensor:
        needs_grad, value = tensor.requires_grad, tensor
        pinned = needs_grad and tensor.is_leaf
        if self.outer is not None:
            value = heard(self.outer[0], tensor)
        elif needs_grad and not pinned:
            value = tensor.detach()
        if is_sizeless(tensor):
            self._keep("it has nested tensors inside whose layout is strided")
        if tensor.layout in COMPRESSED:
            self._keep("it saves sparse tensors in a compressed layout")
        if not needs_grad and tensor._version == 0:
            self._unsettled = len(self.saved)
        saved = SavedTensor(self, tensor, value, pinned, self.outer is None)
        self._last_needs_grad = needs_grad
        self.saved.append(weakref.ref(saved))
        return saved

    def _keep(self, because: str) -> None:
        """Neither this call nor one around it can run again."""
        call: BlockCall | None = self
        while call is not None:
            call.report.kept_because, call = because, call.parent

    def _end(self, output: Any) -> None:
        self.ended, self.sent = True, self.runtime.sent
        fixed = self.block.state.fixed()
        for number, frozen in enumerate(self.arguments()):
            if frozen.moved_on:
                self.block.written.add((self.number, number))
                frozen.written = True
                if not frozen.copied:
                    self.report.kept_because = "it writes to an argument, which was not copied before"
        self.report.kept_because = self.block.state.learn(self.snapshot) or self.report.kept_because
        if self._is_uncopied and not self.report.kept_because:
            self.report.kept_because = "it could not run again the last time, so that nothing was copied"
            del self.block.kept[self.number]
        last = len(self.saved) - 1
        settled = last - self._unsettled > _SETTLE and self._before_child <= last
        # What is written unseen after the last tensor was saved is to be written again.
        self.stops_early = self._last_needs_grad and settled and self.runtime.homes.notes == self._notes
        self._measure(output, fixed)
        self.runtime.homes.settle()
        if self.runtime.homes.notes or self.action is Action.OFFLOAD or self.action.compresses:
            self.locate(ended=True)
        if self.block.communicates:  # and what it saved may be under way
            self.report.kept_because, self.selection = "it communicates with other processes", None
        if self.action.recomputes:
            selection, self.selection = self.selection, None
            if self.report.kept_because:
                self._forget_copies()
            else:
                self.block.kept.pop(self.number, None)
                self._give_up()
                self._keep_for_later(selection, fixed)
        elif self.block.communicates or self._above_recomputes() or self.outer is not None:
            return  # it is about to be given up, or what the user's hooks have made of it
        elif self.action is Action.OFFLOAD:
            with self.runtime.sending(self) as store:
                send_saved(self._living(), self._shared_with_others(), store)
        elif self.action.compresses:
            self._compress()

    def _compress(self) -> None:
        """Arguments as well: what held them for a second run would hold them in full."""
        sending = self.runtime.sending(self) if self.action.moves else contextlib.nullcontext()
        with sending as store:
            self.report.packed_bytes = compress_saved(self._living(), self.runtime.compressor, self.options, store)
        if any(saved.spilled is not None for saved in self._living()):
            self._drop_arguments()
            self.report.kept_because = self.report.kept_because or "what it was called with is held compressed"

    def _forget_copies(self) -> None:
        """Of what it was called with: nobody will call with them."""
        copied = [frozen for frozen in self.arguments() if frozen.copied]
        if copied:
            self.block.kept[self.number] = self.block.kept.get(self.number, 0) + 1
        for frozen in copied:
            frozen.let_go()

    def _drop_arguments(self) -> None:
        self.frozen, self._found = None, []

    def _keep_for_later(self, selection: Selection | None, fixed: set[int]) -> None:
        """What the second run will be given."""
        self.selection = selection
        if selection is not None:
            selection.settle()
            self.report.kept_bytes = selection.nbytes(self._shared_with_others())
        if self.action is Action.RECOMPUTE_OFFLOADED:
            with self.runtime.sending(self) as store:
                send_frozen([one for one in self.arguments() if one.needs_grad], fixed, store)
        elif self.action is Action.RECOMPUTE_COMPRESSED and not self._above_recomputes():
            arguments = [one for one in self.arguments() if one.needs_grad]
            self.report.packed_bytes = compress_frozen(arguments, fixed, self.runtime.compressor, self.options)
        elif self.action is Action.SELECTIVE_OFFLOADED and selection is not None:
            with self.runtime.sending(self) as store:
                send_frozen(selection.kept, self._shared_with_others(), store)

    def _measure(self, output: Any, fixed: set[int]) -> None:
        arguments = {one.key: one.nbytes for one in self.arguments() if one.key is not None and one.key not in fixed}
        try:
            self._outputs = {address(tensor) for tensor in tensors(output)}
        except CannotCopyError:
            self._outputs = set()
        living = self._living()
        for saved in living:
            saved.pinned = saved.pinned or saved.address() in fixed
        alive = storages(living)
        self.report.saved_bytes = sum(alive.values())
        differentiable = {one.key for one in self.arguments() if one.needs_grad}
        self.report.inputs = tuple((key, nbytes) for key, nbytes in arguments.items() if key in differentiable)
        if self.selection is not None:
            self.report.beside_bytes = self.selection.nbytes(self._shared_with_others() | alive.keys())
        own = {key: nbytes for key, nbytes in alive.items() if key not in self._outputs | arguments.keys()}
        self.report.own_bytes = sum(own.values())
        leave = {saved.address() for saved in living if may_leave(saved.value)}
        self.report.leaving_bytes = sum(nbytes for key, nbytes in own.items() if key in leave)
        results = self._outputs - arguments.keys()
        self.report.result_bytes = sum(nbytes for key, nbytes in alive.items() if key in results)
        if self.selection is not None and self.report.own_bytes:
            shares, kind = self.runtime.beside, type(self.block.module)
            shares[kind] = max(shares.get(kind, 0.0), self.report.beside_bytes / self.report.own_bytes)

    # --------------------------------------------------------------------------------------------------- giving up

    def revoke(self) -> Bytes:
        """Let go of all that autograd saved inside, if the block can run again; how many bytes that frees.

        Not counted are those of arguments and results, which somebody else holds, and what is held for who may write
        there unseen.
        """
        if not self.ended or self.block.gathers or self._is_wanted() or not self._holds() or not self._may_go():
            return 0
        shared = self._shared_with_others()
        freed = {key: nbytes for call in self._family() for key, nbytes in storages(call._living()).items()}
        beside = self.selection.nbytes(shared) if self.selection is not None else 0
        self._let_go()
        shared |= self.runtime.homes.held()
        return beside + sum(nbytes for key, nbytes in freed.items() if key not in shared)

    def send_input(self) -> Bytes:
        """As `HeldCall.send_input` says."""
        store = self.runtime.store
        if store is None or not self.ended or self.options.waits or self.report.kept_because:
            return 0
        if self._is_wanted() or self._holds():
            return 0
        fixed = self.block.state.fixed()
        going = [one for one in self.arguments() if one.needs_grad and (one.copied or not one.moved_on)]
        going = [one for one in held_alone(going) if address(cast(Tensor, one.alias)) not in fixed]
        before = self.report.moved_bytes
        if going:
            with self.runtime.sending(self) as store:
                send_frozen(going, fixed, store)
        return self.report.moved_bytes - before

    def inputs_gone(self) -> dict[Any, Bytes]:
        """Bytes of the storages that its arguments lay in, were sent away, and nobody holds any more, by what is left
        of them: other calls may have sent the same."""
        sent = [one for one in self.arguments() if one.origin is not None and one.origin.expired()]
        return {one.origin: one.nbytes for one in sent}

    def forget_arrivals(self) -> Bytes:
        if self._is_wanted():
            return 0
        ahead = [source for source in self.waiting() if source.ahead]
        for source in ahead:
            source.forget_arrival()
        return sum(source.nbytes for source in ahead)

    def _give_up(self) -> None:
        """What `revoke` does, when the block has just ended."""
        if not self.report.kept_because and (self.frozen is not None or self.parent is not None):
            self._let_go(ended=True)

    def _is_wanted(self) -> bool:
        """Whether a second run is bringing back what this call, one inside it or one around it held."""
        around: BlockCall | None = self.parent
        while around is not None:
            if around.running_again:
                return True
            around = around.parent
        return any(call.running_again for call in self._family())

    def _holds(self) -> bool:
        family = self._family()
        if any(call.selection is not None for call in family) or any(call.frozen is not None for call in family[1:]):
            return True
        every = (saved for call in family for saved in call._living())
        return any(not saved.pinned and (saved.value is not None or saved.spilled is not None) for saved in every)

    def _may_go(self) -> bool:
        if self.frozen is None and self.parent is None:
            return False
        if not self.report.kept_because and any(frozen.moved_on and not frozen.copied for frozen in self.arguments()):
            self.report.kept_because = "an argument of it was written to after it had ended"
        written = self.snapshot.written()
        if not self.report.kept_because and written:
            self.report.kept_because = f"{written} was written to after it had ended"
        return not self.report.kept_because

    def locate(self, *, ended: bool) -> None:
        """Know what is written unseen to what was saved."""
        locate(self._living(), self.runtime.homes, ended=ended)

    def _let_go(self, *, ended: bool = False) -> None:
        self.selection = None
        self.locate(ended=ended)
        if not self.inexact:
            remember_some(self._living(), {frozen.key for frozen in self.arguments()})
        for saved in self._living():
            saved.let_go()
            saved.spilled = None
        for child in self._children():
            child._judge()
            child._let_go()
            child._drop_arguments()

    # ----------------------------------------------------------------------------------------------- bringing back

    def unpack(self, saved: SavedTensor) -> Tensor:
        """A saved tensor, for autograd. Raises RuntimeError if the tensor was written to since it was saved, and
        RecomputeError if the block cannot run again as it ran."""
        with outside_of_transforms() if under_transforms() else contextlib.nullcontext():
            value = self._value_of(saved)
        result: Tensor = value if self.outer is None else heard(self.outer[1], value)
        return result

    def _value_of(self, saved: SavedTensor) -> Any:
        saved.check()
        if self.ended:
            self.runtime.homes.reached()
            self._judge()
            if self.when_reached is not None:
                reached, self.when_reached = self.when_reached, None
                reached()
        self.calm = self.outer is None
        around: BlockCall | None = self
        while around is not None:
            if not around.ended:
                around.differentiates, self.calm = True, False
            around = around.parent
        value = saved.value
        if value is None:
            with self.runtime.lock:  # within it nobody revokes
                self._restore(saved)
                value = saved.value
        if value is None:
            saved.check()  # another thread may have written to it meanwhile
            raise EngineError(f"A tensor saved in {self.name} did not come back.")
        if saved.recomputed and retained():
            saved.value = None  # rule 7
        if torch._C._current_graph_task_id() == -1:
            self.clear()  # somebody looks at the graph; no end of a backward will come
        return value

    def _judge(self) -> None:
        """The backward is here: what was going to be written to the arguments has been written."""
        if self.number in self.block.judged or self.frozen is None or self._is_uncopied:
            return
        if any(one.gone for one in self.arguments()):
            return
        self.block.judged.add(self.number)
        for number, frozen in enumerate(self.arguments()):
            if frozen.moved_on or frozen.overwritten:
                self.block.written.add((self.number, number))

    def _restore(self, saved: SavedTensor) -> None:
        if saved.spilled is not None:
            bring_saved_for(saved, self._living())
            if self.action.compresses and self.runtime.ahead != 0 and not self.options.waits:
                # What it wants next is compressed by itself.
                self.start_in(None)
            self.runtime.read_ahead(self)
            self._clear_later()
            return
        if self.frozen is None and self.parent is not None:
            self.parent._restore_children()
        if saved.value is None:
            self.recompute()

    def come_back(self) -> None:
        """Let nothing of this call wait in the spill file any more."""
        come_back(self._living(), (*self.arguments(), *self._kept()))

    def waiting(self) -> list[Spilled]:
        """Of what the backward will want of this call, what waits elsewhere or was read ahead."""
        return waiting(self._living(), (*self.arguments(), *self._kept()))

    def start_in(self, most: Bytes | None) -> Bytes:
        """Let what waits elsewhere come, up to so many bytes; how many are here or on their way."""
        coming = start_in(self.waiting(), most)
        if coming:
            self._clear_later()
        return coming

    def _restore_children(self) -> None:
        if self.frozen is None and self.parent is not None:
            self.parent._restore_children()
        if self.frozen is not None:  # else the second run further out has filled this call, and those inside it
            self.recompute()

    def recompute(self) -> None:
        """Run the block again, and give what it saved and what still lives its bytes. Raises RecomputeError if it
        cannot run as it ran, or did not."""
        check_unchanged(self)
        began = time.perf_counter()
        args, kwargs = thaw(self.frozen)
        replay = Replay(self)
        runtime = self.runtime
        runtime.read_ahead(self)
        mode = Supplying(self.selection) if self.selection is not None else None
        with (
            quiet(),
            runtime.hooked(),
            runtime.replaying(replay),
            runtime.environment(self.environment),
            self.block.state.as_of(self.snapshot),
            unhung(),
            grad_mode(enabled=True),
            Packing(replay.fill, _same),
            mode if mode is not None else contextlib.nullcontext(),
        ):
            self.running_again = True
            try:
                heard(self._forward, *args, **kwargs)
            except StopRecompute as stop:
                if stop.replay is not replay:
                    raise
            finally:
                self.running_again = False
        replay.verify()
        self.report.recomputes += 1
        self.report.skipped_ops += mode.skipped if mode is not None else 0
        if torch._C._current_graph_task_id() != -1 and not retained():
            self.selection = None
        self.report.recompute_seconds += time.perf_counter() - began
        self._clear_later()

    def rerun(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run as part of the second run of the parent (rule 6)."""
        watched = self.differentiates or (self.parent is not None and self.parent.differentiates)
        again = self.ended and not self.report.kept_because
        self.armed = self.action.recomputes and again and not watched
        if self.armed:
            self._freeze(args, kwargs, copied=self._is_written)
            replay: Replay | Passing = Passing()
        else:
            replay = Replay(self, child=True)
        with self.runtime.replaying(replay), Packing(replay.fill, _same):
            output = heard(self._forward, *args, **kwargs)
        if self.armed:
            for frozen in self.arguments():
                frozen.written = frozen.moved_on
        replay.verify()
        return output

    def clear(self) -> None:
        """Forget what was brought back and not taken, of this call and of those inside it."""
        for saved in self._living():
            if saved.recomputed:
                saved.value, saved.recomputed = None, False
        for source in self.waiting():
            source.drop_arrival()
        for child in self._children():
            child.clear()
            if child.armed:
                child.armed = False
                child._drop_arguments()

    def _clear_later(self) -> None:
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._cleared_by):
            self._cleared_by = task
            mine = weakref.ref(self)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _clear(mine))

    # -------------------------------------------------------------------------------------------------- what there is

    def _living(self) -> list[SavedTensor]:
        return [saved for saved in (ref() for ref in self.saved) if saved is not None]

    def _children(self) -> list[BlockCall]:
        return [child for child in (ref() for ref in self.children) if child is not None]

    def _family(self) -> list[BlockCall]:
        return [self, *(call for child in self._children() for call in child._family())]

    def arguments(self) -> list[FrozenTensor]:
        """Tensors that another run is called with, as far as this call holds them."""
        return self._found if self.frozen is not None else []

    def _kept(self) -> list[FrozenTensor]:
        return self.selection.kept if self.selection is not None else []

    def _shared_with_others(self) -> set[int]:
        return self._outputs | {frozen.key for frozen in self.arguments() if frozen.key is not None}

    @property
    def inexact(self) -> bool:
        """Whether it runs again on other values than it ran on, by itself or in a block around it."""
        mine = self.action is Action.RECOMPUTE_COMPRESSED
        return mine or (self.parent is not None and self.parent.inexact)

    def _above_recomputes(self) -> bool:
        return self.parent is not None and (self.parent.action.recomputes or self.parent._above_recomputes())


@unheard_by_modes
def _unpack(saved: SavedTensor) -> Tensor:
    value, call = saved.value, saved.owner
    if value is None or saved.recomputed or not call.calm or saved.witness._version != saved.version:
        return call.unpack(saved)
    return cast(Tensor, value)


def _same(value: Any) -> Any:
    return value


@unheard_by_modes
def _clear(call: weakref.ref[BlockCall]) -> None:
    living = call()
    if living is not None:
        living.clear()


def check_unchanged(call: BlockCall) -> None:
    """Before a second run. Raises RecomputeError if what the first ran on has been written to."""
    if call.frozen is None:
        raise EngineError(f"The arguments of {call.name} are gone.")
    moved = next((i for i, one in enumerate(call.arguments()) if one.moved_on and not one.copied), None)
    if moved is not None:
        call.block.written.add((call.number, moved))
        raise _told(
            f"Argument {moved} of {call.name} was written to in place after the block had run, for the first time "
            f"in this step, so the block cannot run again as it ran; from the next step on it is copied first.",
            once=True,
        )
    call.block.state.reach(call.snapshot)
    written = call.snapshot.written()
    if written:
        once = not dataclasses.replace(call.snapshot, versions=[]).written()
        rest = "from the next step on it is copied first" if once else "keep this block, or write after the backward"
        raise _told(
            f"{written} of {call.block.name} was written to between its forward and its backward, so the block cannot "
            f"run again as it ran; {rest}.",
            once=once,
        )


def _told(sentence: str, *, once: bool) -> RecomputeError:
    """Made here, since an error that a variable of a frame in its traceback holds outlives its step."""
    error = RecomputeError(sentence)
    error.once = once
    return error


@final
class StopRecompute(BaseException):
    """All that the first run saved has been saved again. No `except Exception` of a model may stop this."""

    def __init__(self, replay: Replay) -> None:
        super().__init__()
        self.replay = replay


@final
class Replay:
    """Fills what a call saved, in the order in which the first run made them."""

    def __init__(self, call: BlockCall, *, child: bool = False) -> None:
        self._call = call
        self._stops = call.stops_early and not child  # what comes after a child in its parent has to run
        self._saved = 0
        self._called = 0
        self._error: RecomputeError | None = None

    @unheard_by_modes
    def fill(self, tensor: Tensor) -> Any:
        """The hook that packs."""
        number, call = self._saved, self._call
        self._saved += 1
        kept = detached(tensor)
        saved = call.saved[number]() if number < len(call.saved) else None
        if saved is not None:
            given = saved.as_first(kept)
            if given.shape != saved.shape or given.dtype != saved.dtype:
                self._fail(f"saved tensor {number} is {saved.differs(given)}")
            if saved.value is None:
                saved.give_back(given if call.outer is None else heard(call.outer[0], tensor))
        if self._stops and self._saved == len(call.saved):
            raise StopRecompute(self)
        return kept

    def call(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block is called inside: the child that the first run had here runs again."""
        number, children = self._called, self._call.children
        self._called += 1
        if number >= len(children) or self._call.child_blocks[number] is not block:
            self._fail(f"{block.name} is called inside, where the first run called another block or none")
        child = children[number]()
        if child is not None:
            return child.rerun(args, kwargs)
        return self._call.runtime.pass_through(args, kwargs, block, holds=self._call.differentiates)

    def verify(self) -> None:
        """After the run. Raises RecomputeError if it was not the same as the first."""
        if self._error is not None:
            raise self._error
        if self._saved != len(self._call.saved):
            self._fail(f"autograd saved {self._saved} tensors, and {len(self._call.saved)} in the first run")
        number = first_changed(self._call.saved)
        if number is not None:
            saved = cast("SavedTensor", self._call.saved[number]())
            self._fail(f"saved tensor {number}, {saved.looks}, holds other values")
        for saved in self._call._living():
            saved.go_home()

    def _fail(self, clause: str) -> None:
        decides = (
            "a stream of random numbers, a state outside of the model, or a change of it since then decides what it "
            "does: change models between steps, register streams with BlockOptions(generators=...)"
        )
        if self._call.inexact:
            decides = (
                "it ran on arguments that had been quantized, and their values decide what it does: compress what "
            )
            decides += "it saves (Action.COMPRESS)"
        error = RecomputeError(
            f"The second run of {self._call.name} was not the same as the first: {clause}; {decides}, or keep this "
            f"block."
        )
        self._error = self._error or error  # the model may catch what is raised in the middle of it
        raise error


@final
class Passing:
    """A run from which nothing is wanted: blocks inside are no calls. With `holds` what is saved is held as long as the
    run lasts, for a backward in it."""

    def __init__(self, *, holds: bool = False) -> None:
        self._holds = holds

    @unheard_by_modes
    def fill(self, tensor: Tensor) -> Tensor | None:
        """The hook that packs."""
        return detached(tensor) if self._holds else None

    def verify(self) -> None:
        """Anything goes."""


def retained() -> bool:
    """Whether the backward that is running keeps the graph for another one."""
    if torch._C._current_graph_task_id() == -1:
        return False
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
