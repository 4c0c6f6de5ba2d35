"""Linear layers whose three contractions are quantised as a recipe says.

    Fprop  Y  = Qr(X) Qr(W)^T      [T, N] = [T, K] [N, K]^T    Y rounded to BF16
    Dgrad  dX = Qr(dY) Qc(W)       [T, K] = [T, N] [N, K]      dX rounded to BF16
    Wgrad  dW = Qc(dY)^T Qc(X)     [N, K] = [T, N]^T [T, K]    dW stays FP32

T tokens, K input features, N output features. Scales run along the contraction axis, so the row view Qr has
blocks along features and the column view Qc along tokens (of X, dY) or output features (of W). Every
quantiser input is rounded to BF16 first; the stored weight is never transformed (report sections 2.3-2.5).

Backends. A backend computes several linears of one input, so that X is quantised once for q, k, v and for
gate, up:

    backend(x, weights, state, spec, producers) -> outputs
      x          BF16 [T, K], contiguous, requires grad or not
      weights    list of FP32 or BF16 [N_i, K], the parameters themselves (a backend rounds them)
      state      int64 [3] = seed, optimizer step, global index of x's first token; never
                 written in place, so it may be saved for backward
      spec       str, ``fp4core.ops.spec.decode(spec)`` is the LinearRecipe
      producers  list of int, ``fp4core.ops.spec.producer_id(block, index)`` of each linear; add the view
      outputs    list of BF16 [T, N_i], differentiable: d x BF16 (the sum over i rounded once), d weights_i in
                 the weight's dtype

It must trace under ``torch.compile(fullgraph=True)``; custom ops do. ``register_backend`` adds one, and
``resolve_backend`` is the only place that chooses.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp4core import formats
from fp4core.ops import spec as specs
from fp4core.ops import te_support
from fp4core.ops.reference_linear import linears as reference_linears
from fp4core.recipe import LinearRecipe, Recipe, operands

Backend = Callable[[Tensor, list[Tensor], Tensor, str, list[int]], list[Tensor]]

_BACKENDS: dict[str, Backend] = {"reference": reference_linears}
# device type -> backend of "auto"; the module that registers it is imported when such a device exists
_AUTO: dict[str, str] = {"cpu": "reference"}
_CUDA_MODULE = "fp4core.ops.carrier_linear"
# "auto" of a route that is Transformer Engine's: that where it runs, else what "auto" means
AUTO_TE = "auto_te"
# backends imported when somebody asks for them by name; one that cannot run here raises ValueError on import
_BY_NAME = {"native": "fp4core.ops.native_linear", "te": "fp4core.ops.te_backend"}


def register_backend(name: str, impl: Backend, device_types: Sequence[str] = ()) -> None:
    """Make ``impl`` available as ``backend=name``, and as ``"auto"`` on the given device types."""
    _BACKENDS[name] = impl
    _AUTO.update(dict.fromkeys(device_types, name))


def preferred_backend(recipe: Recipe, name: str) -> str:
    """What ``name`` asks for in a route: ``"auto"`` prefers the implementation that the recipe names.

    No FP4 Tensor Core takes UE5M3 block scales, so ``"native"`` runs those routes on the BF16 carriers.
    """
    if name == "native":
        used = {op.format for group in recipe.groups for _, _, op in operands(group.linear)} - {"bf16"}
        return "carrier" if any(formats.get(n).block_scale == "ue5m3" for n in used) else name
    return AUTO_TE if name == "auto" and recipe.implementation == "te" else name


def resolve_backend(name: str, device_type: str) -> str:
    """Name of the backend that ``name`` (or ``"auto"``) means on a device type. Raises ValueError."""
    if name == AUTO_TE:
        name = "te" if device_type == "cuda" and not te_support.problem() else "auto"
    chosen = _AUTO.get(device_type, "reference") if name == "auto" else name
    if chosen in _BY_NAME and chosen not in _BACKENDS:
        _load_by_name(chosen)
    if chosen not in _BACKENDS:
        raise ValueError(
            f"linear backend: got {name!r}, needed one of {['auto', *sorted(_BACKENDS | _BY_NAME)]}; "
            "fp4core.backends() says what this machine can run"
        )
    return chosen


def _load_by_name(name: str) -> None:
    """Import a backend of ``_BY_NAME``. Raises ValueError with its reason where it cannot run."""
    try:
        importlib.import_module(_BY_NAME[name])
    except ModuleNotFoundError as error:
        raise ValueError(f"linear backend {name!r} needs {error.name}, which is not installed") from None


def _load_device_backends() -> None:
    """Import what registers itself for CUDA, where there is a GPU and the module's needs are installed."""
    if torch.cuda.is_available() and "cuda" not in _AUTO:
        try:
            importlib.import_module(_CUDA_MODULE)
        except ModuleNotFoundError:  # no Triton, or a build without GPU kernels: the reference runs anywhere
            _AUTO["cuda"] = "reference"


