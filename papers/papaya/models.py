"""PAPAYA's five models from their configurations, to be recorded on fake tensors; nothing is downloaded.

Assumed, after the published scripts: ResNets in fp32 with SGD; BERT on sentences of 128 tokens, Swin-Large and GPT-3
small (512 tokens) in mixed precision with Adam, attention scores in memory. SGD and AdamW go parameter by parameter, as
torch's did by default until 2.0.

BERT's mixed precision is that of CUDA's autocast, which the CPU's is not: softmax and layer norm are float32
(`as_on_cuda`). Swin's is Apex's O1, whose list of float32 functions has GELU too. GPT is fairseq's with `--fp16`:
every parameter and activation is a half, a float32 copy of each parameter is trained by one fused op, and GELU is
computed in float32. Swin's script trains through `DistributedDataParallel`, whose buckets hold its gradients once
more, takes the loss's scale out of gradients and clips them. Softmax is torch 1.10's (`Softmax`).
Gradients are set to zero and stay, as was torch's default; fairseq gives its halves up. Dropout is CUDA's single op
with a mask of a byte a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from benchmarks.models import bottleneck_resnet, built, built_as, encoder, pictures_of, repeated, swin_transformer
from papers.networks import CLASSES, SIDE, WIDTH, dropout_of_cuda, sentences_of, widen
from spillway.workloads import Workload

LENGTH: Final = 128
"""Tokens of a sentence for BERT."""
CONTEXT: Final = 512
"""Tokens of a sample for GPT."""


def resnet(batch: int, *, side: int = SIDE, depths: tuple[int, ...] = (3, 4, 6, 3), wide: bool = False) -> Workload:
    """ResNet-50 (He et al. 2016), or with twice the channels inside blocks (Zagoruyko and Komodakis 2016)."""
    model = bottleneck_resnet(depths, WIDTH, CLASSES)
    if wide:
        widen(model)
    return _workload("pictures", model, pictures_of(batch, side), batch, half=False)


def swin(batch: int, *, width: int = 192, depths: tuple[int, ...] = (2, 2, 18, 2), side: int = SIDE) -> Workload:
    """Swin-Large (Liu et al. 2021)."""
    settings = {"image_size": side, "drop_path_rate": 0.2, "num_labels": CLASSES, "attn_implementation": "eager"}
    model = swin_transformer(depths, width, **settings)
    parameters = list(model.parameters())
    buckets = torch.zeros(sum(one.numel() for one in parameters))
    model.register_buffer("buckets", buckets)
    workload = _workload("pictures", model, pictures_of(batch, side), batch, half=True, float32=("gelu",))

    def exchange(*_: object) -> None:
        for one, bucket in zip(parameters, buckets.split([one.numel() for one in parameters]), strict=True):
            bucket.view_as(one).copy_(one.grad)
            one.grad.copy_(bucket.view_as(one))
        torch._foreach_mul_([one.grad for one in parameters], 1 / 65536)
        nn.utils.clip_grad_norm_(parameters, 5.0, foreach=False)

    workload.optimizers[0].register_step_pre_hook(exchange)
    return workload


def bert(batch: int, *, layers: int = 24, hidden: int = 1024, length: int = LENGTH) -> Workload:
    """BERT-large, which says which of two classes a sentence is of."""
    model = built("BertForSequenceClassification", vocab_size=28996, **encoder(layers, hidden))
    inputs = sentences_of(batch, length) | {"labels": torch.zeros(batch).long()}
    return _workload("bert", model, inputs, batch, half=True)


def gpt(batch: int, *, layers: int = 12, hidden: int = 768, length: int = CONTEXT) -> Workload:
    """GPT-3 small (Brown et al. 2020, table 2.1), a language model."""
    model = built_as(
        torch.float16, "GPT2LMHeadModel", n_layer=layers, n_embd=hidden, n_head=max(hidden // 64, 1),
        n_positions=length, use_cache=False, attn_implementation="eager", activation_function="gelu", attn_pdrop=0.0,
    )  # fmt: skip
    causal = torch.ones((1, 1, length, length), dtype=torch.bool).tril()
    words = torch.full((batch, length), 7)
    inputs = {"input_ids": words, "attention_mask": causal, "labels": words.clone()}

    @contextmanager
    def around() -> Iterator[None]:
        keeping = replaced("softmax", lambda _, x, dim=-1, **kwargs: Softmax.apply(x, dim))
        with dropout_of_cuda(), keeping, replaced("gelu", lambda gelu, x: gelu(x.float()).half()):
            yield

    return repeated("gpt", model, inputs, MasterAdam(model.parameters()), size=batch, around=around)


@final
class MasterAdam(torch.optim.Optimizer):
    """Adam on a float32 copy of each half parameter, gradients copied to float32 and weights back, as fairseq's
    `FP16Optimizer` and Apex's `FusedAdam` do it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        for parameter in self._parameters():
            master = parameter.detach().float()
            self.state[parameter] = {
                "master": master, "gradient": torch.zeros_like(master), "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master), "step": torch.zeros(()),
            }  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update. Takes no closure."""
        states = [self.state[parameter] for parameter in self._parameters()]
        for parameter, state in zip(self._parameters(), states, strict=True):
            state["gradient"].copy_(parameter.grad)
        lists = [[state[key] for state in states] for key in ("master", "gradient", "exp_avg", "exp_avg_sq")]
        adamw(
            *lists, [], [state["step"] for state in states], fused=True, amsgrad=False, beta1=0.9, beta2=0.98,
            lr=1e-4, weight_decay=0.01, eps=1e-8, maximize=False,
        )  # fmt: skip
        for parameter, state in zip(self._parameters(), states, strict=True):
            parameter.copy_(state["master"])

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"])


BUILDS: Final[Mapping[str, Callable[..., Workload]]] = {
    "ResNet-50": resnet, "Wide-ResNet-50": partial(resnet, wide=True), "Bert-Large": bert, "Swin-Large": swin,
    "GPT-Small": gpt,
}  # fmt: skip
"""By the paper's names; called with the batch size."""

