"""Numbers on their way between a device and the host, where neither may wait for the other."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Copies of tensors of one device in host memory, whole after ``wait``.

    The copies and an event behind them are queued on the device's current stream, so ``wait`` waits for what
    was queued before them and for nothing that is queued later. On a CPU they are made at once.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [
            # to pageable memory the copy itself would wait for the device
            torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda).copy_(t, non_blocking=True)
            for t in tensors
        ]
        device = next((t.device for t in tensors if t.is_cuda), None)
        self._made = None if device is None else torch.cuda.current_stream(device).record_event()

    def wait(self) -> list[Tensor]:
        """The copies, shapes and dtypes as given."""
        if self._made is not None:
            self._made.synchronize()
        return self._copies


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor's copy on ``device``, queued: from pageable memory it would wait for what is queued."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