def _bf16_linears(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """All-BF16 recipes on an accelerator are its own BF16 GEMMs (FP32 accumulation inside)."""
    return [F.linear(x, w.to(torch.bfloat16)) for w in weights]


class Linear(nn.Linear):
    """``nn.Linear`` in the precision of a LinearRecipe; same parameters, same state_dict keys.

    Args:
        in_features, out_features: K and N.
        recipe: formats, rounding and Hadamard of the six operands.
        block: zero-based transformer block; with ``index`` it names the layer's random bits.
        index: 0..6 for q, k, v, o, gate, up, down.
        bias: an unquantised bias, added to the FP32 value of Y before its BF16 rounding.
        backend: "auto", "reference", or a registered one.
        device, dtype: of the parameters; FP32 or BF16.

    Input [..., K] in FP32 or BF16, output [..., N] in the input's dtype (BF16 under autocast), its values
    rounded to BF16 either way. Raises ValueError for other dtypes or a wrong last dimension.

    ``sr_state`` (int64 [3], not in the state_dict) holds seed, step and the global index of the batch's first
    token; a forward pass keeps the one it saw. ``fp4core.convert`` shares one among all layers and
    ``fp4core.set_sr_state`` replaces it. ``ue5m3`` operands take the tensor's own amax at every
    call unless a trainer samples and holds it (``fp4core.ops.held``).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        recipe: LinearRecipe,
        block: int = 0,
        index: int = 0,
        bias: bool = False,
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(recipe, LinearRecipe):
            raise ValueError(
                f"Linear: got a recipe of type {type(recipe).__name__}, needed a fp4core.recipe.LinearRecipe "
                "(Recipe.for_block(i, depth) gives one)"
            )
        if block < 0 or not 0 <= index < specs.LINEARS:
            raise ValueError(
                f"Linear: got block {block}, index {index}; needed block >= 0, index 0 to {specs.LINEARS - 1}"
            )
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.recipe = recipe
        self.block, self.index, self.backend = block, index, backend
        self.spec = specs.encode(recipe)
        self.producer = specs.producer_id(block, index)
        # for ops of a whole block: as a tensor it is no constant of a compiled graph, so one graph serves all
        self.producer_cpu = torch.tensor([self.producer], device="cpu")
        self.plain_bf16 = specs.is_plain_bf16(recipe)
        _load_device_backends()
        resolve_backend(backend, self.weight.device.type)
        self.register_buffer("sr_state", torch.zeros(3, dtype=torch.int64, device=device), persistent=False)

    def forward(self, input: Tensor, state: Tensor | None = None) -> Tensor:
        """Y of ``input``; ``state`` replaces ``sr_state`` (a caller that recomputes passes its own copy)."""
        return _apply([self], input, state)[0]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block={self.block}, index={self.index}, {self.spec}"


def linear_group(layers: Sequence[Linear], x: Tensor, state: Tensor | None = None) -> list[Tensor]:
    """Outputs of several Linears of one input, which is then quantised once per view.

    dX is the FP32 sum of the layers' products, rounded to BF16 once; calling the layers one by one rounds
    each and adds in BF16. Layers with different recipes or with hooks are called one by one.
    """
    first = layers[0]
    same = all(m.spec == first.spec and m.backend == first.backend and not _has_hooks(m) for m in layers)
    if not same:
        return [m(x, state) for m in layers]
    return _apply(layers, x, state)


def _has_hooks(m: nn.Module) -> bool:
    return bool(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks)


def _apply(layers: Sequence[Linear], x: Tensor, state: Tensor | None) -> list[Tensor]:
    first = layers[0]
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"Linear: got input of {x.dtype}, needed float32 or bfloat16")
    if x.shape[-1] != first.in_features:
        raise ValueError(f"Linear: got input [..., {x.shape[-1]}], needed [..., {first.in_features}]")
    device = x.device.type
    dtype = torch.bfloat16 if torch.is_autocast_enabled(device) else x.dtype
    x2d = x.to(torch.bfloat16).reshape(-1, first.in_features).contiguous()
    weights = [m.weight for m in layers]
    backend = resolve_backend(first.backend, device)
    if first.plain_bf16 and device != "cpu" and first.backend in ("auto", AUTO_TE):
        outputs = _bf16_linears(x2d, weights)
    else:
        # set_sr_state makes a new tensor, so a backward pass that is still to come keeps this one
        state = first.sr_state if state is None else state
        outputs = _BACKENDS[backend](x2d, weights, state, first.spec, [m.producer for m in layers])
    shape = x.shape[:-1]
    return [_finish(y, m.bias).to(dtype).reshape(*shape, m.out_features) for y, m in zip(outputs, layers)]


def _finish(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else (y.float() + bias.float()).to(torch.bfloat16)
