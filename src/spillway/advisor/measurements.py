"""Measured steps from a CSV file: what each method took at each batch size, by network and hardware.

Columns are those of PAPAYA's published measurements. `hardware`, `network`, `algorithm`, `batch_size` and `peak_mb`
(10^6 bytes) have to be there, and `ips` (samples per second; -1 where memory ran out) or `batch_time_s`; where a row
has both, `ips` counts, as in the paper. `layer_num`, `hidden_size` and `fp16` tell networks of one name apart, `source`
runs that do not belong together; `peak_off_line_mb` has peaks that memory is not fitted to. Others are not looked at.
Of rows about the same step the last counts.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from math import isfinite
from pathlib import Path, PurePosixPath
from typing import Final, Literal, TypeAlias, final

from spillway.errors import FileFormatError
from spillway.ir.reading import content_of, fault_in, read_value, shown
from spillway.units import Bytes, MiB, Seconds

MB: Final = 10**6
"""Bytes; what the file counts in."""
OUT_OF_MEMORY: Final = -1.0
"""The throughput of a step that found no memory."""
NEEDED: Final = ("hardware", "network", "algorithm", "batch_size", "peak_mb")
LEAST: Final = 1e-15
MOST: Final = 10**15
"""Numbers beyond these are mistakes: products of them would be no numbers any more."""
SHAPE: Final = ("layer_num", "hidden_size", "fp16")
"""Columns that tell networks of one name apart."""
MOST_BYTES: Final[Bytes] = 64 * MiB
"""What is read of a file; PAPAYA's largest takes 40 KiB."""
_KINDS: Final = ("mem_", "speed_")
"""Files that begin so and go on alike hold memory and speed of the same runs."""

_Shape: TypeAlias = tuple[str, ...]
SIMULATED: Final = ", simulated"
"""Ends what hardware is called whose figures were not measured."""

Seen: TypeAlias = Literal["measured", "simulated"]
"""How figures were come by; every sentence and every name in JSON about them says which."""


def seen_on(hardware: str) -> Seen:
    """How figures of that hardware were come by."""
    return "simulated" if hardware.endswith(SIMULATED) else "measured"


@final
@dataclass(slots=True)
class Samples:
    """What was measured of one method."""

    seconds: dict[int, Seconds] = field(default_factory=dict)
    """Of a step, by batch size."""
    peaks: dict[int, float] = field(default_factory=dict)
    """Bytes, by batch size."""
    failed: set[int] = field(default_factory=set)
    """Batch sizes that found no memory, and never ran."""
    off_line: dict[int, float] = field(default_factory=dict)
    """Peaks that memory is not fitted to, bytes by batch size: no growth was seen there, or another moment has them."""
    ends: dict[int, tuple[float, float]] = field(default_factory=dict)
    """The least and the greatest peak of each batch size."""

    def add_peak(self, size: int, nbytes: float) -> None:
        """Take a peak; the last one of a batch size counts."""
        least, greatest = self.ends.get(size, (nbytes, nbytes))
        self.ends[size] = min(least, nbytes), max(greatest, nbytes)
        self.peaks[size] = nbytes

    @property
    def spread(self) -> float:
        """The largest ratio of two peaks of the same batch size: above 1 something besides the batch decides."""
        return max((greatest / least for least, greatest in self.ends.values()), default=1.0)

    @property
    def ran(self) -> set[int]:
        """Batch sizes that ran at least once."""
        return self.seconds.keys() | self.peaks.keys()

    def fastest_below(self, limit: float) -> tuple[int, float] | None:
        """Of batch sizes below `limit` that with the highest throughput, and that; None where no time was measured."""
        speeds = {size: size / seconds for size, seconds in self.seconds.items() if size < limit}
        return max(speeds.items(), key=lambda pair: pair[1], default=None)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One network on one kind of hardware, under several methods."""

    hardware: str
    network: str
    layers: str
    """As the file writes it; empty where it does not say."""
    hidden: str
    precision: str
    source: str
    """Where the runs are from; empty where the file does not say."""
    methods: Mapping[str, Samples]
    spread: tuple[float, ...] | None = None
    """Of simulated steps: measured seconds as multiples of simulated ones, 80 % between; None where nobody knows."""

    @property
    def seen(self) -> Seen:
        """Whether its figures were measured or simulated."""
        return seen_on(self.hardware)

    @property
    def title(self) -> str:
        """The network with what tells it from others of its name."""
        more = [f"{self.layers} layers" if self.layers else "", f"hidden {self.hidden}" if self.hidden else ""]
        return ", ".join(filter(None, (self.network, *more, self.precision)))

    @property
    def about(self) -> str:
        """That, where it ran, and where the runs are from."""
        return f"{self.title} on {self.hardware}{f' ({self.source})' if self.source else ''}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the file."""

    hardware: str
    network: str
    method: str
    source: str
    shape: _Shape
    size: int
    seconds: Seconds | None
    nbytes: float | None
    off_line: float | None
    """A peak, bytes, that memory is not fitted to."""
    failed: bool


