"""The Llama of the experiment: module, initialisation, weights in and out, arithmetic of its size."""

from fp4core.model.arithmetic import count_parameters, flops_per_token, peak_tflops
from fp4core.model.build import build_model, init_weights, materialise
from fp4core.model.checkpoint import load_weights
from fp4core.model.interop import from_hf_state_dict, hf_config_dict, to_hf_state_dict
from fp4core.model.llama import Llama
from fp4core.model.rope import rope_inv_freq

__all__ = [
    "Llama",
    "build_model",
    "count_parameters",
    "flops_per_token",
    "from_hf_state_dict",
    "hf_config_dict",
    "init_weights",
    "load_weights",
    "materialise",
    "peak_tflops",
    "rope_inv_freq",
    "to_hf_state_dict",
]
