"""A rank's part of a checkpoint as safetensors files, planned by torch.distributed.checkpoint, written later.

`dcp.save` with a ShardWriter agrees on who writes what and collects the tensors; `write` puts them on disk,
whenever and in whichever thread. A file is written tensor by tensor in pieces and hashed on the way: nothing
is held twice, and other threads run meanwhile (torch's own writer first builds the whole file in memory).
The bytes are those of torch's writer, but for its header's free-form part, which is sorted here so that equal
runs have equal files.

File: u64 length of the header, header (JSON, padded with spaces to a multiple of 8), tensors by name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_PIECE = 16 << 20


@dataclass
class Staging:
    """Host copies of one rank's tensors, allocated once and filled for each checkpoint; pinned for a GPU's.

    Costs as much host memory as the tensors take on the device: 12 bytes per parameter over all ranks.
    """

    _buffers: dict[str, Tensor] = field(default_factory=dict)

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """The host copy of `tensor`, complete after `settle`."""
        held = self._buffers.get(name)
        if held is None or held.shape != tensor.shape:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = held
        return held.copy_(tensor, non_blocking=True)

    def settle(self) -> None:
        """Wait for the copies: the next optimizer step changes what they are made from."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class ShardWriter(HuggingFaceStorageWriter):
    """Storage of one `dcp.save`: `indices` says which of the rank's files each tensor goes to, from 1.

    With `staging` the tensors are copied, and may change before `write`; without they must not.
    """

    def __init__(self, directory: Path, *, indices: dict[str, int], staging: Staging | None) -> None:
        super().__init__(str(directory), fqn_to_index_mapping=indices, save_distributed=True)
        self._directory, self._indices, self._staging = Path(directory), indices, staging
        self._files: dict[str, list[tuple[str, list[int], Tensor]]] = {}

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the ranks' files, from 1."""
        return [
            dataclasses.replace(plan, storage_data={"shard_index": rank})
            for rank, plan in enumerate(plans, 1)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Collect what this rank is to write."""
        last = max(self._indices.values())
        for item in plan.items:
            name, offsets = item.index.fqn, list(item.tensor_data.chunk.offsets)
            tensor = planner.resolve_data(item).detach()
            if self._staging is not None:
                tensor = self._staging.copy(name, tensor)
            place = f"model-{self._indices[name]:05d}-of-{last:05d}.safetensors"
            file = f"shard-{plan.storage_data['shard_index']:05d}-{place}"
            self._files.setdefault(file, []).append((name, offsets, tensor))
        if self._staging is not None:
            self._staging.settle()
        collected: Future[list[Any]] = Future()
        collected.set_result([])
        return collected

    def write(self) -> dict[str, dict[str, Any]]:
        """Write this rank's files through to the disk; returns name -> {bytes, sha256}."""
        return {name: _write(self._directory / name, parts) for name, parts in sorted(self._files.items())}


def open_file(path: Path) -> IO[bytes]:
    return open(path, "wb", buffering=0)


def _write(path: Path, parts: list[tuple[str, list[int], Tensor]]) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with open_file(path) as file:
        for piece in _pieces(parts):
            view = memoryview(piece)
            digest.update(view)
            size += len(view)
            while len(view):
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _pieces(parts: list[tuple[str, list[int], Tensor]]) -> Iterator[Any]:
    yield _header(parts)
    for _, _, tensor in sorted(parts, key=lambda part: part[0]):
        data = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
        for start in range(0, len(data), _PIECE):
            yield data[start : start + _PIECE]


def _header(parts: list[tuple[str, list[int], Tensor]]) -> bytes:
    offsets = {name: {"saved_offsets": places} for name, places, _ in parts}
    header: dict[str, Any] = {
        "__metadata__": {
            "DCP_SHARDING_INFO": json.dumps(offsets),
            "DCP_VERSION": "1.0",
            "format": "pt",
        }
    }
    start = 0
    for name, _, tensor in sorted(parts, key=lambda part: part[0]):
        end = start + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text
