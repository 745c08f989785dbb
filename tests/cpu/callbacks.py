"""Every place of a training step where code of the user's runs and may raise, and one training that has them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.optim import SGD
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import spillway
from spillway.methods import Action, Checkpoint

ROWS, WIDTH = 64, 64

TENSORS: Final = ("lru", "delta", "dtr")
BLOCKS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "checkpoint": "checkpoint",
        "mimose": "mimose",
        "mimose-published": "mimose-published",
        "offload": Checkpoint(Action.OFFLOAD),
        "recompute offloaded": Checkpoint(Action.RECOMPUTE_OFFLOADED),
        "selective": Checkpoint(Action.SELECTIVE),
        "selective offloaded": Checkpoint(Action.SELECTIVE_OFFLOADED),
    }
)
"""Methods of either engine."""


class Mine(Exception):
    """What the user's own code raises."""


KINDS: Final[Mapping[str, type[BaseException]]] = MappingProxyType(
    {kind.__name__: kind for kind in (Mine, KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit, RuntimeError)}
    | {kind.__name__: kind for kind in (MemoryError, AttributeError, AssertionError, spillway.SpillwayError)}
)


class Fault:
    """Raises an exception when it is called for the time with a number."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error = error
        self.at = at
        self.calls = 0
        self.raised_in = ""
        """The phase of the step."""
        self.training: Training | None = None

    def __call__(self, *_: Any, **__: Any) -> None:
        self.calls += 1
        if self.calls == self.at and self.training is not None:
            self.raised_in = self.training.phase
            raise self.error


class Spot(nn.Module):
    """Does nothing to what passes, unless it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.does: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return self.does(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.dropout, self.spot = nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), Spot()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.spot(self.norm(self.first(x)).tanh())
        out: Tensor = x + self.dropout(self.second(hidden))
        return out


