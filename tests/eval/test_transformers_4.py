"""The exported directory under transformers 4.57: the logits of the locked version, bit for bit.

Needs a directory of its own, since one environment holds one transformers (about 60 MB):
    pip install --no-deps --target DIR transformers==4.57.6 tokenizers==0.22.1 huggingface-hub==0.36.0
    FP4CORE_TRANSFORMERS_4=DIR python -m pytest tests/eval/test_transformers_4.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eval.__main__ import main

OTHER = os.environ.get("FP4CORE_TRANSFORMERS_4")
CODE = """
import hashlib, json, sys, torch, transformers
torch.set_num_threads(1)
model = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
size = model.config.max_position_embeddings
ids = torch.arange(size)[None] * 7 % model.config.vocab_size
with torch.no_grad():
    logits = model(ids).logits
hashed = lambda tensor: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
tokens = transformers.AutoTokenizer.from_pretrained(sys.argv[1]).encode("The state of the Union, 2026.")
print(json.dumps([transformers.__version__, hashed(model.model.rotary_emb.inv_freq), hashed(logits), tokens]))
"""


def read(directory: Path, first_on_path: str | None) -> list:
    """[transformers' version, hash of inv_freq, hash of the logits at full context, tokens of a text]."""
    environment = {**os.environ, "PYTHONPATH": first_on_path or "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(directory)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(
    not OTHER, reason="needs transformers 4.57 in a directory named by FP4CORE_TRANSFORMERS_4"
)
def test_transformers_4_and_5_give_the_same_logits(project, tmp_path):
    out = tmp_path / "model"
    assert main(["export", *project.cli(), "--step", "20", "--out", str(out)]) == 0
    current, other = read(out, None), read(out, OTHER)
    assert other[0].startswith("4.57.") and current[0].startswith("5.")
    assert other[1:] == current[1:]
