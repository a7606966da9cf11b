"""What a transformers mask function lets a query see: everything before it, or a sliding window."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compiled_engine.errors import UnsupportedModelError

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``mask_function(batch_idx, head_idx, q_idx, kv_idx)``: true where query ``q_idx`` sees key ``kv_idx``."""

_WHOLE_ROWS = 16


def classify_mask(mask_function: MaskFunction, num_positions: int) -> int | None:
    """The sliding window of a causal mask over ``num_positions`` positions, or None when it hides no earlier one.

    The window counts visible positions, the query's own included. The mask is evaluated, not recognised by its
    name: its width comes from the last row, and then the edges of every row, and some rows whole, must agree with it.
    Raises ``UnsupportedModelError`` for any other pattern (bidirectional, chunked, per block).
    """
    positions = torch.arange(num_positions)
    last = positions[-1:]
    seen = _evaluate(mask_function, last, positions)
    width = int(seen.sum())
    if not bool(_evaluate(mask_function, positions, positions).all()):
        raise UnsupportedModelError("attention mask: some token does not see itself")
    if bool(_evaluate(mask_function, positions[:-1], positions[1:]).any()):
        raise UnsupportedModelError("bidirectional attention: some token sees a later one")
    rows = {0, 1, width - 1, width, width + 1, num_positions // 2, num_positions - 2, num_positions - 1}
    rows |= {step * num_positions // _WHOLE_ROWS for step in range(_WHOLE_ROWS)}
    for row in sorted(row for row in rows if 0 <= row < num_positions):
        expected = (positions <= row) & (positions > row - width)
        if not torch.equal(_evaluate(mask_function, positions[row : row + 1], positions), expected):
            raise UnsupportedModelError(
                "attention mask that is neither causal nor a sliding window (chunked or blocked)"
            )
    if width >= num_positions:
        return None
    oldest = _evaluate(mask_function, positions[width - 1 :], positions[: num_positions - width + 1])
    older = _evaluate(mask_function, positions[width:], positions[: num_positions - width])
    if not bool(oldest.all()) or bool(older.any()):
        raise UnsupportedModelError("attention mask whose window is not the same for every token")
    return width


def _evaluate(mask_function: MaskFunction, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    size = max(len(query), len(key))
    zeros = torch.zeros(size, dtype=torch.long)
    try:
        result = mask_function(zeros, zeros, query.expand(size), key.expand(size))
        return torch.as_tensor(result).to(torch.bool).expand(size)
    except Exception as error:  # a mask function is any callable; what it does with far positions is its own affair
        raise UnsupportedModelError(
            f"attention mask that depends on the input ({type(error).__name__}: {error})"
        ) from error
