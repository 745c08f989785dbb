"""Parts of blocks, each with one thing that an extra run of the block, or of the whole forward, could get wrong."""

from __future__ import annotations

import collections
import copy
import itertools
import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 48

# ---------------------------------------------------------------------- what modules hold, and change


class Part(nn.Module):
    """A function of a tensor that keeps its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def facts(self) -> Any:
        """What Python code holds of it, to be compared."""
        return None


class Plain(Part):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


class Dropped(Part):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.linear(x)), 0.2, self.training)


class Normed(Part):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=random.choice([0.1, None]))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.linear(x)))


class Spectral(Part):
    def __init__(self) -> None:
        super().__init__()
        wrap = random.choice(
            [parametrizations.spectral_norm, nn.utils.spectral_norm, parametrizations.weight_norm, nn.utils.weight_norm]
        )
        self.linear = wrap(self.linear)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Averaging(Part):
    """A running mean: as a buffer or a plain attribute, written in place, through `.data` or assigned, deep or not."""

    def __init__(self) -> None:
        super().__init__()
        self.where = random.choice(["buffer", "attribute", "list", "object", "nested", "parameter"])
        self.how = random.choice(["in place", "data", "assigned", "lerp"])
        mean = torch.zeros(WIDTH)
        if self.where == "buffer":
            self.register_buffer("mean", mean, persistent=random.random() < 0.5)
        elif self.where == "parameter":
            self.mean = nn.Parameter(mean, requires_grad=False)
        elif self.where == "attribute":
            self.mean = mean
        else:
            self.held = {"list": [mean], "object": Box(mean), "nested": {"a": [{"mean": mean}]}}[self.where]

    def read(self) -> Tensor:
        if self.where in ("buffer", "attribute", "parameter"):
            return self.mean
        return {
            "list": lambda: self.held[0],
            "object": lambda: self.held.value,
            "nested": lambda: self.held["a"][0]["mean"],
        }[self.where]()  # fmt: skip

    def put(self, mean: Tensor) -> None:
        if self.where == "parameter":
            self.mean = nn.Parameter(mean, requires_grad=False)
        elif self.where in ("buffer", "attribute"):
            self.mean = mean
        elif self.where == "list":
            self.held[0] = mean
        elif self.where == "object":
            self.held.value = mean
        else:
            self.held["a"][0]["mean"] = mean

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            new = y.mean(0).to(self.read().dtype)
            if self.how == "in place":
                self.read().mul_(0.9).add_(new, alpha=0.1)
            elif self.how == "data":
                self.read().data.mul_(0.9).add_(new, alpha=0.1)
            elif self.how == "lerp":
                torch.lerp(self.read(), new, 0.1, out=self.read().data)
            else:
                self.put(0.9 * self.read() + 0.1 * new)
        return torch.tanh(y - self.read())

    def facts(self) -> Any:
        return self.where, self.how, self.read().detach().clone()


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


_global_count = 0
_global_box: dict[str, int] = {}


class Counting(Part):
    """Counts its calls somewhere, and computes by that."""

    calls: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.where = random.choice(
            ["attribute", "list", "dict in list", "object", "slots", "class", "global", "global dict", "closure",
             "count", "numpy", "deque", "default", "generator"]
        )  # fmt: skip
        self.count = 0
        self.held: Any = {
            "list": [0], "dict in list": [{"n": 0}], "object": Box(Box(0)), "slots": Slotted(0),
            "count": itertools.count(1), "numpy": numpy.zeros(1), "deque": collections.deque([0], maxlen=3),
        }.get(self.where)  # fmt: skip
        self.closure = _counter() if self.where == "closure" else None
        if self.where == "generator":
            self.held = random.Random(7)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 + 0.1 * (self.next() % 5)
        return torch.tanh(self.linear(x) * scale)

    def next(self) -> int:
        global _global_count
        where, held = self.where, self.held
        if where == "attribute":
            self.count += 1
            return self.count
        if where == "list":
            held[0] += 1
            return held[0]
        if where == "dict in list":
            held[0]["n"] += 1
            return held[0]["n"]
        if where == "object":
            held.value.value += 1
            return held.value.value
        if where == "slots":
            held.value += 1
            return held.value
        if where == "class":
            type(self).calls += 1
            return type(self).calls
        if where == "global":
            _global_count += 1
            return _global_count
        if where == "global dict":
            _global_box["n"] = _global_box.get("n", 0) + 1
            return _global_box["n"]
        if where == "closure":
            return self.closure()
        if where == "count":
            return next(held)
        if where == "numpy":
            held[0] += 1
            return int(held[0])
        if where == "deque":
            held.append(held[-1] + 1)
            return held[-1]
        if where == "generator":
            return held.randrange(100)
        return _counting_by_default()

    def facts(self) -> Any:
        held = copy.deepcopy(self.held)
        return self.where, self.count, type(self).calls, _global_count, dict(_global_box), _plain_of(held)


def _plain_of(held: Any) -> Any:
    if isinstance(held, Box | Slotted):
        return _plain_of(held.value)
    if isinstance(held, random.Random):
        return hash(held.getstate())
    return held.tolist() if isinstance(held, numpy.ndarray) else repr(held)


def _counter() -> Callable[[], int]:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


def _counting_by_default(seen: list[int] = []) -> int:  # noqa: B006  # what is kept in it is what this is about
    seen.append(1)
    return len(seen)


def forget_globals() -> None:
    """As if this module had just been imported."""
    global _global_count
    _global_count = 0
    _global_box.clear()
    Counting.calls = 0
    _counting_by_default.__defaults__[0].clear()


class Memo(Part):
    """Makes something in its first call, or when its input is larger than all before."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = None
        self.cache: dict[Any, Any] = {}
        self.kind = random.choice(["attribute", "buffer", "by shape", "growing", "random"])
        if self.kind == "buffer":
            self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.kind == "by shape":
            if x.shape not in self.cache:
                self.cache[x.shape] = torch.rand(WIDTH) + 0.5
            return y * self.cache[x.shape]
        if self.kind == "buffer":
            if self.late is None:
                self.late = torch.rand(WIDTH) + 0.5
            return torch.sin(y * self.late)
        if self.kind == "growing":
            if self.scale is None or len(self.scale) < len(x):
                self.scale = torch.arange(len(x) + 5).cos().unsqueeze(1)
            return torch.sin(y) * self.scale[: len(x)]
        if self.scale is None:
            self.scale = torch.rand(WIDTH) + 0.5 if self.kind == "random" else y.detach().abs().mean()
        return torch.tanh(y * self.scale)

    def facts(self) -> Any:
        return self.kind, self.scale, list(self.cache.values())


