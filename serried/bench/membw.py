"""How fast this machine's memory can be read: the limit of decoding."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

MEBIBYTE = 1 << 20


def read_bandwidth(threads: int, mebibytes: int = 192, repeats: int = 3) -> float:
    """Bytes per second that `threads` threads read together, each its own array, well beyond any cache.

    NumPy's integer reductions release the GIL. The best of the repeats.
    """
    arrays = [np.ones(mebibytes * MEBIBYTE // 8 // threads, np.int64) for _ in range(threads)]
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, arrays))
            rates.append(sum(array.nbytes for array in arrays) / (time.perf_counter() - start))
    return max(rates)
