"""Triton kernels; never imports fp4core.reference."""
