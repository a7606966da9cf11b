"""How a model has its pieces and attention run: at once, or in a way that can do the same again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Work = Callable[[], Sequence[torch.Tensor] | None]
"""Computes tensors anew at every call, from the same arguments; or writes into its arguments and returns None."""

Launch = Callable[[str, Work], Sequence[torch.Tensor]]
"""Runs the work that its first argument names, and gives what that returns. Captures see all work this way."""


def launch_now(name: str, work: Work) -> Sequence[torch.Tensor]:
    """Run ``work`` and nothing more."""
    return work() or ()


def copying(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
    """Work that copies the second tensor of every pair into the first."""

    def copy() -> None:
        for to, value in pairs:
            to.copy_(value)

    return copy
