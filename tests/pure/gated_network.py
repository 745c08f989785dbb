"""A network whose layers are skipped by what it computes, in NumPy: its steps as samples, without torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from spillway.pilots.architecture import Architecture
from spillway.pilots.paths import BaseType, OpSignature, ParameterStorage, PathOp, Sample, Site

WIDTH = 8
BYTES = 1 << 20


class GatedNetwork:
    """Layers, each behind a gate on the hidden state; a gate hands its number to the host.

    Every layer is two ops on its own parameters; before it stands the op that asks, behind all of them a head.
    """

    def __init__(self, layers: int = 6, *, seed: int = 0, name: str = "gated") -> None:
        self.architecture = Architecture(name, BaseType.TRANSFORMER)
        self._random = np.random.default_rng(seed)
        self._weights = self._random.normal(size=(layers, WIDTH, WIDTH)) / WIDTH**0.5
        self._gates = self._random.normal(size=(layers, WIDTH))
        self._steps = 0

    def samples(self, count: int) -> list[Sample]:
        """The next steps."""
        return [self._sample() for _ in range(count)]

    def _op(self, module: str, op: int, name: str, weight: bool) -> tuple[int, int]:
        architecture = self.architecture
        parameters = (architecture.parameter(ParameterStorage(f"{module}.weight{op}", BYTES)),) if weight else ()
        signature = OpSignature(name, (WIDTH, WIDTH, WIDTH), 4096, 1 << 20, 1 << 16)
        return architecture.op(PathOp(Site(module, 0, op), name, parameters)), architecture.signature(signature)

    def _sample(self) -> Sample:
        hidden = embedding = self._random.normal(size=WIDTH)
        found, states, asked_at = [self._op("embedding", 0, "aten.embedding.default", True)], [], []
        for layer, (weight, gate) in enumerate(zip(self._weights, self._gates, strict=True)):
            asked_at.append(len(found))
            states.append(hidden)
            found.append(self._op(f"gates.{layer}", 0, "aten._local_scalar_dense.default", False))
            if gate @ hidden > 0:
                found += [self._op(f"layers.{layer}", op, "aten.addmm.default", True) for op in range(2)]
                hidden = hidden + np.tanh(weight @ hidden)
        found.append(self._op("head", 0, "aten.addmm.default", True))
        keys, signatures = zip(*found, strict=True)
        # Every op reads what the one in front of it created.
        path = self.architecture.path(keys, [0, *range(len(keys))], range(len(keys) - 1))
        self._steps += 1
        return Sample(
            step=self._steps - 1, sizes=(float(WIDTH),), embedding=embedding.astype(np.float32),
            base=BaseType.TRANSFORMER, path=path, signatures=np.array(signatures, np.int32),
            hidden=np.array(states, np.float32), asked_at=np.array(asked_at, np.int32),
        )  # fmt: skip


def decided(samples: list[Sample]) -> Iterator[int]:
    """How many layers each ran."""
    yield from ((len(sample.path) - 2 - len(sample.asked_at)) // 2 for sample in samples)
