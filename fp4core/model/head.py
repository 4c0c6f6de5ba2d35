"""Output head and cross entropy: logits[T, V] = h[T, D] w[V, D]^T, loss = logsumexp(logits) - logits[target].

Variants (``ModelConfig.output_head``), report appendix B:

    variant            forward                       dh           dw
    bf16               BF16 operands                 BF16         BF16 operands
    lowp               MXFP8 h and w along D         BF16         BF16 operands
    lowp_mxfp8_wgrad   MXFP8 h and w along D         BF16         MXFP8 dlogits and h along T

GEMMs accumulate in FP32; logits and dlogits are rounded to BF16, softmax and loss are FP32, dw is summed in
FP32. With an FP32 h the "bf16" variant rounds nothing (the mode that is compared with Hugging Face's model).

The loss never holds more than one chunk of logits, in BF16: with one chunk they are kept for backward, with
more they are computed again, which costs one more head GEMM and gives the same bits. Their gradient takes
their place, so backward goes through the loss once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp4core.model.mxfp8 import BLOCK, mxfp8_round

VARIANTS = ("bf16", "lowp", "lowp_mxfp8_wgrad")
IGNORE = -100  # target of a position that has no loss


class OutputHead(nn.Module):
    """The untied head's weight [V, D], or none when the embedding's is passed in.

    ``forward(h, targets)``: h [..., D] -> logits [..., V] in h's dtype, or, with targets [...] int64, FP32
    losses [...], zero where the target is -100. These have one backward pass: it overwrites the logits.
    """

    def __init__(
        self, hidden: int, vocab: int, variant: str = "bf16", *, tied: bool = False, chunk: int = 4096
    ):
        super().__init__()
        if variant not in VARIANTS:
            raise ValueError(f"output head: got {variant!r}, needed one of {', '.join(VARIANTS)}")
        if chunk < BLOCK or chunk % BLOCK:
            raise ValueError(f"output head: got chunks of {chunk} tokens, needed a multiple of {BLOCK}")
        self.variant, self.chunk = variant, chunk
        self._room = _Room()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab, hidden))
        self._compiled = False

    def compile_losses(self) -> None:
        """Fuse the element-wise work of the loss: a few passes over the logits instead of a dozen."""
        self._compiled = True

    def forward(self, h: Tensor, targets: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        weight = self.weight if weight is None else weight
        if targets is None:
            return _Logits.apply(h, weight, self.variant)
        keep = torch.is_grad_enabled()  # nowhere to be seen inside
        # a compiler cannot follow what is kept from call to call, and plans memory itself
        room = None if torch.compiler.is_compiling() else self._room
        return _CrossEntropy.apply(h, weight, targets, self.variant, self.chunk, self._compiled, room, keep)


class _Room:
    """Logits of one chunk that stay allocated: the largest tensor of a step, wanted when memory is fullest.

    A device that is nearly full finds no room of that size between others, and waits while the allocator
    makes some.
    """

    def __init__(self) -> None:
        self._free: Tensor | None = None

    def borrow(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """[>= rows, columns] of ``like``'s type, from a past `give` where it has that shape."""
        free, self._free = self._free, None
        fits = free is not None and free.shape[0] >= rows and free.shape[1] == columns
        if fits and free.dtype == like.dtype and free.device == like.device:
            return free
        del free  # before there is another one
        with torch.inference_mode(False):  # training may use what an evaluation made
            return torch.empty((rows, columns), dtype=like.dtype, device=like.device)

    def give(self, room: Tensor) -> None:
        """Nobody reads ``room`` any more."""
        self._free = room

    def __deepcopy__(self, memo: dict) -> _Room:
        return _Room()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of operands that are exact in BF16 (or FP32 in FP32 mode), FP32 accumulation."""
    if a.dtype == torch.float32 or a.device.type == "cpu":
        return a.float() @ b.float()
    return a @ b


def _mxfp8(x: Tensor) -> Tensor:
    return mxfp8_round(x).to(torch.bfloat16)


def _weight_operand(w: Tensor, h: Tensor, variant: str) -> Tensor:
    return w.to(h.dtype) if variant == "bf16" else _mxfp8(w).to(h.dtype)


def _logits(h: Tensor, w_operand: Tensor, variant: str, out: Tensor | None = None) -> Tensor:
    operand = h if variant == "bf16" else _mxfp8(h).to(h.dtype)
    if out is not None and h.device.type == "cuda":
        return torch.mm(operand, w_operand.t(), out=out)
    logits = _product(operand, w_operand.t()).to(h.dtype)
    return logits if out is None else out.copy_(logits)


def _backward(dlogits: Tensor, h: Tensor, w: Tensor, variant: str) -> tuple[Tensor, Tensor]:
    """(dh in h's dtype, dw as the product gives it: FP32 or exact in it) of dlogits [T, V] in h's dtype."""
    dh = _product(dlogits, w.to(h.dtype)).to(h.dtype)
    if variant == "lowp_mxfp8_wgrad":
        left, right = _mxfp8(dlogits.t()).to(h.dtype), _mxfp8(h.t()).to(h.dtype)
        return dh, _product(left, right.t())
    return dh, _product(dlogits.t(), h)


class _Logits(torch.autograd.Function):
    """Logits [..., V] of h [..., D]."""

    @staticmethod
    def forward(ctx, h: Tensor, w: Tensor, variant: str) -> Tensor:
        ctx.save_for_backward(h, w)
        ctx.variant = variant
        return _logits(h.flatten(0, -2), _weight_operand(w, h, variant), variant).unflatten(0, h.shape[:-1])

    @staticmethod
    def backward(ctx, dlogits: Tensor):
        h, w = ctx.saved_tensors
        dh, dw = _backward(dlogits.flatten(0, -2), h.flatten(0, -2), w, ctx.variant)
        return dh.view(h.shape), dw.to(w.dtype), None


class _CrossEntropy(torch.autograd.Function):
    """FP32 losses [...] of h [..., D] and targets [...]; no view, as FSDP warns of an output that is one."""

    @staticmethod
    def forward(
        ctx,
        h: Tensor,
        w: Tensor,
        targets: Tensor,
        variant: str,
        chunk: int,
        fused: bool,
        shared: _Room | None,
        differentiable: bool,
    ) -> Tensor:
        ctx.shape = h.shape
        losses_of = _compiled(_chunk_losses) if fused else _chunk_losses
        h, flat = h.flatten(0, -2), targets.flatten()
        w_operand = _weight_operand(w, h, variant)
        losses, sums = [], []
        room = None if shared is None else shared.borrow(min(chunk, h.shape[0]), w.shape[0], h)
        for first in range(0, h.shape[0], chunk):
            part = h[first : first + chunk]
            logits = _logits(part, w_operand, variant, None if room is None else room[: part.shape[0]])
            loss, total = losses_of(logits, flat[first : first + chunk])
            losses.append(loss)
            sums.append(total)
        kept = differentiable and h.shape[0] <= chunk
        if room is not None and not kept:
            shared.give(room)
        ctx.variant, ctx.chunk, ctx.fused, ctx.shared = variant, chunk, fused, shared
        ctx.room = room if kept else None
        ctx.save_for_backward(h, w, flat, torch.cat(sums), *([logits] if kept else []))
        return torch.where(targets == IGNORE, 0.0, torch.cat(losses).view(targets.shape))

    @staticmethod
    def backward(ctx, grad: Tensor):
        h, w, targets, sums, *kept = ctx.saved_tensors
        grad = grad.flatten()
        w_operand = None if kept else _weight_operand(w, h, ctx.variant)
        gradient_of = _compiled(_logits_gradient) if ctx.fused else _logits_gradient
        dhs, dw = [], None
        rows = min(ctx.chunk, h.shape[0])
        room = None if kept or ctx.shared is None else ctx.shared.borrow(rows, w.shape[0], h)
        for first in range(0, h.shape[0], ctx.chunk):
            part = slice(first, first + ctx.chunk)
            if kept:
                logits = kept[0]
            else:
                out = None if room is None else room[: h[part].shape[0]]
                logits = _logits(h[part], w_operand, ctx.variant, out)
            dlogits = gradient_of(logits, sums[part], targets[part], grad[part])
            dh, chunk_dw = _backward(dlogits, h[part], w, ctx.variant)
            dhs.append(dh)
            # a lone chunk's is rounded no further; sums are FP32
            dw = (
                chunk_dw if h.shape[0] <= ctx.chunk else chunk_dw.float() if dw is None else dw.add_(chunk_dw)
            )
        if ctx.shared is not None:
            ctx.shared.give(ctx.room if kept else room)
        return torch.cat(dhs).view(ctx.shape), dw.to(w.dtype), *[None] * 6


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False)


def _chunk_losses(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(losses, log-sum-exp), FP32 [T], of logits [T, V]."""
    picked = logits.gather(1, target.clamp(min=0)[:, None])[:, 0].float()
    total = _log_sum_exp(logits)
    return total - picked, total


def _logits_gradient(logits: Tensor, total: Tensor, target: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the logits, in their dtype [T, V] and in their place."""
    return logits.copy_(_softmax_gradient(logits, total, target, grad))


def _log_sum_exp(logits: Tensor) -> Tensor:
    """FP32 [T]; in place on one FP32 copy, as fresh pages cost more than arithmetic on a CPU."""
    peak = logits.amax(dim=-1, keepdim=True).float()
    values = logits.to(torch.float32, copy=True).sub_(peak).exp_()
    return values.sum(dim=-1).log_().add_(peak[:, 0])


def _softmax_gradient(logits: Tensor, total: Tensor, target: Tensor, grad: Tensor) -> Tensor:
    """grad_t (softmax(logits_t) - onehot(target_t)), FP32 [T, V]."""
    probability = logits.to(torch.float32, copy=True).sub_(total[:, None]).exp_()
    target = target[:, None]
    if torch.compiler.is_compiling():  # a comparison fuses with the rest; a scatter does not
        column = torch.arange(logits.shape[1], device=logits.device)
        probability = torch.where(column == target, probability - 1, probability)
    else:
        probability.scatter_add_(1, target.clamp(min=0), probability.new_full(target.shape, -1.0))
    return probability.mul_(torch.where(target == IGNORE, 0.0, grad[:, None]))
