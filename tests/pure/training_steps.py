"""Random training steps with everything that recorded ones have: dead values, writes in place, states, residuals."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from spillway.ir import Kind, Op, Phase, Step, StorageInfo, Value


class Recorder:
    """Writes a step down, op by op."""

    def __init__(self) -> None:
        self.storages: list[StorageInfo] = []
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.current: dict[int, int] = {}

    def source(self, nbytes: int, kind: Kind) -> int:
        """A storage that is there before the step and after it."""
        number = len(self.storages)
        self.storages.append(
            StorageInfo(
                id=number, nbytes=nbytes, kind=kind, alive_from=0, alive_until=0, present_at_start=True,
                present_at_end=True,
            )
        )  # fmt: skip
        self._value(number, 0)
        return number

    def op(self, name: str, phase: Phase, reads: list[int], sizes: list[int], *, writes: tuple[int, ...] = (),
           kind: Kind = Kind.ACTIVATION, seconds: float = 1.0, replayable: bool = True) -> list[int]:  # fmt: skip
        """One op that reads storages, makes new ones and writes to others; the new ones."""
        read = tuple(dict.fromkeys(self.current[storage] for storage in reads))
        made = []
        for nbytes in sizes:
            number = len(self.storages)
            self.storages.append(
                StorageInfo(id=number, nbytes=nbytes, kind=kind, alive_from=len(self.ops), alive_until=0)
            )
            made.append(number)
        created = [self._value(number, 0) for number in made]
        created += [self._value(storage, self.values[self.current[storage]].version + 1) for storage in writes]
        self.ops.append(
            Op(number=len(self.ops), name=name, phase=phase, reads=read, creates=tuple(created), seconds=seconds,
               replayable=replayable)
        )  # fmt: skip
        return made

    def _value(self, storage: int, version: int) -> int:
        self.values.append(Value(id=len(self.values), storage=storage, version=version))
        self.current[storage] = len(self.values) - 1
        return len(self.values) - 1

    def step(self, kept: set[int] = frozenset()) -> Step:  # type: ignore[assignment]
        """Everything dies after its last use but what is there at both ends, and `kept`."""
        last = {self.values[value].storage: op.number for op in self.ops for value in (*op.reads, *op.creates)}
        ops = len(self.ops)
        storages = tuple(
            replace(storage, alive_until=ops, present_at_end=True)
            if storage.present_at_end or storage.id in kept
            else replace(storage, alive_until=last[storage.id] + 1)
            for storage in self.storages
        )
        return Step(storages=storages, values=tuple(self.values), ops=tuple(self.ops))


def training_step(seed: int, layers: int = 6, scale: int = 8192) -> Step:
    """Layers with parameters, dropout that cannot be replayed, activations in place, residuals, Adam-like updates."""
    random = Random(seed)
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    recorder = Recorder()
    weights = [recorder.source(random.randint(1, 4) * scale, Kind.PARAMETER) for _ in range(layers)]
    states = [recorder.source(2 * recorder.storages[weight].nbytes, Kind.OPTIMIZER_STATE) for weight in weights]
    x = recorder.source(random.randint(1, 8) * scale, Kind.INPUT)
    saved: list[tuple[list[int], int, bool]] = []
    earlier = x
    for layer, weight in enumerate(weights):
        size = random.randint(1, 8) * scale
        residual = random.random() < 0.4
        (made,) = recorder.op("mm", forward, [x, weight], [size], seconds=random.randint(1, 5))
        keeps = [x]
        if random.random() < 0.5:
            recorder.op("relu_", forward, [made], [], writes=(made,))
        if random.random() < 0.4:
            out, mask = recorder.op(
                "dropout", forward, [made], [size, size // 4], replayable=random.random() < 0.7
            )  # fmt: skip
            keeps, made = [*keeps, mask], out
        if random.random() < 0.4:
            (scaled,) = recorder.op("mul", forward, [made], [size])  # `made` dies here, unless something keeps it
            if random.random() < 0.5:
                keeps.append(made)
            made = scaled
        if residual:
            (made,) = recorder.op("add", forward, [made, earlier], [size])
        saved.append((keeps, layer, residual))
        if layer % 2:
            earlier = made
        x = made
    (gradient,) = recorder.op("loss", forward, [x], [64])
    sums = []
    for keeps, layer, _ in reversed(saved):
        size = random.randint(1, 8) * scale
        (above,) = recorder.op("back", backward, [gradient, weights[layer], *keeps[1:]], [size], seconds=2.0)
        nbytes = recorder.storages[weights[layer]].nbytes
        (of_weight,) = recorder.op("wgrad", backward, [gradient, keeps[0]], [nbytes], kind=Kind.GRADIENT)
        sums.append((layer, of_weight))
        gradient = above
    for layer, of_weight in sums:
        recorder.op("adam_", Phase.OPTIMIZER, [weights[layer], of_weight, states[layer]], [],
                    writes=(weights[layer], states[layer]))  # fmt: skip
    return recorder.step()


def any_step(seed: int, ops: int = 40, largest: int = 1 << 20) -> Step:
    """Ops that read, make and write whatever there is; storages that die anywhere, at either end of the step too, and
    some that are read by no op."""
    random = Random(seed)
    recorder, living = Recorder(), list[int]()

    def size() -> int:
        return random.choice((0, 64, random.randint(4096, largest), largest))

    for _ in range(random.randint(1, 5)):
        living.append(recorder.source(size(), random.choice(list(Kind))))
    sources, ends = len(living), {number: 0 for number in living if random.random() < 0.15}
    living = [number for number in living if number not in ends]
    for number in range(ops):
        reads = random.sample(living, min(len(living), random.randrange(4)))
        writes = tuple(random.sample(living, 1)) if living and random.random() < 0.2 else ()
        phase = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)[min(number * 5 // (2 * ops), 2)]
        living += recorder.op(
            "any", phase, reads, [size() for _ in range(random.choice((0, 1, 1, 2)))], writes=writes,
            seconds=random.choice((0.0, 1e-5, 1e-3)), replayable=random.random() < 0.8,
        )  # fmt: skip
        for dead in random.sample(living, min(len(living), random.choice((0, 0, 1, 1, 2)))):
            living.remove(dead)
            ends[dead] = number + 1
    storages = tuple(
        replace(storage, alive_until=ends.get(storage.id, ops), present_at_start=storage.id < sources,
                present_at_end=storage.id not in ends and random.random() < 0.7)
        for storage in recorder.storages
    )  # fmt: skip
    return Step(storages=storages, values=tuple(recorder.values), ops=tuple(recorder.ops))
