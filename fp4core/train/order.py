"""Which window of the corpus stands at which place of the training stream: a pure function of (seed, place).

    epoch, i = divmod(place, windows);   window = P_{seed, epoch}(i)

P is a permutation of 0..windows-1: a four-round Feistel network over the next even number of bits with
cycle walking (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Nothing is stored or
replayed: a resumed run, another world size and another accumulation all ask for the same places.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_ROUNDS = 4


def _mix(x: int) -> int:
    """The 64-bit finaliser of SplitMix64."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def permute(index: int, size: int, key: int) -> int:
    """Place of `index` under the permutation `key` of range(size). ValueError when out of range."""
    if not 0 <= index < size:
        raise ValueError(f"index {index} is outside range({size})")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    x = index
    while True:
        left, right = x >> half, x & low
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mix(_mix(key ^ number) ^ right) & low)
        x = (left << half) | right
        if x < size:
            return x


def window_at(place: int, *, windows: int, seed: int) -> int:
    """Window number that stands at `place` (0-based, over all epochs) of the stream of `seed`."""
    epoch, index = divmod(place, windows)
    return permute(index, windows, _mix(_mix(seed & _MASK) ^ epoch))
