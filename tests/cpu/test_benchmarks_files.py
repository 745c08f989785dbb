"""Files with one thing changed, read by the verbs that read such files: one sentence, no traceback, no script."""

from __future__ import annotations

import pytest

from tests.cpu.benchmarks_quick import quick


@pytest.mark.long
def test_files_that_nobody_should_have_written_end_in_one_sentence() -> None:
    result = quick("files")
    assert {check.what: check.measured for check in result.checks if check.measured} == {}, result.notes
    assert [row["kind"] for row in result.rows if row["read"] + row["refused"] != row["files"]] == []
    assert sum(row["read"] for row in result.rows) > 20, "the files as they were are read"
    assert not any("unchanged" in note for note in result.notes)
