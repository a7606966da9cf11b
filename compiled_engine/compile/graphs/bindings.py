"""What a captured graph reads and writes by address, and whether it is still there.

A captured graph uses the addresses it saw, whatever is at them when it replays. Engines that compare only positional
arguments replay on stale caches, metadata and weights without a word (vllm#53915, #52440, #48941).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from compiled_engine.errors import StaleGraph


class Role(str, Enum):
    """What a bound tensor is to a graph."""

    INPUT = "input"
    CACHE = "KV cache of layer"
    WEIGHT = "weight"
    METADATA = "metadata"
    WORKSPACE = "workspace"
    OUTPUT = "output"


@dataclass(frozen=True)
class Binding:
    """One tensor that a graph uses: its place in memory and how it is read there.

    ``name``: unique within a role; of a cache, its layer. ``shape`` and ``stride`` in elements. ``epoch``: the static
    forward context's when this was noted.
    """

    role: Role
    name: str
    address: int
    num_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    epoch: int


Tensors = Mapping[tuple[Role, str], torch.Tensor]
"""Everything that graphs may use, by role and name."""


def bindings_of(tensors: Tensors, epoch: int) -> tuple[Binding, ...]:
    """What a graph that uses ``tensors`` has to remember of them."""
    return tuple(
        Binding(
            role,
            name,
            tensor.data_ptr(),
            tensor.nbytes,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            epoch,
        )
        for (role, name), tensor in tensors.items()
    )


def check_bindings(bindings: Iterable[Binding], present: Tensors, changed_by: str | None) -> None:
    """Pass if every one of ``bindings`` is what it was.

    Raises ``StaleGraph`` for the first that has moved, is gone, or is read otherwise now. ``changed_by``: who changed
    the bindings of caches last, for the message.
    """
    for captured in bindings:
        tensor = present.get((captured.role, captured.name))
        by = changed_by if captured.role is Role.CACHE else None
        if tensor is None or tensor.data_ptr() != captured.address:
            address = None if tensor is None else tensor.data_ptr()
            raise StaleGraph(captured.name, captured.address, address, role=captured.role.value, changed_by=by)
        read_now = (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        if read_now != (captured.shape, captured.stride, captured.dtype):
            difference = (
                f"had shape {captured.shape}, strides {captured.stride} and {captured.dtype}, and has shape "
                f"{read_now[0]}, strides {read_now[1]} and {read_now[2]} now"
            )
            raise StaleGraph(
                captured.name,
                captured.address,
                captured.address,
                role=captured.role.value,
                difference=difference,
                changed_by=by,
            )
