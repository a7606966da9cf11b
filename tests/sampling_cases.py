"""Random steps to be sampled, with everything that is easily got wrong: ties, signed zeros, filters at their limits."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

# Below, at and around a block of the two-level sums; one token; several blocks.
VOCAB_SIZES = [1, 2, 5, 33, 127, 128, 129, 300, 700]
TEMPERATURES = [0.0, 1e-40, 1e-6, 0.3, 1.0, 2.5, 3e38]
TOP_PS = [1.0, 0.999, 0.9, 0.5, 0.1, 1e-9]
MIN_PS = [0.0, 1e-30, 0.02, 0.5, 1.0]


@st.composite
def sampling_cases(draw, max_rows: int = 5, vocab_size: int | None = None):
    """Logits [n, vocab_size], every row with a finite maximum, and per row a dict as ``make_batch`` takes it."""
    vocab_size = vocab_size or draw(st.sampled_from(VOCAB_SIZES))
    num_rows = draw(st.integers(1, max_rows))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = [draw(row_parameters(vocab_size)) for _ in range(num_rows)]
    return torch.from_numpy(draw(row_logits(rng, num_rows, vocab_size))), rows


@st.composite
def row_logits(draw, rng: np.random.Generator, num_rows: int, vocab_size: int) -> np.ndarray:
    """Many ties (small integers, of both signs of 0), reals, or all the same; some -inf, but not the first."""
    kind = draw(st.sampled_from(["ties", "narrow", "reals", "wide", "equal"]))
    if kind == "ties":
        logits = rng.integers(-3, 4, (num_rows, vocab_size)) * rng.choice([-1.0, 1.0], (num_rows, vocab_size))
    elif kind == "equal":
        logits = np.full((num_rows, vocab_size), 7.0)
    else:
        logits = rng.standard_normal((num_rows, vocab_size)) * {"narrow": 0.01, "reals": 1, "wide": 1e4}[kind]
    if draw(st.booleans()):
        logits[:, 1:][rng.random((num_rows, vocab_size - 1)) < 0.3] = -np.inf
    return logits.astype(np.float32)


@st.composite
def row_parameters(draw, vocab_size: int) -> dict:
    forbidden = st.sets(st.integers(1, vocab_size - 1), max_size=3) if vocab_size > 1 else st.just(set())
    return {
        "temperature": draw(st.sampled_from(TEMPERATURES)),
        "top_k": draw(st.sampled_from([0, 1, 2, 3, 50, vocab_size - 1, vocab_size, vocab_size + 1, 10**6])),
        "top_p": draw(st.sampled_from(TOP_PS)),
        "min_p": draw(st.sampled_from(MIN_PS)),
        "seed": draw(st.integers(-(2**63), 2**63 - 1)),
        "position": draw(st.integers(0, 10**6)),
        "forbidden": tuple(sorted(draw(forbidden))),
    }
