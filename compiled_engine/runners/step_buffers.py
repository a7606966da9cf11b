"""The inputs of steps in memory that stays where it is, so that captured graphs find every step in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.runners.inputs import StepInputs


@dataclass(frozen=True)
class Padding:
    """The sizes that a step is padded to.

    ``is_uniform``: every padded request has one token, at position 0 and in block 0. Otherwise padded requests have no
    tokens, and padded tokens, whose slot is in block 0, belong to no request.
    ``num_logits``: rows that get logits.
    """

    num_tokens: int
    num_requests: int
    num_logits: int
    is_uniform: bool

    @classmethod
    def none(cls, inputs: StepInputs) -> Padding:
        """The sizes that ``inputs`` have."""
        return cls(inputs.num_padded_tokens, len(inputs.seq_lens), inputs.num_logits, False)


class PersistentTensor:
    """A tensor on the device and its image on the host, written from the first element on.

    On the CPU they are one. On a GPU the image is in pinned memory and is copied on the current stream while the host
    goes on; the next write waits for the end of that copy.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._image = torch.zeros(tuple(shape), dtype=dtype, pin_memory=on_gpu)
        self.tensor = self._image.to(device) if on_gpu else self._image
        self._array = self._image.numpy()
        self._copied = torch.cuda.Event() if on_gpu else None

    def write(self, values: np.ndarray, size: int, fill: int | float | np.ndarray = 0) -> torch.Tensor:
        """Make the first ``size`` rows ``values``, then ``fill``; returns them on the device.

        A row that is longer than one of ``values`` is filled up with zeros.
        """
        if self._copied is not None:
            self._copied.synchronize()
        rows = self._array[:size]
        count = len(values)
        if rows.ndim == 1:
            rows[:count] = values
        else:
            rows[:count] = 0
            rows[:count, : values.shape[1]] = values
        rows[count:] = fill
        if self._copied is not None:
            self.tensor[:size].copy_(self._image[:size], non_blocking=True)
            self._copied.record()
        return self.tensor[:size]


@dataclass(frozen=True)
class StagedStep:
    """One step's tensors on the device, padding included; see ``StepInputs``. ``block_tables`` and ``slot_mappings``:
    one per cache group."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: tuple[torch.Tensor, ...]

    def metadata(self) -> Mapping[str, torch.Tensor]:
        """What attention reads, by name."""
        named = {"query_start_loc": self.query_start_loc, "seq_lens": self.seq_lens}
        named |= {f"block_table of group {index}": table for index, table in enumerate(self.block_tables)}
        return named | {f"slot_mapping of group {index}": slots for index, slots in enumerate(self.slot_mappings)}


class StepBuffers:
    """Where every step of a runner is staged. ``max_blocks``: columns of a block table."""

    def __init__(
        self, max_tokens: int, max_requests: int, num_groups: int, max_blocks: int, device: torch.device
    ) -> None:
        self.input_ids = PersistentTensor([max_tokens], torch.int64, device)
        self.positions = PersistentTensor([max_tokens], torch.int64, device)
        self.logits_indices = PersistentTensor([max_requests], torch.int64, device)
        self.query_start_loc = PersistentTensor([max_requests + 1], torch.int32, device)
        self.seq_lens = PersistentTensor([max_requests], torch.int32, device)
        groups = range(num_groups)
        self.block_tables = [PersistentTensor([max_requests, max_blocks], torch.int32, device) for _ in groups]
        self.slot_mappings = [PersistentTensor([max_tokens], torch.int64, device) for _ in groups]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, on the device."""
        rows = (self.input_ids, self.positions, self.logits_indices, self.query_start_loc, self.seq_lens)
        return tuple(buffer.tensor for buffer in (*rows, *self.block_tables, *self.slot_mappings))

    def stage(self, inputs: StepInputs, padding: Padding) -> StagedStep:
        """Write ``inputs``, and padding up to the sizes of ``padding``: every row that the step's graph reads is
        rewritten, so that nothing of an earlier step is left in one."""
        added = np.arange(1, padding.num_requests - len(inputs.seq_lens) + 1) if padding.is_uniform else 0
        end = inputs.query_start_loc[-1] + added
        return StagedStep(
            input_ids=self.input_ids.write(inputs.input_ids.numpy(), padding.num_tokens),
            positions=self.positions.write(inputs.positions.numpy(), padding.num_tokens),
            logits_indices=self.logits_indices.write(inputs.logits_indices.numpy(), padding.num_logits),
            query_start_loc=self.query_start_loc.write(inputs.query_start_loc, padding.num_requests + 1, end),
            seq_lens=self.seq_lens.write(inputs.seq_lens, padding.num_requests, int(padding.is_uniform)),
            block_tables=tuple(
                buffer.write(table, padding.num_requests)
                for buffer, table in zip(self.block_tables, inputs.block_tables, strict=True)
            ),
            slot_mappings=tuple(
                buffer.write(slots.numpy(), padding.num_tokens)
                for buffer, slots in zip(self.slot_mappings, inputs.slot_mappings, strict=True)
            ),
        )
