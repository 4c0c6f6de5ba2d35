"""The fixed validation stream: the same bytes for every checkpoint of every route, proven by two hashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eval.job import Job
from fp4core import records

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Stream:
    """`rows` int64 [sequences, S + 1]; `sha256` of the tokens (row-major little-endian int32)."""

    rows: np.ndarray
    sha256: str
    file_sha256: str


def validation(job: Job) -> Stream:
    """The study's validation stream, its file and its tokens checked against data.json."""
    import numpy as np
    import pyarrow as pa

    path, file_sha256 = job.data_file("validation.arrow")
    column = pa.ipc.open_file(pa.memory_map(str(path))).read_all().column("tokens").combine_chunks()
    rows = column.flatten().to_numpy().astype(np.int64).reshape(len(column), -1)
    found = records.sha256_bytes(np.ascontiguousarray(rows, dtype="<i4").tobytes())
    expected = job.data()["validation"]["stream_sha256"]
    if found != expected:
        raise ValueError(
            f"{path}: tokens have sha256 {found}, data.json says {expected}; make the data again"
        )
    wanted = (job.study.validation.sequences, job.study.train.sequence + 1)
    if rows.shape != wanted:
        raise ValueError(
            f"{path}: {rows.shape[0]} sequences of {rows.shape[1]} tokens, "
            f"the study needs {wanted[0]} of {wanted[1]}"
        )
    return Stream(rows, found, file_sha256)