class Training:
    """A model whose steps run a loader, a loss, an optimizer and a scheduler."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.outside = Spot()
        self.model = nn.Sequential(Block(), self.outside, Block(), Block())
        self.optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        self.rate: Callable[[int], float] = lambda epoch: 0.5**epoch
        self.scheduler = LambdaLR(self.optimizer, lambda epoch: self.rate(epoch))
        self.loss: Callable[[Tensor], Tensor] = lambda out: out.square().mean()
        self.closure: Callable[[], Any] | None = None
        self.rows = list(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)))
        self.collate: Callable[[Any], Tensor] = torch.stack
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.phase = ""

    @property
    def spot(self) -> Spot:
        """The one within the second block."""
        return self.model[2].spot  # type: ignore[return-value, union-attr]

    def step(self) -> None:
        self.optimizer.zero_grad()
        with self.around():
            self.phase = "forward"
            batch = next(iter(DataLoader(self.rows, batch_size=ROWS, collate_fn=self.collate)))  # type: ignore[arg-type]
            loss = self.loss(self.model(batch))
            self.phase = "backward"
            loss.backward()  # type: ignore[no-untyped-call]
            self.phase = "optimizer"
            self.optimizer.step(self.closure)
            self.scheduler.step()

    def manage(self, method: str) -> spillway.Session:
        """Under a budget under which much leaves."""
        if method not in BLOCKS:
            return spillway.manage(self.model, self.optimizer, budget="230 KiB", method=method)
        blocks = ["0", "2", "3"]
        return spillway.manage(
            self.model,
            self.optimizer,
            budget="32 MiB",
            method=BLOCKS[method],
            blocks=spillway.BlockOptions(names=blocks),
        )


Place: TypeAlias = Callable[[Training, Fault], AbstractContextManager[Any]]
"""Puts the fault there for as long as the step lasts."""


def _sets(attribute: str, made: Callable[[Fault], Any], of: Callable[[Training], Any] = lambda it: it) -> Place:
    """The fault in what an attribute of the training, or of something that it has, does."""

    @contextmanager
    def place(training: Training, fault: Fault) -> Iterator[None]:
        owner = of(training)
        before = getattr(owner, attribute)
        setattr(owner, attribute, made(fault))
        yield
        setattr(owner, attribute, before)

    return place


def _hooks(register: Callable[[Training, Fault], Any]) -> Place:
    """The fault as a hook."""

    @contextmanager
    def place(training: Training, fault: Fault) -> Iterator[None]:
        handle = register(training, fault)
        yield
        handle.remove()

    return place


def _faulty(value: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    def does(*args: Any) -> Any:
        fault()
        return value(*args)

    return does


def _function(of: str, fault: Fault) -> Callable[[Tensor], Tensor]:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            result = x * 1
            if of == "forward":
                fault()
            return result

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            if of == "backward":
                fault()
            return gradient + 0 * ctx.saved_tensors[0]

    return lambda x: Function.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def _on_node(register: Callable[[Tensor, Fault], Any], fault: Fault) -> Callable[[Tensor], Tensor]:
    def does(x: Tensor) -> Tensor:
        out = x.clone()
        if out.requires_grad:
            register(out, fault)
        return out

    return does


def _saved(packs: bool, fault: Fault) -> Callable[[Tensor], Tensor]:
    def does(x: Tensor) -> Tensor:
        around = [_faulty(lambda value: value, fault), lambda value: value]
        with torch.autograd.graph.saved_tensors_hooks(*(around if packs else around[::-1])):
            return x * x

    return does


class _Functions(TorchFunctionMode):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fault()
        return func(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fault()
        return func(*args, **(kwargs or {}))


def _within(mode: Callable[[Fault], AbstractContextManager[Any]], fault: Fault) -> Callable[[Tensor], Tensor]:
    def does(x: Tensor) -> Tensor:
        with mode(fault):
            return (x * 2).relu() + 1

    return does


def _subclass(fault: Fault) -> Callable[[Tensor], Tensor]:
    class Faulty(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            fault()
            return super().__torch_function__(func, types, args, kwargs or {})

    return lambda x: (x.as_subclass(Faulty) * 2).as_subclass(Tensor)


@contextmanager
def _parametrized(training: Training, fault: Fault) -> Iterator[None]:
    class Parametrization(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            fault()
            return x

    module: Any = training.model[2].first
    parametrize.register_parametrization(module, "weight", Parametrization(), unsafe=True)
    yield
    parametrize.remove_parametrizations(module, "weight")


def _final(out: Tensor, fault: Fault) -> None:
    def queue(_: Any) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(fault)  # type: ignore[attr-defined]

    out.register_hook(queue)


_FUNCTIONS: Final[Mapping[str, Callable[[Fault], Callable[[Tensor], Tensor]]]] = MappingProxyType(
    {
        "forward": lambda fault: _faulty(lambda x: x, fault),
        "a function's forward": lambda fault: _function("forward", fault),
        "a function's backward": lambda fault: _function("backward", fault),
        "a tensor's hook": lambda fault: _on_node(lambda out, f: out.register_hook(f), fault),
        "a node's hook": lambda fault: _on_node(lambda out, f: out.grad_fn.register_hook(f), fault),  # type: ignore[union-attr]
        "a node's prehook": lambda fault: _on_node(lambda out, f: out.grad_fn.register_prehook(f), fault),  # type: ignore[union-attr]
        "the end of backward": lambda fault: _on_node(_final, fault),
        "what packs": lambda fault: _saved(True, fault),
        "what unpacks": lambda fault: _saved(False, fault),
        "functions": lambda fault: _within(_Functions, fault),
        "ops": lambda fault: _within(_Ops, fault),
        "a subclass": _subclass,
        "a checkpoint": lambda fault: lambda x: checkpoint(_faulty(torch.sin, fault), x, use_reentrant=False),
        "an old checkpoint": lambda fault: lambda x: checkpoint(_faulty(torch.sin, fault), x, use_reentrant=True),
    }
)  # fmt: skip
"""What may stand in the middle of a forward."""

PLACES: Final[Mapping[str, Place]] = MappingProxyType(
    {f"{name}, in a block": _sets("does", made, lambda it: it.spot) for name, made in _FUNCTIONS.items()}
    | {f"{name}, between blocks": _sets("does", made, lambda it: it.outside) for name, made in _FUNCTIONS.items()}
    | {
        "the loss": _sets("loss", lambda fault: _faulty(lambda out: out.square().mean(), fault)),
        "the loader": _sets("collate", lambda fault: _faulty(torch.stack, fault)),
        "the scheduler": _sets("rate", lambda fault: _faulty(lambda epoch: 0.5**epoch, fault)),
        "the closure": _sets("closure", lambda fault: fault),
        "all functions": _sets("around", lambda fault: lambda: _Functions(fault)),
        "all ops": _sets("around", lambda fault: lambda: _Ops(fault)),
        "a parametrization": _parametrized,
        "a parameter's hook": _hooks(lambda it, f: it.model[2].first.weight.register_hook(f)),  # type: ignore[union-attr, operator]
        "an accumulated gradient": _hooks(
            lambda it, f: it.model[2].first.weight.register_post_accumulate_grad_hook(f)  # type: ignore[union-attr, operator]
        ),
        "before a block": _hooks(lambda it, f: it.model[2].register_forward_pre_hook(f)),
        "after a block": _hooks(lambda it, f: it.model[2].register_forward_hook(f)),
        "before a module": _hooks(lambda it, f: it.model[2].norm.register_forward_pre_hook(f)),  # type: ignore[union-attr, operator]
        "after the model": _hooks(lambda it, f: it.model.register_forward_hook(f)),
        "before a block's backward": _hooks(lambda it, f: it.model[2].register_full_backward_pre_hook(f)),
        "after a block's backward": _hooks(lambda it, f: it.model[2].register_full_backward_hook(f)),
        "any module": _hooks(lambda it, f: torch_module.register_module_forward_hook(f)),
        "before the optimizer": _hooks(lambda it, f: it.optimizer.register_step_pre_hook(f)),
        "after the optimizer": _hooks(lambda it, f: it.optimizer.register_step_post_hook(f)),
        "any optimizer": _hooks(lambda it, f: torch_optimizer.register_optimizer_step_pre_hook(f)),
    }
)  # fmt: skip