class Remembering(Part):
    """Reads what its last call left, without a graph or as a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.last is not None:
            y = y + 0.1 * self.last
        if self.history:
            y = y * (1 + 0.01 * torch.stack(self.history[-3:]).mean())
        self.last = y.detach().mean(0)
        self.history.append(y.detach().std())
        return y

    def facts(self) -> Any:
        return self.last, list(self.history)


class Books(Part):
    """A code book that is written to under `no_grad`, as vector quantization does."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.randn(8, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            nearest = torch.cdist(y, self.book).argmin(1)
            self.book.index_add_(0, nearest, y.to(self.book.dtype), alpha=0.01)
        return y + 0.5 * self.book[nearest]


# ---------------------------------------------------------------------- random numbers, control flow, nested autograd


class Branching(Part):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)
        self.by = random.choice(["python", "numpy", "torch", "data"])

    def forward(self, x: Tensor) -> Tensor:
        chance = {
            "python": random.random, "numpy": numpy.random.rand, "torch": lambda: torch.rand(()).item(),
            "data": lambda: 0.7 if float(x.detach().sum()) > 0 else 0.3,
        }[self.by]()  # fmt: skip
        return torch.tanh((self.linear if chance < 0.5 else self.other)(x) * (1 + chance))


class OwnStream(Part):
    """A random stream of its own, as an attribute or deeper."""

    def __init__(self) -> None:
        super().__init__()
        stream = torch.Generator().manual_seed(5)
        self.deep = random.choice([0, 1, 2])
        self.held: Any = [stream, [stream], Box({"stream": stream})][self.deep]

    def stream(self) -> torch.Generator:
        return [lambda: self.held, lambda: self.held[0], lambda: self.held.value["stream"]][self.deep]()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * torch.rand(x.shape, generator=self.stream()))

    def facts(self) -> Any:
        return self.deep, self.stream().get_state()


