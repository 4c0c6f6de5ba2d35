"""Philox4x32-10 against Random123's known answers, and the addressing of bytes by place."""

import numpy as np
import pytest
import torch

from fp4core import SRKey
from fp4core.reference.philox import philox4x32_10, random_bytes

# Random123, kat_vectors: counter, key, answer
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN, ids=["zeros", "ones", "pi"])
def test_known_answers(counter, key, answer):
    got = philox4x32_10(tuple(torch.tensor(w) for w in words(counter)), tuple(words(key)))
    assert [int(w) for w in got] == words(answer)


def byte_at(key: SRKey, place: int) -> int:
    """The byte of one place, from the definition."""
    place16 = place // 16
    counter = (place16 & 0xFFFFFFFF, place16 >> 32, int(key.step), key.producer)
    out = philox4x32_10(tuple(torch.tensor(w) for w in counter), (key.seed & 0xFFFFFFFF, key.seed >> 32))
    return b"".join(int(w).to_bytes(4, "little") for w in out)[place % 16]


@pytest.mark.parametrize("offset", [0, 5, 231, (1 << 36) + 3], ids=["start", "ragged", "row7", "far"])
def test_bytes_are_addressed_by_global_place(offset):
    key = SRKey(seed=(3 << 32) | 9, step=12, producer=77, offset=offset)
    got = random_bytes(4, 33, key)
    assert got.shape == (4, 33) and got.dtype == torch.uint8
    for place in (0, 1, 15, 16, 40, 131):
        assert int(got.view(-1)[place]) == byte_at(key, offset + place)


def test_sharding_draws_the_same_bytes():
    whole = random_bytes(64, 48, SRKey(1, 2, 3))
    parts = [random_bytes(16, 48, SRKey(1, 2, 3, offset=16 * i * 48)) for i in range(4)]
    assert torch.equal(whole, torch.cat(parts))


def test_large_tensors_are_made_in_pieces_of_one_stream():
    whole = random_bytes(1024, 1024, SRKey(1, 2, 3))
    assert torch.equal(whole[700:703], random_bytes(3, 1024, SRKey(1, 2, 3, offset=700 * 1024)))
    counts = np.bincount(whole.view(-1).numpy(), minlength=256)
    # 255 degrees of freedom: mean 255, standard deviation 22.6; six of them
    assert ((counts - 4096) ** 2 / 4096).sum() < 255 + 6 * 22.6


def test_tensor_step_and_offset_equal_ints():
    ints = random_bytes(3, 20, SRKey(1, 7, 3, offset=40))
    tensors = random_bytes(3, 20, SRKey(1, torch.tensor(7), 3, offset=torch.tensor(40)))
    assert torch.equal(ints, tensors)


@pytest.mark.parametrize("field", ["seed", "step", "producer", "offset"])
def test_streams_differ_in_every_field(field):
    base = {"seed": 1, "step": 2, "producer": 3, "offset": 0}
    a = random_bytes(64, 64, SRKey(**base)).float().view(-1)
    b = random_bytes(64, 64, SRKey(**(base | {field: base[field] + 64}))).float().view(-1)
    # correlation of 4096 independent pairs has standard deviation 1/64
    assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1]) < 5 / 64


@pytest.mark.parametrize(
    ("field", "value"), [("seed", -1), ("step", 1.5), ("producer", True), ("offset", torch.zeros(2))]
)
def test_bad_keys(field, value):
    with pytest.raises(ValueError, match=f"SRKey.{field}"):
        SRKey(**({"seed": 1, "step": 2, "producer": 3} | {field: value}))
