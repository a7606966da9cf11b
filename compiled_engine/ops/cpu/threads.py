"""Threads of the CPU backend: all of them for kernels, and for what compiled pieces do themselves where it pays."""

from __future__ import annotations

import ctypes

import torch

# Up to so many rows, the norms and rotations of a piece are done before a second thread has woken up.
_ROWS_FOR_ONE_THREAD = 32


class CpuThreads:
    """Gives the kernels of ``library`` (see ``load_kernels``), and torch, ``count`` threads."""

    def __init__(self, library: ctypes.CDLL, count: int) -> None:
        self.count = count
        torch.set_num_threads(count)
        library.set_num_threads.argtypes, library.set_num_threads.restype = [ctypes.c_int64], None
        library.set_num_threads(count)
        self._set_piece_threads = library.set_piece_threads
        self._set_piece_threads.argtypes, self._set_piece_threads.restype = [ctypes.c_int64], None

    def prepare_step(self, num_tokens: int) -> None:
        """Choose the threads that pieces use in the calling thread, for a step of ``num_tokens`` rows."""
        self._set_piece_threads(1 if num_tokens <= _ROWS_FOR_ONE_THREAD else self.count)