class Catching(Part):
    """Goes on after something inside has failed, which has changed something before."""

    def __init__(self) -> None:
        super().__init__()
        self.tries = 0
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.risky(x)
        except Exception:
            return torch.sigmoid(self.other(x))

    def risky(self, x: Tensor) -> Tensor:
        self.tries += 1
        y = F.dropout(self.linear(x).exp(), 0.3)
        if self.tries % 3 == 1:
            raise ValueError
        return torch.tanh(y)

    def facts(self) -> Any:
        return self.tries


class Differentiating(Part):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            start = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.linear(start)).square().sum(), start)
        return torch.tanh(self.linear(x)) + slope


class Functional(Part):
    """Transforms of functions inside: gradients, Jacobians, `vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = random.choice(["grad", "vjp", "jvp", "vmap", "functional vjp", "functional jvp", "per sample"])

    def forward(self, x: Tensor) -> Tensor:
        def total(t: Tensor) -> Tensor:
            return torch.tanh(self.linear(t)).square().sum()

        y, small = torch.tanh(self.linear(x)), x[:4].detach()
        if self.kind == "grad":
            return y + torch.func.grad(total)(small).mean(0)
        if self.kind == "vjp":
            _, pull = torch.func.vjp(lambda t: torch.sin(self.linear(t)), x)
            return y + pull(y.detach())[0]
        if self.kind == "jvp":
            return y + torch.func.jvp(lambda t: torch.sin(self.linear(t)), (x,), (torch.ones_like(x),))[1]
        if self.kind == "vmap":
            return y + torch.func.vmap(lambda row: torch.sin(self.linear(row)))(x)
        if self.kind == "functional vjp":
            return y + torch.autograd.functional.vjp(total, small)[1].mean(0)
        if self.kind == "functional jvp":
            ones = torch.ones_like(small)
            return y + torch.autograd.functional.jvp(lambda t: torch.sin(self.linear(t)), small, ones)[1].mean(0)
        weights = {name: value.detach() for name, value in self.linear.named_parameters()}

        def loss(held: dict[str, Tensor], row: Tensor) -> Tensor:
            return torch.func.functional_call(self.linear, held, (row,)).square().sum()

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, small)
        return y + 0.01 * each["weight"].mean((0, 1))


class Checkpointed(Part):
    def forward(self, x: Tensor) -> Tensor:
        again = random.random() < 0.5
        return checkpoint(
            lambda t: F.dropout(torch.tanh(self.linear(t)), 0.1) * (2 if again else 1), x, use_reentrant=False
        )


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class Custom(Part):
    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(torch.tanh(self.linear(x)))


class InPlace(Part):
    """Writes to what it was given, or to what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = random.choice(["input", "own", "inplace relu", "view"])

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "input":
            y = torch.tanh(self.linear(x * 1.0))
            x += y
            return x * 0.5
        y = self.linear(x)
        if self.kind == "own":
            y.mul_(0.5).add_(x)
        elif self.kind == "inplace relu":
            y = F.relu(y * 1.0, inplace=True)
        else:
            y[:, ::2] = y[:, 1::2] * 0.3
        return torch.tanh(y)