HALF: Final = ("Bert-Large", "Swin-Large", "GPT-Small")
"""In mixed precision."""


@contextmanager
def as_on_cuda(*float32: str) -> Iterator[None]:
    """Within, autocast is on and softmax and layer norm are float32, as CUDA's has them; and those functions too."""
    with ExitStack() as stack:
        for name in ("layer_norm", *float32):
            stack.enter_context(replaced(name, lambda usual, x, *args, **kwargs: usual(x.float(), *args, **kwargs)))
        stack.enter_context(replaced("softmax", lambda _, x, dim=-1, **kwargs: Softmax.apply(x.float(), dim)))
        stack.enter_context(torch.autocast("cpu", dtype=torch.float16))
        yield


@final
class Softmax(torch.autograd.Function):
    """Softmax of torch 1.10, whose backward was given the input too, for its type: autograd saves it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        """The op as it is."""
        result = torch._softmax(x, dim, False)
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The op as it is; an op of no work reads the input, so that it is seen to be needed."""
        x, result = ctx.saved_tensors
        x.new_empty(0)
        return torch._softmax_backward_data(gradients[0], result, ctx.dim, x.dtype), None


@contextmanager
def replaced(name: str, other: Callable[..., Tensor]) -> Iterator[None]:
    """Within, a function of `torch.nn.functional` is another, which is called with the usual one and its arguments."""
    functional: Any = nn.functional
    usual = getattr(functional, name)
    setattr(functional, name, partial(other, usual))
    try:
        yield
    finally:
        setattr(functional, name, usual)


def _workload(
    name: str, model: nn.Module, batch: Mapping[str, Tensor], size: int, *, half: bool, float32: tuple[str, ...] = ()
) -> Workload:
    @contextmanager
    def around() -> Iterator[None]:
        with dropout_of_cuda(), as_on_cuda(*float32) if half else nullcontext():
            yield

    parameters, loop = list(model.parameters()), {"foreach": False, "fused": False}
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4, **loop)
    if half:
        optimizer = torch.optim.AdamW(parameters, lr=5e-5, **loop)
    optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)  # type: ignore[method-assign]
    return repeated(name, model, batch, optimizer, size=size, around=around)
