"""What the rest of a step will need, told on tensors without content: a forward and backward in which every block is
recomputed, and the step of an optimizer."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias, cast, final

import torch

from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.containers import rebuilt
from spillway.engines.blocks.extra_forward import is_the_models
from spillway.engines.blocks.quiet import quiet
from spillway.engines.blocks.reach import Reach, reach_of
from spillway.engines.environment import Environment
from spillway.engines.tensors.fakes import FakeMode
from spillway.engines.tensors.optimizers import (
    Update,
    assumed,
    grows,
    sizes_of_parts,
    update_of,
    working_in_parts,
)
from spillway.engines.tensors.tally import Tally
from spillway.engines.tensors.twins import results_of, unseen, untouched, usual_loss, without_content
from spillway.errors import SpillError
from spillway.internals.interrupts import by_signal
from spillway.internals.private import grad_mode, heard
from spillway.methods.actions import Action
from spillway.tiers.transfer import Store, Transfer
from spillway.units import Bytes, Seconds

Kept: TypeAlias = tuple[Hashable, ...]
"""Of an optimizer: which it is, how many parameters have state, and of each group how many it updates, and how."""


class Call(NamedTuple):
    """A call of a model's forward."""

    engine: BlockEngine
    """A copy of its model runs, without the user's hooks; what that changes beside the copy is put back."""
    called: tuple[Any, dict[str, Any]]
    """Its arguments; of tensors only shape, strides, dtype and device count."""
    gradients: Mapping[str, Bytes]
    """Of parameters that have one by then, by their names."""