def read_measurements(path: Path) -> list[Experiment]:
    """Every experiment of a file of which a step ran, in the order in which they begin.

    Rows of a failure that leave out the shape belong to the only shape of their source that it may be; where there are
    several they belong to none, as rows without a batch size do.

    Raises FileFormatError for a damaged or foreign file, and what the system raises.
    """
    rows, known = list(_rows(path)), dict[tuple[str, ...], set[_Shape]]()
    for row in rows:
        if not row.failed:
            known.setdefault((row.hardware, row.network, row.source), set()).add(row.shape)
    groups: dict[tuple[str, ...], dict[str, Samples]] = {}
    for row in rows:
        shapes = {row.shape}
        if row.failed:
            shapes = {
                shape for shape in known.get((row.hardware, row.network, row.source), ())
                if all(not mine or mine == yours for mine, yours in zip(row.shape, shape, strict=True))
            }  # fmt: skip
        if len(shapes) == 1:
            methods = groups.setdefault((row.hardware, row.network, row.source, *shapes.pop()), {})
            _take(methods.setdefault(row.method, Samples()), row)
    if not groups:
        raise FileFormatError("no row says how a step of some batch size went", path=path, line=1)
    return [
        Experiment(
            hardware=hardware, network=network, source=source, layers=layers, hidden=hidden, precision=precision,
            methods=methods,
        )
        for (hardware, network, source, layers, hidden, precision), methods in groups.items()
    ]  # fmt: skip


def _take(samples: Samples, row: Row) -> None:
    if row.failed:
        if row.size not in samples.ran:
            samples.failed.add(row.size)
        return
    samples.failed.discard(row.size)
    if row.seconds is not None:
        samples.seconds[row.size] = row.seconds
    if row.nbytes is not None:
        samples.add_peak(row.size, row.nbytes)
    if row.off_line is not None:
        samples.off_line[row.size] = row.off_line


