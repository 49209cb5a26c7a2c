"""The values of settings that are words."""

from __future__ import annotations

CHECK_DATA = ("exact", "augmented")
BAD_SAMPLE = ("stop", "skip")
FULL_DISK = ("stop", "go-on")
DTYPES = ("float32", "float64", "bfloat16", "float16")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "bf16-true", "fp16-true", "auto")
OPTIMIZER_STATES = ("8bit",)
BATCH_NORMS = ("exact", "local", "grain")
EXACT = ("sums", "bits")
FUSED_OPTIMIZER = ("auto", "no")
CUDA_GRAPHS = ("off", "auto")
COMPILE = ("auto", "blocks", "whole")
COMPILE_CHECK = ("replace", "stop", "no")
BACKEND = "inductor"
"""The default backend of torch.compile."""
