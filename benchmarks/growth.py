"""Bytes of every value at sizes that nobody recorded, from steps of a few other sizes, beside those steps recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks import columns
from benchmarks.models import bottleneck_resnet, built, encoder, pictures_of, repeated, swin_transformer
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from spillway.costs import Scaling, alike, fit_scaling
from spillway.ir import Step
from spillway.recording import record
from spillway.workloads import Workload

# ---------------------------------------------------------------------- the models


_VOCABULARY: Final = 1000


def bert(size: int, *, layers: int = 12, width: int = 768, batch: int = 8) -> Workload:
    """BERT-base that guesses masked words, of `size` words; attention as the papers had it, scores in memory."""
    settings = encoder(layers, width) | {"vocab_size": _VOCABULARY, "max_position_embeddings": 4096}
    return _of_words("BERT", built("BertForMaskedLM", **settings), size, batch)


def gpt2(size: int, *, layers: int = 12, width: int = 768, batch: int = 8) -> Workload:
    """GPT-2 small that guesses the next of `size` words."""
    model = built(
        "GPT2LMHeadModel", vocab_size=_VOCABULARY, n_embd=width, n_layer=layers, n_head=width // 64, n_positions=4096,
        attn_implementation="eager", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _of_words("GPT-2", model, size, batch)


def t5(size: int, *, layers: int = 12, width: int = 768, batch: int = 8) -> Workload:
    """T5-base that turns `size` words into a third as many, the odd ones cut off."""
    model = built(
        "T5ForConditionalGeneration", vocab_size=_VOCABULARY, d_model=width, d_kv=64, d_ff=4 * width, num_layers=layers,
        num_heads=width // 64, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return _of_words("T5", model, size, batch, size // 3)


def swin(size: int, *, depths: tuple[int, ...] = (2, 2, 6, 2), width: int = 96, batch: int = 8) -> Workload:
    """Swin-T on pictures of `size` x `size`, padded to whole patches of 4 and whole windows of 7."""
    return _workload("Swin", swin_transformer(depths, width), pictures_of(batch, size))


def resnet(size: int, *, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, batch: int = 8) -> Workload:
    """ResNet-50 on pictures of `size` x `size`, halved five times."""
    return _workload("ResNet", bottleneck_resnet(depths, width, 100), pictures_of(batch, size))


BUILDS: Final[Mapping[str, Callable[..., Workload]]] = {
    "BERT": bert, "GPT-2": gpt2, "T5": t5, "Swin": swin, "ResNet": resnet,
}  # fmt: skip
"""By their names in the table, called with the size."""


def _of_words(name: str, model: nn.Module, size: int, batch: int, answer: int | None = None) -> Workload:
    words = torch.ones(batch, size, dtype=torch.int64)
    return _workload(name, model, {"input_ids": words, "labels": words[:, :answer].clone()})


def _workload(name: str, model: nn.Module, batch: Mapping[str, Tensor]) -> Workload:
    return repeated(name, model, batch, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True))


# ---------------------------------------------------------------------- what is foretold


_LENGTHS: Final = (32, 50, 77, 101, 150, 211, 300)
_OTHER_LENGTHS: Final = (20, 64, 128, 255, 512)
_SIDES: Final = (97, 128, 150, 176, 200, 231, 256, 300)
_OTHER_SIDES: Final = (80, 160, 224, 333, 448)
_WINDOWED_SIDES: Final = (256, 320, 416, 480, 576, 704, 800, 928, 1152)
_OTHER_WINDOWED_SIDES: Final = (288, 448, 640, 768, 1024)
"""Multiples of 32, as of all strides. 448 is one of 7 windows too, nothing is padded, and other ops run."""


@frozen
class Model:
    """What is recorded at which sizes."""

    name: str
    options: Mapping[str, Any]
    recorded: Sequence[int]
    """Sizes that laws are found from."""
    unseen: Sequence[int]
    """Sizes that are foretold."""
    at_most: float | None
    """The target for bytes that are wrong, as a share of all bytes of all storages; none if it is only stated."""


def run(size: Sequence[Model], tell: Tell) -> Result:
    """Every model at every size."""
    rows = [row for model in size for row in _rows(model, tell)]
    return Result(
        title="Bytes of every storage at sizes that were not recorded",
        columns=COLUMNS,
        rows=rows,
        checks=[check for model in size for check in _checks(model, rows)],
        notes=NOTES,
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(model="model", size="size", recorded="recorded at", ops="ops", storages="storages"),
    *columns.text(exact="exact to the byte", doubtful="known to be doubtful", flops_exact="ops with exact flops"),
    *columns.nbytes(peak_bytes="plain peak", foretold_bytes="foretold"),
    *columns.shown("{:.4%}".format, wrong_share="bytes wrong"),
    *columns.shown("{:.2%}".format, worst_share="worst storage"),
)

NOTES: Final = (
    "Steps are recorded on fake tensors, batch 8, AdamW. Of BERT-base, GPT-2 small, T5-base, Swin-T and ResNet-50 "
    "a few of the layers, which are alike. Sizes are words of a sequence, or pixels along a side. Laws "
    "are polynomials of the size, of ceil(size/q) or of floor(size/q), found exactly in rational numbers. T5 turns a "
    "sequence into one of a third of its length.",
    "Bytes wrong: the sum of what each storage is off, as a share of the sum of all. A size whose step is of other ops "
    "than the recorded ones, or fewer than three recorded steps of the same ops, has no figures, and says so.",
)


def _rows(model: Model, tell: Tell) -> list[Row]:
    steps: dict[int, Step] = {}
    for size in (*model.recorded, *model.unseen):
        tell(f"{model.name} at {size}")
        steps[size] = record(partial(BUILDS[model.name], size, **model.options), fake=True).step

    @cache
    def grown(*sizes: int) -> Scaling:
        return fit_scaling({at: steps[at] for at in sizes})

    return [_row(model, steps, size, grown) for size in model.unseen]


def _row(model: Model, steps: Mapping[int, Step], size: int, grown: Callable[..., Scaling]) -> Row:
    """What the sizes whose steps are of the same ops foretell about this one."""
    (group,) = (group for group in alike({at: steps[at] for at in (*model.recorded, size)}) if size in group)
    base = [at for at in group if at != size]
    there = steps[size]
    told = {"model": model.name, "size": size, "ops": len(there.ops), "storages": len(there.storages)}
    if len(base) < 3:
        return {**told, "recorded": f"of the same ops: {', '.join(map(str, base)) or 'none'}"}
    return {**told, "recorded": ", ".join(map(str, base)), **_figures(grown(*base), there, size)}


def _figures(scaling: Scaling, there: Step, size: int) -> dict[str, Any]:
    foretold = scaling.step_at(size)
    pairs = [(mine.nbytes, true.nbytes) for mine, true in zip(foretold.storages, there.storages, strict=True)]
    return {
        "exact": sum(mine == true for mine, true in pairs),
        "doubtful": len(scaling.doubtful(size)),
        "flops_exact": sum(mine.flops == true.flops for mine, true in zip(foretold.ops, there.ops, strict=True)),
        "traffic_exact": sum(mine.traffic == true.traffic for mine, true in zip(foretold.ops, there.ops, strict=True)),
        "peak_bytes": there.plain_peak(),
        "foretold_bytes": foretold.plain_peak(),
        "wrong_share": sum(abs(mine - true) for mine, true in pairs) / max(sum(true for _, true in pairs), 1),
        "worst_share": max(abs(mine - true) / max(true, 1) for mine, true in pairs),
    }


def _checks(model: Model, rows: Sequence[Row]) -> list[Check]:
    if model.at_most is None:
        return []
    mine = [row for row in rows if row["model"] == model.name]
    foretold = [row for row in mine if "exact" in row]
    missing = Check(what=f"{model.name}: sizes without figures", measured=len(mine) - len(foretold), at_most=0)
    if model.at_most == 0:
        wrong = sum(row["storages"] - row["exact"] for row in foretold)
        return [Check(what=f"{model.name}: storages not exact to the byte", measured=wrong, at_most=0), missing]
    worst = max((row["wrong_share"] for row in foretold), default=0.0)
    return [Check(what=f"{model.name}: bytes wrong, share", measured=worst, at_most=model.at_most), missing]


def _words(name: str, layers: int, at_most: float) -> Model:
    return Model(
        name=name, options={"layers": layers}, recorded=_LENGTHS, unseen=_OTHER_LENGTHS, at_most=at_most
    )  # fmt: skip


_TINY: Final = {"layers": 1, "width": 64, "batch": 2}

BENCHMARK: Final = Benchmark(
    name="growth",
    run=run,
    full=(
        _words("BERT", 4, 0), _words("GPT-2", 4, 0), _words("T5", 2, 0.002),
        Model(name="Swin", options={"depths": (2, 1, 1, 1)}, recorded=_WINDOWED_SIDES, unseen=_OTHER_WINDOWED_SIDES,
              at_most=None),
        Model(name="ResNet", options={"depths": (1, 1, 1, 1)}, recorded=_SIDES, unseen=_OTHER_SIDES, at_most=None),
    ),
    quick=(
        Model(name="BERT", options=_TINY, recorded=(9, 16, 21, 30), unseen=(25,), at_most=0),
        Model(name="ResNet", options={"depths": (1,), "width": 8, "batch": 2}, recorded=(33, 48, 65, 90), unseen=(71,),
              at_most=None),
    ),
)  # fmt: skip