def _rows(path: Path) -> Iterator[Row]:
    content = content_of(path, MOST_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise FileFormatError("it is not text in UTF-8", path=path, line=line) from error
    reader = csv.DictReader(StringIO(text, newline=""), restkey="")
    try:
        names = list(reader.fieldnames or ())
        missing = [name for name in NEEDED if name not in names]
        if not {"ips", "batch_time_s"} & set(names):
            missing.append("ips or batch_time_s")
        for name in (*NEEDED, "ips", "batch_time_s", *SHAPE):
            if names.count(name) > 1:
                raise FileFormatError(f"there are two columns {name}", path=path, line=1)
        if missing:
            raise FileFormatError(
                f"measurements need the columns {', '.join(NEEDED)} and ips or batch_time_s, and there is no "
                f"{', no '.join(missing)}",
                path=path, line=1,
            )  # fmt: skip
        for cells in reader:
            row = _row(path, reader.line_num, cells)
            if row is not None:
                yield row
    except csv.Error as error:
        raise FileFormatError(f"it is not CSV: {error}", path=path, line=max(reader.line_num, 1)) from error


def _row(path: Path, line: int, cells: Mapping[str, str | None]) -> Row | None:
    """What the line says of a step; None for one that says nothing."""
    if "" in cells or None in cells.values():
        raise FileFormatError("it has not as many cells as the header has", path=path, line=line)
    text = {name: (value or "").strip() for name, value in cells.items()}
    with fault_in(path, line):
        for name in ("hardware", "network", "algorithm", "source", *SHAPE):
            read_value(str, text.get(name, ""), name)
    for name in ("hardware", "network", "algorithm"):
        if not text[name]:
            raise FileFormatError(f"{name} is empty", path=path, line=line)
    names = ("ips", "batch_time_s", "peak_mb", "batch_size", "peak_off_line_mb")
    ips, seconds, peak, size, off_line = (_number(path, line, name, text.get(name, "")) for name in names)
    failed = ips == OUT_OF_MEMORY
    if size is None or (failed and size == 0) or (not failed and ips is None and seconds is None and peak is None):
        return None
    if size < 1 or size != int(size):
        raise FileFormatError(f"batch_size is {text['batch_size']}, not a whole number above 0", path=path, line=line)
    numbers = dict(zip(names, (None if failed else ips, seconds, peak, size, off_line), strict=True))
    for name, value in numbers.items():
        if value is not None and value <= 0:
            more = ", or -1 where memory ran out" if name == "ips" else ""
            raise FileFormatError(f"{name} is {text[name]}, not a number above 0{more}", path=path, line=line)
        if value is not None and not LEAST <= value <= MOST:
            raise FileFormatError(f"{name} is {text[name]}, which nothing takes or makes", path=path, line=line)
    # A file of memory and a file of speed: `a/mem_results_36.json` -> `a/results_36`.
    source = PurePosixPath(text.get("source", ""))
    kin = source.stem
    for kind in _KINDS:
        kin = kin.removeprefix(kind)
    return Row(
        hardware=text["hardware"], network=text["network"], method=text["algorithm"],
        source=str(source.parent / kin) if text.get("source") else "",
        shape=tuple(text.get(name, "") for name in SHAPE), size=int(size),
        seconds=None if failed else seconds if ips is None else size / ips,
        nbytes=None if failed or peak is None else peak * MB,
        off_line=None if failed or off_line is None else off_line * MB, failed=failed,
    )  # fmt: skip


def _number(path: Path, line: int, name: str, text: str) -> float | None:
    """None for an empty cell."""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise FileFormatError(f"{name} is {shown(text)}, not a number", path=path, line=line)
    return value


def write_measurements(
    path: Path, experiments: Sequence[Experiment], every_peak: Sequence[Mapping[str, Mapping[int, Bytes]]]
) -> None:
    """Write experiments as `read_measurements` reads them, so that the same answers follow. `every_peak` has, of each
    experiment, every method and size, those that memory is not fitted to as well: they get a column of their own,
    `peak_off_line_mb`. Raises OSError where the system does."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*NEEDED, "batch_time_s", "ips", "peak_off_line_mb", "layer_num", "hidden_size"))
        for experiment, peaks in zip(experiments, every_peak, strict=True):
            for method, samples in experiment.methods.items():
                for size in sorted({*samples.seconds, *samples.failed}):
                    on_line, peak = samples.peaks.get(size), peaks.get(method, {}).get(size)
                    writer.writerow((
                        experiment.hardware, experiment.network, method, size, "" if on_line is None else on_line / MB,
                        samples.seconds.get(size, ""), OUT_OF_MEMORY if size in samples.failed else "",
                        "" if peak is None or on_line is not None else peak / MB, experiment.layers, experiment.hidden,
                    ))  # fmt: skip
