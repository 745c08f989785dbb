from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from spillway.errors import FileFormatError
from spillway.ir.sealed import encoded, seal, sealed
from spillway.pilots import sample_files
from spillway.pilots.architecture import Architecture
from spillway.pilots.paths import BaseType, OpSignature, ParameterStorage, PathOp, Sample, Site
from spillway.pilots.sample_files import RecordedSamples, read_samples, write_samples


def recorded() -> RecordedSamples:
    known = Architecture("toy", BaseType.CNN)
    known.statements["gate"] = ("if is_open",)
    weight = known.parameter(ParameterStorage("weight", 64))
    ops = [known.op(PathOp(Site("gate", 0, number), "aten.mm.default", (weight,))) for number in range(3)]
    signature = known.signature(OpSignature("aten.mm.default", (2, 3, 0), 24, 36, 100))
    samples = []
    for step, keys in enumerate((ops, ops[:2], ops)):
        path = known.path(keys, [0, *range(len(keys))], range(len(keys) - 1))
        samples.append(
            Sample(
                step=step, sizes=(3.0, 0.5), structure=(1.0, -1.0), embedding=np.array([0.25, step], np.float32),
                base=known.base, path=path, signatures=np.full(len(keys), signature, np.int32),
                hidden=np.ones((1, 2), np.float32), asked_at=np.array([1], np.int32), loss=1.5,
            )
        )  # fmt: skip
    return RecordedSamples(architecture=known, samples=tuple(samples), facts={"seed": 0})


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file, given = tmp_path / "samples.gz", recorded()
    write_samples(file, given)
    read = read_samples(file)
    assert read.facts == {"seed": 0}
    assert str(read.architecture) == str(given.architecture)
    assert read.architecture.ops == given.architecture.ops
    assert read.architecture.parts == given.architecture.parts
    assert read.samples[0].path is read.samples[2].path
    for one, other in zip(read.samples, given.samples, strict=True):
        assert (one.step, one.sizes, one.structure) == (other.step, other.sizes, other.structure)
        assert one.loss == other.loss
        for name in ("embedding", "signatures", "hidden", "asked_at"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("keys", "starts", "operands"):
            assert np.array_equal(getattr(one.path, name), getattr(other.path, name))


def test_files_of_the_first_version_are_read(tmp_path: Path) -> None:
    records = list(sample_files._records(recorded()))
    records[0]["version"] = 1
    first = [{name: item for name, item in record.items() if name != "structure"} for record in records]
    (tmp_path / "old.gz").write_bytes(gzip.compress(sealed(iter(first))))
    assert [one.structure for one in read_samples(tmp_path / "old.gz").samples] == [(), (), ()]


def lines(tmp_path: Path) -> list[bytes]:
    write_samples(tmp_path / "samples.gz", recorded())
    return gzip.decompress((tmp_path / "samples.gz").read_bytes()).splitlines(keepends=True)


def refused(tmp_path: Path, content: bytes) -> str:
    file = tmp_path / "damaged"
    file.write_bytes(content)
    with pytest.raises(FileFormatError) as caught:
        read_samples(file)
    return str(caught.value)


def test_a_file_that_is_cut_damaged_newer_or_foreign_is_refused(tmp_path: Path) -> None:
    whole = lines(tmp_path)
    assert "2 paths and 2 samples follow of the 2 and 3" in refused(tmp_path, b"".join(whole[:-1]))
    assert "its checksum does not fit" in refused(tmp_path, b"".join(whole).replace(b'"loss":1.5', b'"loss":2.5'))
    assert "its checksum does not fit" in refused(tmp_path, b"".join([whole[0], *whole[2:]]))
    assert "written in version 9" in refused(tmp_path, whole[0].replace(b'"version":2', b'"version":9'))
    assert "this is not the first line of a file of samples" in refused(tmp_path, b'{"format":"other"}\n')
    assert "cut or damaged" in refused(tmp_path, gzip.compress(b"".join(whole))[:-20])


@pytest.mark.parametrize(
    ("line", "change", "sentence"),
    [
        (1, {"ops": [["gate", 0, 0, "aten.mm.default", [7]]]}, "touches a parameter that is not listed"),
        (1, {"signatures": [["aten.mm.default", [1, 2], 0, 0, 0]]}, "are not the three dimensions"),
        (1, {"parameters": [["weight", 64], ["weight", 64]]}, "listed twice"),
        (2, {"keys": "////fw=="}, "keys name what is not listed"),
        (2, {"starts": "AAAAAA=="}, "starts do not say where"),
        (2, {"operands": "!"}, "operands is no array in base64"),
        (3, {"path": 5}, "path 5 is listed twice, or not in its place"),
        (4, {"path": 5}, "took path 5, which is not listed"),
        (4, {"embedding": "AACAPg=="}, "more or fewer signatures or hidden states"),
        (5, {"sizes": [3.0]}, "sample 1 has (1, 2, 2) sizes, numbers of structure and of its embedding, and the first"),
        (5, {"structure": []}, "sample 1 has (2, 0, 2) sizes"),
        (4, {"signatures": "AAAAAA=="}, "more or fewer signatures or hidden states"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    tmp_path: Path, line: int, change: dict[str, object], sentence: str
) -> None:
    import json

    content, checksum = b"", 0
    for number, one in enumerate(lines(tmp_path)):
        record = json.loads(one)
        del record["crc32"]
        sealed, checksum = seal(encoded(record | (change if number == line else {})), checksum)
        content += sealed
    assert sentence in refused(tmp_path, content)