@final
class Needs:
    """What updates of a session's optimizers take. Where it cannot be told beforehand it is learned, of every number
    of parameters that have state, and until then assumed."""

    def __init__(self) -> None:
        self._told: dict[Kept, Update | None] = {}
        self._learned: dict[Kept, Update] = {}
        self._working: dict[Kept, dict[Bytes | None, Bytes | None]] = {}
        """Of those that update in ops over lists: temporaries all at once, and in parts of so many bytes, the largest
        first; None where nobody has asked yet."""

    def of(self, optimizer: torch.optim.Optimizer, *, at_once: bool = False) -> Update:
        """Of its next update, in the smallest parts unless it is all to be updated at once."""
        told = self._told.get(kept_by(optimizer))
        found = told if told is not None and not grows(optimizer) else self._found(optimizer)
        whole = self._working.get(kept_by(optimizer), {}).get(None) if at_once else None
        return found if whole is None else found._replace(working=whole)

    @unseen()
    def _found(self, optimizer: torch.optim.Optimizer) -> Update:
        key = kept_by(optimizer)
        if key not in self._told or grows(optimizer):
            told, sizes = update_of(optimizer), sizes_of_parts(optimizer)
            if told is not None and sizes:
                smallest = working_in_parts(optimizer, sizes[-1])
                self._working[key] = {None: told.working, **dict.fromkeys(sizes), sizes[-1]: smallest}
                told = told._replace(working=min(smallest, told.working))
            self._told[key] = told
        return self._told[key] or self._learned.get(key) or assumed(optimizer)

    def part_bytes(self, optimizer: torch.optim.Optimizer, room: Bytes) -> Bytes | None:
        """Of what size parts are in which its next update has no more temporaries than there is room for, or the
        smallest; None where it has no more all at once, and where it does not update in ops over lists."""
        working, size = self._working.get(kept_by(optimizer), {}), None
        for size, nbytes in working.items():
            if nbytes is None:
                assert size is not None
                with unseen():
                    nbytes = working[size] = working_in_parts(optimizer, size)
            if nbytes <= room:
                break
        return size

    def tells(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether that is sure: what such an update took before may not be all that the next one takes."""
        return self._told.get(kept_by(optimizer)) is not None

    def assumes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether that is a bound, since nobody has seen such an update yet."""
        key = kept_by(optimizer)
        return self._told.get(key) is None and key not in self._learned

    def learn(self, key: Kept, took: Update) -> None:
        """An update has taken so much that began with this. Of what was told beforehand there is nothing to learn."""
        if self._told.get(key) is None:
            before = self._learned.get(key, Update())
            self._learned[key] = Update(max(took.state, before.state), max(took.working, before.working))


_IS_TRAINED: Final = operator.attrgetter("requires_grad")


def kept_by(optimizer: torch.optim.Optimizer) -> Kept:
    """What its needs depend on: of numbers that schedules change, whether they are 0."""
    groups = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        trained = sum(map(_IS_TRAINED, parameters))
        groups.append((id(parameters), len(parameters), trained, *[(name, _kind(one)) for name, one in group.items()]))
    return id(optimizer), len(optimizer.state), *groups


def _kind(setting: Any) -> Hashable:
    return bool(setting) if isinstance(setting, int | float) else setting if isinstance(setting, str) else None


class Rise(NamedTuple):
    """The most bytes above what is there when a forward begins, until its backward has ended."""

    now: Bytes
    """With an engine that has learned nothing of the model yet: it takes samples of more."""
    later: Bytes
    """Of the next one like it, above what is there when this one begins."""
    sure: bool
    """Whether that is all: kernels may take more of which it is not known what they take."""
    state: Bytes = 0
    """Of the optimizers, which the next one begins with."""
    slack: Bytes = 0
    """What no op makes, at most: samples of what blocks are called with."""

    @property
    def most(self) -> Bytes:
        """That is enough for both."""
        return max(self.now, self.later + self.state) + self.slack


def recomputing(
    call: Call, environment: Environment, *, loss: bool = True, action: Action = Action.RECOMPUTE
) -> Rise | None:
    """Of a forward and backward in which every block is recomputed, as this action has it, with a loss that needs what
    the usual ones do, or one that needs nothing. None where the model does not run on tensors without content."""
    peaks = _peaks(call, environment, _go_back if loss else _descend, taught=False, times=2, action=action)
    return Rise(peaks[0].peak, peaks[1].peak, peaks[0].sure) if peaks else None


def least(call: Call, environment: Environment, enough: Bytes = 0) -> Bytes | None:
    """The same for the engine as it is, with a loss that needs nothing, or of a forward alone if it runs without
    gradients: less cannot do. If that is no more than what is enough, nobody looks for less."""
    if not torch.is_grad_enabled():
        return _only(_peaks(call, environment, lambda out: None, trains=False))
    held = sum(call.gradients.values())
    peak = _only(_peaks(call, environment, _descend))
    if peak is None or not held or peak <= enough:
        return peak
    # They may be given up between forward and backward.
    fresh = _only(_peaks(call._replace(gradients={}), environment, _descend))
    return None if fresh is None else min(peak, fresh - held)


def _only(tallies: Sequence[Tally]) -> Bytes | None:
    return tallies[0].peak if tallies else None


@unseen()
def _peaks(
    call: Call,
    environment: Environment,
    goes_on: Callable[[list[Any]], None],
    *,
    trains: bool = True,
    taught: bool = True,
    times: int = 1,
    action: Action = Action.RECOMPUTE,
) -> list[Tally]:
    """Of so many forwards, one after the other; none where that cannot be told."""
    model = call.engine.model
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        return []  # copies share their parameters, and kernels depend on how often they have run
    reach = Reach(reach_of((model,), *call.called))
    if reach.too_much:
        return []
    around = environment(environment.capture())
    fake = FakeMode()
    try:
        with quiet(), reach.substituted(), untouched(model), around, grad_mode(enabled=trains):
            twin = without_content(model, fake)
            with fake, BlockEngine(twin, call.engine.blocks, actions=lambda block, call: action) as engine:
                engine.send_to(Store(_Away()))
                engine.read_ahead = 0
                if taught:
                    engine.learn_from(call.engine)
                return [_run(twin, call, engine, goes_on, Tally(least=taught, adds=True)) for _ in range(times)]
    except BaseException as error:  # whatever the model does with tensors that have no content
        if by_signal(error) or not (isinstance(error, Exception) or is_the_models(error)):
            raise
        return []


_hearers: Final[dict[int, Callable[[list[Any]], None]]] = {}
"""Who is told of states of the random stream, by thread."""
_rng_state: Callable[[], torch.Tensor] = torch.get_rng_state


def _heard_rng_state() -> torch.Tensor:
    state = _rng_state()
    if hearer := _hearers.get(threading.get_ident()):
        hearer([state])
    return state


@contextlib.contextmanager
def _random_states(held: Callable[[list[Any]], None]) -> Iterator[None]:
    """Tell of the states of the random stream that are asked for in this thread, 5 KB each, which no op makes: a model
    that checkpoints itself holds one for each checkpoint."""
    global _rng_state
    functions = cast(Any, torch)
    _hearers[threading.get_ident()] = held
    try:
        if functions.get_rng_state is not _heard_rng_state:
            _rng_state, functions.get_rng_state = functions.get_rng_state, _heard_rng_state
        yield
    finally:
        _hearers.pop(threading.get_ident(), None)
        if not _hearers and functions.get_rng_state is _heard_rng_state:
            functions.get_rng_state = _rng_state


@final
class _Away:
    """Where storages without content wait: each is gone at once, and comes back when it is asked for."""

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def start_out(self, transfer: Transfer) -> None:
        transfer.slot, transfer.source = self, None

    def start_in(self, transfer: Transfer) -> NoReturn:
        raise SpillError("Nothing is read ahead.")

    def finish_in(self, transfer: Transfer, arrival: Any) -> torch.UntypedStorage:
        return torch.empty(transfer.nbytes, dtype=torch.uint8).untyped_storage()

    def free(self, transfer: Transfer) -> bool:
        return True

    def busy(self) -> tuple[Seconds, Seconds]:
        return 0.0, 0.0

    def _nothing(self, *args: Any) -> None:
        """There are no copies."""

    sender_let_go = finish_out = reap = settle = abandon = take_back = begin_step = close = _nothing


def _run(
    twin: torch.nn.Module, call: Call, engine: BlockEngine, goes_on: Callable[[list[Any]], None], tally: Tally
) -> Tally:
    """A forward, and how it goes on."""
    for name, parameter in twin.named_parameters():
        parameter.grad = torch.empty_like(parameter) if name in call.gradients else None
    engine.hear_streams(tally.hold)
    args, kwargs = rebuilt(call.called, lambda one: torch.empty_strided(one.size(), one.stride(), dtype=one.dtype))
    with tally, _random_states(tally.hold):
        goes_on([heard(twin, *args, **kwargs)])
    return tally


def _go_back(out: list[Any]) -> None:
    cast(Any, usual_loss(results_of(out[0]))).backward()


def _descend(out: list[Any]) -> None:
    """From a result that nobody holds."""
    sums = [one.sum().real.float() for one in results_of(out.pop()) if one.requires_grad]
    cast(Any, torch.stack(sums).sum()).backward()