class Mixed(Part):
    """Autocast, another dtype, or no gradients inside."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = random.choice(["bfloat16", "float64", "no autocast", "no_grad", "inference-like", "complex"])

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "bfloat16":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.linear(x).to(x.dtype).tanh()
        if self.kind == "float64":
            return torch.sin(self.linear(x).double()).to(x.dtype)
        if self.kind == "no autocast":
            with torch.autocast("cpu", enabled=False):
                return torch.tanh(self.linear(x.float()))
        if self.kind == "no_grad":
            with torch.no_grad():
                scale = self.linear(x).sigmoid()
            return x * scale
        if self.kind == "complex":
            return torch.fft.irfft(torch.fft.rfft(self.linear(x).float()) * 0.7, n=WIDTH).to(x.dtype)
        with torch.set_grad_enabled(self.training):
            return torch.tanh(self.linear(x))


class Recurrent(Part):
    def __init__(self) -> None:
        super().__init__()
        self.cell = random.choice([nn.GRU, nn.LSTM])(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.cell(x.float().unsqueeze(0))[0].squeeze(0))


class Attending(Part):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=random.choice([0.0, 0.1]), batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(x)[: len(x) // 4 * 4].reshape(-1, 4, WIDTH).to(self.linear.weight.dtype)
        mixed, _ = self.attention(rows, rows, rows, need_weights=False)
        return torch.cat([mixed.reshape(-1, WIDTH), x[len(x) // 4 * 4 :]])


class Hooked(Part):
    """Hooks on modules inside or on tensors, which count, scale or write down."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.kind = random.choice(["forward", "forward list", "pre", "backward", "tensor", "removes itself", "bound"])
        step = _counter()
        if self.kind == "forward":
            self.linear.register_forward_hook(lambda m, a, out: out * (1 + 0.1 * (step() % 3)))
        elif self.kind == "forward list":
            norms: list[Tensor] = []
            self.norms = Hidden(norms)

            def hook(m: nn.Module, a: Any, out: Tensor) -> Tensor:
                norms.append(out.detach().norm())
                return out / (1 + torch.stack(norms[-2:]).mean())

            self.linear.register_forward_hook(hook)
        elif self.kind == "pre":
            self.linear.register_forward_pre_hook(lambda m, a: (a[0] * (1 + 0.05 * (step() % 4)),))
        elif self.kind == "backward":
            self.linear.register_full_backward_hook(lambda m, i, o: (i[0] * 0.5,) if i[0] is not None else None)
        elif self.kind == "removes itself":
            handle = self.linear.register_forward_hook(lambda m, a, out: (handle.remove(), out * 2)[1])
        elif self.kind == "bound":
            self.linear.register_forward_hook(Scaler())

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.kind == "tensor" and y.requires_grad:
            y.register_hook(lambda g: (self.seen.append(float(g.norm())), g * 0.9)[1])
        return y

    def facts(self) -> Any:
        return self.kind, list(self.seen), len(self.linear._forward_hooks)


class Hidden:
    """Holds what nobody looks at."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Scaler:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        self.count += 1
        return out * (1 + 0.1 * (self.count % 3))


class Scripted(Part):
    def __init__(self) -> None:
        super().__init__()
        self.script = torch.jit.trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), torch.zeros(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.script(x.to(self.linear.weight.dtype)) * self.linear(x)


class Flipping(Part):
    """Changes a training flag, or requires_grad, of what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.turn = nn.Dropout(0.2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        self.drop.train(self.turn % 2 == 0)
        return self.drop(torch.tanh(self.linear(x)))

    def facts(self) -> Any:
        return self.turn, self.drop.training


PARTS: tuple[type[Part], ...] = (
    Plain, Dropped, Normed, Spectral, Averaging, Averaging, Counting, Counting, Memo, Remembering, Books, Branching,
    OwnStream, Catching, Differentiating, Functional, Checkpointed, Custom, InPlace, Mixed, Recurrent, Attending,
    Hooked, Hooked, Flipping,
)  # fmt: skip
