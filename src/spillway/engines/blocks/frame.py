"""One call of a block, and everything it takes to run it again.

NOTE [Frames]. While a block runs, every tensor that autograd saves inside it is packed into a `Holder`. When the block
has ended its frame can let the bytes of all its holders go, then or at any later moment, and bring them back by running
the block again. So "recompute" is "keep", revoked at the end of the block, and what a frame learns while the block
runs decides whether that is allowed:

 1. Nothing is dropped while the block runs. Autograd may save a tensor before it is filled (`rrelu`), and only the end
    shows what the block wrote to. The peak does not rise by that: the second run needs the same room.
 2. A block runs again with the arguments, buffers, attributes, random streams and settings that it was called with.
    What it is known to write to was copied first; what nobody knows yet is copied in the first call that recomputes.
 3. If something was written to that was not copied, a kept block stays kept, and a recomputed one raises
    `RecomputeError`: never silently a second run on other numbers.
 4. Frames hold no graph: arguments are held detached. A graph holds holders, holders hold frames; a frame that held
    its graph would never be freed.
 5. A write to a saved tensor is found by its version counter, which a tensor without bytes shares with it.
 6. A block inside a block is a frame of its own, called a child. A frame that drops what it holds drops what its
    children hold, arguments included, and its second run hands each of its children their part: their values, or, if
    they recompute by themselves, their arguments.
 7. What was brought back dies with the node that it was for. Where the graph is retained it dies when it has been
    handed out, and what was not wanted at the end of that backward.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast, final

import torch
from torch import Tensor

from spillway.engines.blocks import fingerprints, homes
from spillway.engines.blocks.containers import (
    FrozenTensor,
    address,
    freeze,
    tensors,
    thaw,
)
from spillway.engines.blocks.holders import Holder, HolderRef, retained, storages
from spillway.engines.blocks.iterators import CannotCopyError
from spillway.engines.blocks.packing import Packing
from spillway.engines.blocks.quiet import quiet
from spillway.engines.blocks.replays import Passing, Replay, StopRecompute, check_unchanged
from spillway.engines.blocks.selective import Keeping, Selection, Supplying
from spillway.engines.blocks.sites import collectives_begun
from spillway.errors import EngineError
from spillway.methods.actions import Action
from spillway.units import Bytes

if TYPE_CHECKING:
    from spillway.engines.blocks.conductor import Conductor
    from spillway.engines.blocks.sites import Figures, Site

_SETTLE: Final = 3
"""An op that fills a tensor after autograd saved it may save so many more before it does."""


@final
class Frame:
    """One call of a block under gradients."""

    def __init__(self, conductor: Conductor, site: Site, figures: Figures, parent: Frame | None) -> None:
        self.conductor = conductor
        self.site = site
        self.figures = figures
        self.call = figures.call
        self.action = figures.action
        self.parent = parent
        self.children: list[weakref.ref[Frame]] = []
        self.child_sites: list[Site] = []
        self.holders: list[HolderRef] = []
        self.frozen: Any = None
        """Arguments for another run: a pair of positional and named ones. None if the parent has to bring them."""
        self.armed = False
        """The parent's second run brought the arguments."""
        self.outer = conductor.hooks_around()
        """Hooks of the user's for saved tensors, around the block."""
        self.sent = 0
        """How many frames had sent something away when this one ended."""
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
        """A second run is filling the holders; what it has brought back is not given up before somebody took it."""
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
            parent._before_child = len(parent.holders)
            parent.children.append(weakref.ref(self))
            parent.child_sites.append(site)

    @property
    def name(self) -> str:
        """For messages."""
        return f"call {self.call} of {self.site.name}"

    # ------------------------------------------------------------------------------------------------ the first run

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the block for the first time."""
        self.environment = self.conductor.environment.capture()
        self.snapshot = self.site.state.snapshot()
        try:
            self._freeze(args, kwargs, copied=self._to_copy)
        except CannotCopyError as error:
            self.figures.kept_because = str(error)
        if self.site.scripted:
            self.figures.kept_because = "a part of it is TorchScript, which may take other kernels when it runs again"
        began = time.perf_counter()
        if self.action.selects and not self.site.compiled and not self._above_recomputes():
            self.selection = Selection(self.call, self.site.rewritten, by_module=self.conductor.by_module)
        mode = Keeping(self.selection) if self.selection is not None else None
        begun = collectives_begun()
        with Packing(self._pack, _unpack), self.conductor.inside(self), self.conductor.selecting(mode):
            output = self.site.forward(*args, **kwargs)
        self.site.has_begun(collectives_begun() - begun)
        self.figures.seconds = time.perf_counter() - began
        self._end(output)
        return output

    def _freeze(self, args: Any, kwargs: Any, copied: Callable[[int, Tensor], bool]) -> None:
        found: list[FrozenTensor] = []
        copies: dict[int, torch.UntypedStorage] = {}

        def make(tensor: Tensor) -> FrozenTensor:
            found.append(FrozenTensor(tensor, copies if copied(len(found), tensor) else None))
            return found[-1]

        self.frozen, self._found = freeze((args, kwargs), make), found

    def _to_copy(self, number: int, tensor: Tensor) -> bool:
        """Rule 2: an argument is copied if the block, or who comes after it, may write to it."""
        unknown = self.action.recomputes and self.call not in self.site.judged
        return (unknown and not isinstance(tensor, torch.nn.Parameter)) or self._is_written(number, tensor)

    def _is_written(self, number: int, _: Tensor) -> bool:
        return (self.call, number) in self.site.written

    def _pack(self, tensor: Tensor) -> Holder:
        needs_grad, value = tensor.requires_grad, tensor
        pinned = needs_grad and tensor.is_leaf
        if self.outer is not None:
            value = self.outer[0](tensor)
        elif needs_grad and not pinned:
            value = tensor.detach()
        if not needs_grad and tensor._version == 0:
            self._unsettled = len(self.holders)
        holder = Holder(self, tensor, value, pinned, self.outer is None)
        self._last_needs_grad = needs_grad
        self.holders.append(weakref.ref(holder))
        return holder

    def _end(self, output: Any) -> None:
        self.ended, self.sent = True, self.conductor.sent
        fixed = self.site.state.fixed()
        for number, frozen in enumerate(self.arguments()):
            if frozen.moved_on:
                self.site.written.add((self.call, number))
                frozen.written = True
                if not frozen.copied:
                    self.figures.kept_because = "it writes to an argument, which was not copied before"
        self.figures.kept_because = self.site.state.learn(self.snapshot) or self.figures.kept_because
        last = len(self.holders) - 1
        self.stops_early = self._last_needs_grad and last - self._unsettled > _SETTLE and self._before_child <= last
        self._measure(output, fixed)
        if self.site.communicates:  # and what it saved may be under way
            self.figures.kept_because, self.selection = "it communicates with other processes", None
        elif self.action.recomputes:
            selection, self.selection = self.selection, None
            self._give_up()
            if not self.figures.kept_because:
                self._keep_for_later(selection, fixed)
        elif self._above_recomputes() or self.outer is not None:
            return  # it is about to be given up, or what the user's hooks have made of it
        elif self.action is Action.OFFLOAD:
            with self.conductor.sending(self) as store:
                homes.send_saved(self._living(), self._shared_with_others(), store)
        elif self.action.compresses:
            self._compress()

    def _compress(self) -> None:
        """Arguments as well: what held them for a second run would hold them in full."""
        sending = self.conductor.sending(self) if self.action.moves else contextlib.nullcontext()
        with sending as store:
            self.figures.packed_bytes = homes.compress_saved(self._living(), self.conductor.compressor, store)
        if any(holder.home is not None for holder in self._living()):
            self._drop_arguments()
            self.figures.kept_because = self.figures.kept_because or "what it was called with is held compressed"

    def _drop_arguments(self) -> None:
        self.frozen, self._found = None, []

    def _keep_for_later(self, selection: Selection | None, fixed: set[int]) -> None:
        """What the second run will be given."""
        self.selection = selection
        if selection is not None:
            selection.settle()
            self.figures.kept_bytes = selection.nbytes(self._shared_with_others())
        if self.action is Action.RECOMPUTE_OFFLOADED:
            with self.conductor.sending(self) as store:
                homes.send_frozen([one for one in self.arguments() if one.needs_grad], fixed, store)
        elif self.action is Action.RECOMPUTE_COMPRESSED and not self._above_recomputes():
            arguments = [one for one in self.arguments() if one.needs_grad]
            self.figures.packed_bytes = homes.compress_frozen(arguments, fixed, self.conductor.compressor)
        elif self.action is Action.SELECTIVE_OFFLOADED and selection is not None:
            with self.conductor.sending(self) as store:
                homes.send_frozen(selection.kept, self._shared_with_others(), store)

    def _measure(self, output: Any, fixed: set[int]) -> None:
        arguments = {one.key: one.nbytes for one in self.arguments() if one.key is not None and one.key not in fixed}
        try:
            self._outputs = {address(tensor) for tensor in tensors(output)}
        except CannotCopyError:
            self._outputs = set()
        living = self._living()
        for holder in living:
            holder.pinned = holder.pinned or holder.address() in fixed
        saved = storages(living)
        self.figures.saved_bytes = sum(saved.values())
        self.figures.argument_bytes = sum(arguments.values())
        self.figures.own_bytes = sum(
            nbytes for key, nbytes in saved.items() if key not in self._outputs | arguments.keys()
        )

    # --------------------------------------------------------------------------------------------------- giving up

    def revoke(self) -> Bytes:
        """Let go of all that autograd saved inside, if the block can run again; how many bytes that frees.

        Those of arguments and results are not counted: somebody else holds them.
        """
        if not self.ended or self._is_wanted() or not self._holds() or not self._may_go():
            return 0
        shared = self._shared_with_others()
        freed = sum(
            nbytes for frame in self._family() for key, nbytes in storages(frame._living()).items() if key not in shared
        )
        if self.selection is not None:
            freed += self.selection.nbytes(shared)
        self._let_go()
        return freed

    def _give_up(self) -> None:
        """What `revoke` does, when the block has just ended."""
        if not self.figures.kept_because and (self.frozen is not None or self.parent is not None):
            self._let_go()

    def _is_wanted(self) -> bool:
        """Whether a second run is bringing back what this frame, one inside it or one around it held."""
        around: Frame | None = self.parent
        while around is not None:
            if around.running_again:
                return True
            around = around.parent
        return any(frame.running_again for frame in self._family())

    def _holds(self) -> bool:
        family = self._family()
        if any(frame.selection is not None for frame in family) or any(
            frame.frozen is not None for frame in family[1:]
        ):
            return True
        holders = (holder for frame in family for holder in frame._living())
        return any(not holder.pinned and (holder.value is not None or holder.home is not None) for holder in holders)

    def _may_go(self) -> bool:
        if self.frozen is None and self.parent is None:
            return False
        if not self.figures.kept_because and any(frozen.moved_on and not frozen.copied for frozen in self.arguments()):
            self.figures.kept_because = "an argument of it was written to after it had ended"
        written = self.snapshot.written()
        if not self.figures.kept_because and written:
            self.figures.kept_because = f"{written} was written to after it had ended"
        return not self.figures.kept_because

    def _let_go(self) -> None:
        self.selection = None
        if self.conductor.checks_values and not self.inexact:
            fingerprints.remember(self._living())
        for holder in self._living():
            holder.let_go()
            holder.home = None
        for child in self._children():
            child._judge()
            child._let_go()
            child._drop_arguments()

    # ----------------------------------------------------------------------------------------------- bringing back

    def unpack(self, holder: Holder) -> Tensor:
        """The tensor of a holder, for autograd.

        Raises:
            RuntimeError: The tensor was written to since it was saved.
            RecomputeError: The block cannot run again as it ran.
        """
        holder.check()
        if self.ended:
            self._judge()
            if self.when_reached is not None:
                reached, self.when_reached = self.when_reached, None
                reached()
        self.calm = self.outer is None
        around: Frame | None = self
        while around is not None:
            if not around.ended:
                around.differentiates, self.calm = True, False
            around = around.parent
        value = holder.value
        if value is None:
            with self.conductor.lock:  # within it nobody revokes
                self._restore(holder)
                value = holder.value
        if value is None:
            holder.check()  # another thread may have written to it meanwhile
            raise EngineError(f"A tensor saved in {self.name} did not come back.")
        if holder.recomputed and retained():
            holder.value = None  # rule 7
        if torch._C._current_graph_task_id() == -1:
            self.clear()  # somebody looks at the graph; no end of a backward will come
        result: Tensor = value if self.outer is None else self.outer[1](value)
        return result

    def _judge(self) -> None:
        """The backward is here: what was going to be written to the arguments has been written."""
        if self.call in self.site.judged or self.frozen is None:
            return
        self.site.judged.add(self.call)
        for number, frozen in enumerate(self.arguments()):
            if frozen.moved_on:
                self.site.written.add((self.call, number))

    def _restore(self, holder: Holder) -> None:
        if holder.home is not None:
            homes.bring_saved_for(holder, self._living())
            if self.action.compresses and self.conductor.ahead != 0:  # the next one is compressed by itself
                self.start_in(None)
            self.conductor.read_ahead(self)
            self._clear_later()
            return
        if self.frozen is None and self.parent is not None:
            self.parent._restore_children()
        if holder.value is None:
            self.recompute()

    def come_home(self) -> None:
        """Let nothing of this frame wait in the spill file any more."""
        homes.come_home(self._living(), (*self.arguments(), *self._kept()))

    def waiting(self) -> list[homes.AnyHome]:
        """Of what the backward will want of this frame, what waits elsewhere or was read ahead."""
        return homes.waiting(self._living(), (*self.arguments(), *self._kept()))

    def start_in(self, most: Bytes | None) -> Bytes:
        """Let what waits elsewhere come, up to so many bytes; how many are here or on their way."""
        coming = homes.start_in(self.waiting(), most)
        if coming:
            self._clear_later()
        return coming

    def _restore_children(self) -> None:
        if self.frozen is None and self.parent is not None:
            self.parent._restore_children()
        if self.frozen is not None:  # else the second run further out has filled this frame, and those inside it
            self.recompute()

    def recompute(self) -> None:
        """Run the block again, and give its living holders their bytes.

        Raises:
            RecomputeError: It cannot run as it ran, or did not.
        """
        check_unchanged(self)
        began = time.perf_counter()
        args, kwargs = thaw(self.frozen)
        replay = Replay(self)
        conductor = self.conductor
        conductor.read_ahead(self)
        mode = Supplying(self.selection) if self.selection is not None else None
        with (
            quiet(),
            conductor.hooked(),
            conductor.replaying(replay),
            conductor.environment(self.environment),
            self.site.state.as_of(self.snapshot),
            torch.enable_grad(),
            Packing(replay.fill, _same),
            conductor.selecting(mode),
        ):
            self.running_again = True
            try:
                self.site.forward(*args, **kwargs)
            except StopRecompute as stop:
                if stop.replay is not replay:
                    raise
            finally:
                self.running_again = False
        replay.verify()
        self.figures.recomputes += 1
        self.figures.skipped_ops += mode.skipped if mode is not None else 0
        if torch._C._current_graph_task_id() != -1 and not retained():
            self.selection = None
        self.figures.recompute_seconds += time.perf_counter() - began
        self._clear_later()

    def rerun(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run as part of the second run of the parent (rule 6)."""
        watched = self.differentiates or (self.parent is not None and self.parent.differentiates)
        again = self.ended and not self.figures.kept_because
        self.armed = self.action.recomputes and again and not watched
        if self.armed:
            self._freeze(args, kwargs, copied=self._is_written)
            replay: Replay | Passing = Passing()
        else:
            replay = Replay(self, child=True)
        with self.conductor.replaying(replay), Packing(replay.fill, _same):
            output = self.site.forward(*args, **kwargs)
        if self.armed:
            for frozen in self.arguments():
                frozen.written = frozen.moved_on
        replay.verify()
        return output

    def clear(self) -> None:
        """Forget what was brought back and not taken, of this frame and of those inside it."""
        for holder in self._living():
            if holder.recomputed:
                holder.value, holder.recomputed = None, False
        for home in self.waiting():
            home.drop_arrival()
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

    def _living(self) -> list[Holder]:
        return [holder for holder in (ref() for ref in self.holders) if holder is not None]

    def _children(self) -> list[Frame]:
        return [child for child in (ref() for ref in self.children) if child is not None]

    def _family(self) -> list[Frame]:
        return [self, *(frame for child in self._children() for frame in child._family())]

    def arguments(self) -> list[FrozenTensor]:
        """Tensors that another run is called with, as far as this frame holds them."""
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


def _unpack(holder: Holder) -> Tensor:
    value, frame = holder.value, holder.frame
    if value is None or holder.recomputed or not frame.calm or holder.witness._version != holder.version:
        return frame.unpack(holder)
    return cast(Tensor, value)


def _same(value: Any) -> Any:
    return value


def _clear(frame: weakref.ref[Frame]) -> None:
    living = frame()
    if living is not None:
        living.clear()
