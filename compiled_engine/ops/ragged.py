"""Attention by value on a TPU: one kernel over the pages of all requests of a step, each as long as it is.

Source: the operator ``ragged_paged_attention`` of torch_xla 2.9 (its TPU kernel is
``torch_xla/experimental/pallas_kernels/ragged_paged_attention_v2.py``). The operator is handed in, so nothing of
torch_xla is imported here. It has not run on hardware: arrays and layout are tested against torch_xla's own reference.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from compiled_engine.errors import ForwardContextError
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.by_value import ByValueLayer, PagedStep

# The kernel keeps its running sums in registers of this many lanes.
_LANES = 128
_SUBLANES = 8
_KERNEL_DTYPES = (torch.bfloat16, torch.float32)


def ragged_kernel_refusal(spec: AttentionSpec, dtype: torch.dtype) -> str | None:
    """Why the TPU kernel cannot compute this layer with a cache of ``dtype``; None where it can."""
    if dtype not in _KERNEL_DTYPES:
        return f"the dtype is {dtype}, the kernel has bfloat16 and float32"
    if spec.head_dim % _LANES:
        return f"head_dim is {spec.head_dim}, the kernel needs a multiple of {_LANES}"
    # K and V heads lie beside each other in rows of 32 bits, which the compiler tiles by 1, 2, 4 or a multiple of 8.
    rows, left_over = divmod(2 * spec.num_kv_heads * dtype.itemsize, 4)
    if left_over or (rows not in (1, 2, 4) and rows % _SUBLANES):
        return f"num_kv_heads is {spec.num_kv_heads}, the kernel cannot tile {rows} rows of K and V heads"
    return None


class RaggedAttention:
    """A ``ByValueAttention`` on top of a ragged paged attention kernel.

    Within a slot this class stores K and V heads in the order that the kernel reads, k0, v0, k1, v1, ..., and not all
    K heads before all V heads: a cache of shape [num_blocks, block_size, 2, num_kv_heads, head_dim] is viewed as pages
    [num_blocks, block_size, 2 * num_kv_heads, head_dim]. Its elements are the same, nothing is copied, but
    ``key_cache`` and ``value_cache`` of ``compiled_engine.context`` do not describe such a cache.

    The kernel reads whole pages, so a cache must hold finite numbers everywhere, also where nothing was written.

    kernel: called as ``kernel(query, pages, kv_lens, page_indices, cu_q_lens, num_seqs, sm_scale=, sliding_window=,
    soft_cap=)``, returns the shape of ``query``; rows from ``cu_q_lens[num_seqs]`` on may hold anything.
    donate: called on each cache before it is updated.   max_num_seqs: requests of a step at most, padding not counted.
    max_blocks: blocks of a request at most. All ``max_num_seqs * max_blocks`` block ids lie in the TPU's scalar memory
    (about 1 MiB) while the kernel runs.
    """

    def __init__(
        self,
        kernel: Callable[..., torch.Tensor],
        donate: Callable[[torch.Tensor], None],
        max_num_seqs: int,
        max_blocks: int,
    ) -> None:
        self._kernel = kernel
        self._donate = donate
        self._max_num_seqs = max_num_seqs
        self._max_blocks = max_blocks

    def host_inputs(self, step: PagedStep, sliding_window: int | None) -> tuple[torch.Tensor, ...]:
        """See ``ByValueAttention``. In this order:

        slot_mapping: int64 [num_tokens].   kv_lens: int32 [max_num_seqs].   page_indices: int32 [max_num_seqs,
        max_blocks].   cu_q_lens: int32 [max_num_seqs + 1], its last entry repeated to the end.   num_seqs: int32 [1].
        Padding requests are no sequences, their tokens lie beyond the last one; the first of them is one where there
        is no other, because the kernel needs one. The window does not matter here: the kernel gets it from the layer.
        Raises ``ForwardContextError`` for more requests or blocks than there is room for.
        """
        num_seqs = max(1, len(step.seq_lens) - step.num_padding_requests)
        self._check_room(num_seqs, step.block_table.shape[1])
        kv_lens = np.zeros(self._max_num_seqs, np.int32)
        kv_lens[:num_seqs] = step.seq_lens[:num_seqs]
        page_indices = np.zeros((self._max_num_seqs, self._max_blocks), np.int32)
        page_indices[:num_seqs, : step.block_table.shape[1]] = step.block_table[:num_seqs]
        cu_q_lens = np.full(self._max_num_seqs + 1, step.query_start_loc[num_seqs], np.int32)
        cu_q_lens[:num_seqs] = step.query_start_loc[:num_seqs]
        arrays = (kv_lens, page_indices, cu_q_lens, np.array([num_seqs], np.int32))
        return (step.slot_mapping, *map(torch.from_numpy, arrays))

    def attend(
        self,
        layer: ByValueLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        inputs: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """See ``ByValueAttention``. Rows of padding tokens are zero."""
        slot_mapping, kv_lens, page_indices, cu_q_lens, num_seqs = inputs
        spec = layer.attention_spec
        cache = layer.kv_cache
        if layer.writes_cache:
            # Before any view of it: a view made earlier hides the donation from XLA, which then copies the cache.
            self._donate(cache)
        pages = cache.view(*cache.shape[:2], 2 * spec.num_kv_heads, spec.head_dim)
        if layer.writes_cache:
            tokens = pages.view(-1, *pages.shape[2:])
            tokens.index_copy_(0, slot_mapping, torch.stack((key, value), dim=2).flatten(1, 2))
        out = self._kernel(
            query,
            pages,
            kv_lens,
            page_indices,
            cu_q_lens,
            num_seqs,
            sm_scale=spec.scale,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
        )
        computed = torch.arange(query.shape[0], device=query.device) < cu_q_lens[-1]
        return torch.where(computed[:, None, None], out, torch.zeros_like(out))

    def working_bytes(self, spec: AttentionSpec, num_tokens: int) -> int:
        """See ``ByValueAttention``: the interleaved K/V and the kernel's own output, as if in float32."""
        return num_tokens * (2 * spec.num_kv_heads + spec.num_heads) * spec.head_dim * 4

    def _check_room(self, num_seqs: int, num_blocks: int) -> None:
        if num_seqs > self._max_num_seqs:
            raise ForwardContextError(
                f"a step has {num_seqs} requests, its graph has room for {self._max_num_seqs}: raise max_num_seqs"
            )
        if num_blocks > self._max_blocks:
            raise ForwardContextError(
                f"a block table has {num_blocks} columns, the graph has room for {self._max_blocks}: raise max_blocks"
            )
