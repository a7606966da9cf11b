"""A window is measured on the mask itself: exactly right, or refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.errors import UnsupportedModelError
from compiled_engine.models.masks import MaskFunction, classify_mask


def causal(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key <= query


def from_table(table: torch.Tensor) -> MaskFunction:
    return lambda batch, head, query, key: table[query, key]


def window_table(num_positions: int, window: int) -> torch.Tensor:
    table = torch.zeros(num_positions, num_positions, dtype=torch.bool)
    for row in range(num_positions):
        table[row, max(0, row - window + 1) : row + 1] = True
    return table


@given(num_positions=st.integers(1, 40), window=st.integers(1, 50))
def test_windows_are_measured_exactly(num_positions: int, window: int) -> None:
    expected = window if window < num_positions else None
    assert classify_mask(from_table(window_table(num_positions, window)), num_positions) == expected


@given(num_positions=st.integers(2, 120), window=st.integers(1, 120), data=st.data())
def test_one_wrong_edge_is_seen(num_positions: int, window: int, data: st.DataObject) -> None:
    table = window_table(num_positions, window)
    row = data.draw(st.integers(0, num_positions - 1), label="row")
    edges = [key for key in (row + 1, row, row - window + 1, row - window) if 0 <= key < num_positions]
    column = data.draw(st.sampled_from(edges), label="column")
    table[row, column] ^= True
    same_as = [w for w in range(1, num_positions + 1) if torch.equal(table, window_table(num_positions, w))]
    if same_as:
        assert classify_mask(from_table(table), num_positions) == (same_as[0] if same_as[0] < num_positions else None)
    else:
        with pytest.raises(UnsupportedModelError):
            classify_mask(from_table(table), num_positions)


def test_large_windows_cost_no_square_of_memory() -> None:
    def window(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key > query - 4096)

    assert classify_mask(window, 1 << 20) == 4096
    assert classify_mask(causal, 1 << 20) is None


@pytest.mark.parametrize("chunk", [3, 8, 16, 31])
def test_chunked_attention_is_refused(chunk: int) -> None:
    with pytest.raises(UnsupportedModelError):
        classify_mask(lambda batch, head, query, key: (key <= query) & (key // chunk == query // chunk), 32)


def test_bidirectional_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="bidirectional"):
        classify_mask(lambda batch, head, query, key: query >= 0, 32)


def test_masks_that_depend_on_the_input_are_refused() -> None:
    padding = torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(UnsupportedModelError, match="depends on the input"):
        classify_mask(lambda batch, head, query, key: padding[batch, key] & (key <= query), 32)


@pytest.mark.parametrize("window", [1, 2, 7, 31, 32, 40])
def test_windows_are_those_of_transformers_own_masks(window: int) -> None:
    from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

    mask_function = sliding_window_causal_mask_function(window)
    mask = sdpa_mask(
        batch_size=1, q_length=32, kv_length=32, mask_function=mask_function, allow_is_causal_skip=False, use_vmap=False
    )
    measured = classify_mask(mask_function, 32)
    assert torch.equal(mask[0, 0], window_table(32, measured or 32))
