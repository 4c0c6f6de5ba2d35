"""Plain torch oracles, obvious and slow; never imports fp4core.kernels."""
