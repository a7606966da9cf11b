"""What the steps of a recording ask of capture sizes, by the option of the engine that sets them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from compiled_engine.compile.records import KeyRecord
from compiled_engine_debug.padding import Demand, IntArray, Padding, best_sizes, pad, powers_of_two, replay
from compiled_engine_debug.recording import Recording

BoolArray = NDArray[np.bool_]

What = Literal["tokens", "requests"]

DEFAULT_COUNT = 8
"""Sizes to propose where the recording's engine had captured none."""


@dataclass(frozen=True)
class SizeOption:
    """An option of the engine that takes a list of sizes, and the steps that are padded to them.

    ``limit``: no step is above it. ``max_graph_size``: what the recording's engine was given; it bounds the list.
    """

    name: str
    demands: tuple[Demand, ...]
    limit: int | None
    max_graph_size: int | None = None

    @property
    def recorded(self) -> tuple[int, ...]:
        """Every size that the recording's engine had captured, ascending."""
        return tuple(sorted({size for demand in self.demands for size in demand.recorded_sizes}))

    @property
    def recorded_count(self) -> int:
        """How many sizes the recorded list has without those that are always captured."""
        return len({size for demand in self.demands for size in demand.recorded_sizes if size != demand.always})

    def text(self, sizes: Iterable[int]) -> str:
        """The option that makes the engine capture ``sizes``."""
        always = [demand.always for demand in self.demands if demand.always is not None]
        given = sorted(sizes) or always
        text = f"{self.name} {','.join(map(str, given))}"
        # Sizes above it are refused, and it is captured itself.
        return text if self.max_graph_size is None else f"{text} --max-graph-size {max([*given, *always])}"


@dataclass(frozen=True)
class Replayed:
    """The recorded steps with another list of sizes; ``paddings`` by demand, in order."""

    name: str
    sizes: tuple[int, ...]
    paddings: tuple[Padding, ...]

    @property
    def total(self) -> Padding:
        return sum(self.paddings, Padding(0, 0, 0, 0))


@dataclass(frozen=True)
class Mismatch:
    """Steps that replaying the recorded list pads otherwise than the recording shows; ``step`` is the first of them."""

    kind: str
    num_steps: int
    step: int
    unpadded: int
    recorded: int
    replayed: int
    reason: str | None


def size_options(recording: Recording, what: What | None = None) -> tuple[SizeOption, ...]:
    """The options that decide how the steps of ``recording`` are padded. ``what``: only those steps of it.

    Where nothing was captured, as with ``graph_mode`` none, steps are taken as those of full_and_piecewise.
    """
    options = _bucket_options(recording) if recording.header.device == "tpu" else (_graph_option(recording),)
    if what is not None:
        options = tuple(replace(option, demands=_of_unit(option.demands, what)) for option in options)
    return tuple(option for option in options if any(len(demand.values) for demand in option.demands))


def compare_lists(
    option: SizeOption, count: int | None, maximum: int | None, lists: Iterable[tuple[int, ...]]
) -> tuple[Replayed, ...]:
    """The recorded list, the best one of ``count`` sizes, powers of two, and ``lists``, in this order.

    ``count`` None: as many as were recorded. ``maximum``: see ``best_sizes``.
    """
    demands = option.demands
    count = count or option.recorded_count or DEFAULT_COUNT
    largest = max(int(demand.values.max(initial=1)) for demand in demands)
    recorded = tuple(replay(demand, demand.recorded_sizes) for demand in demands)
    named = [("proposed", best_sizes(demands, count, maximum)), ("powers of two", powers_of_two(largest, option.limit))]
    named += [("given", tuple(sorted(set(sizes)))) for sizes in lists]
    others = [
        Replayed(name, sizes, tuple(replay(demand, demand.captured(sizes)) for demand in demands))
        for name, sizes in named
    ]
    return (Replayed("recorded", option.recorded, recorded), *others)


def mismatches(recording: Recording, option: SizeOption) -> tuple[Mismatch, ...]:
    """Where replaying what was captured does not give the padding that the recording shows; one by kind at most."""
    found = []
    for demand in option.demands:
        replayed = pad(demand.values, demand.recorded_sizes)
        places = np.flatnonzero(replayed != demand.recorded_values)
        if len(places):
            first = places[0]
            step = demand.steps[first]
            found.append(
                Mismatch(
                    kind=demand.kind,
                    num_steps=len(places),
                    step=int(recording.steps.index[step]),
                    unpadded=int(demand.values[first]),
                    recorded=int(demand.recorded_values[first]),
                    replayed=int(replayed[first]),
                    reason=recording.steps.reason[step],
                )
            )
    return tuple(found)


def _graph_option(recording: Recording) -> SizeOption:
    config, keys, steps = recording.header.config, recording.keys, recording.steps
    decode = {key.num_padded_requests for key in keys if _is_decode(key)}
    mixed = {key.num_padded_tokens for key in keys if key.kind == "full" and not _is_decode(key)}
    piecewise = {key.num_padded_tokens for key in keys if key.kind == "piecewise"}
    # A request of a decode step has one token, so that both numbers are the same, before padding and after.
    by_tokens = partial(_demand, values=steps.num_tokens, padded=steps.num_padded_tokens)
    others = np.ones(len(steps), bool)
    demands = []
    if decode or not keys:
        is_decode = steps.num_tokens == steps.num_requests
        demands.append(by_tokens("full decode", "requests", is_decode, decode, config.get("max_num_seqs")))
        others = ~is_decode
    if mixed or piecewise or not keys:
        demands.append(by_tokens("full mixed" if mixed else "piecewise", "tokens", others, mixed | piecewise))
    limit, maximum = config.get("max_num_batched_tokens"), config.get("max_graph_size")
    return SizeOption("--graph-sizes", tuple(demands), limit, maximum)


def _bucket_options(recording: Recording) -> tuple[SizeOption, ...]:
    config, steps = recording.header.config, recording.steps
    tokens, seqs = config.get("max_num_batched_tokens"), config.get("max_num_seqs")
    rows = None if tokens is None or seqs is None else min(tokens, seqs)
    sizes = {key.num_padded_tokens for key in recording.keys if key.num_padded_tokens}
    row_sizes = {key.num_padded_requests for key in recording.keys if key.num_padded_requests}
    by_tokens = partial(_demand, values=steps.num_tokens, padded=steps.num_padded_tokens)
    by_rows = partial(_demand, values=steps.num_sampled, padded=steps.num_padded_requests)
    return (
        SizeOption(
            "--token-buckets", (by_tokens("bucket", "tokens", np.ones(len(steps), bool), sizes, tokens),), tokens
        ),
        SizeOption("--request-buckets", (by_rows("bucket", "requests", steps.num_sampled > 0, row_sizes, rows),), rows),
    )


def _demand(
    kind: str,
    unit: str,
    chosen: BoolArray,
    sizes: set[int],
    always: int | None = None,
    *,
    values: IntArray,
    padded: IntArray,
) -> Demand:
    """The demand of the steps that are ``chosen``, bool [num_steps]; ``values`` and ``padded`` are of all steps."""
    largest = int(values[chosen].max(initial=0))
    return Demand(
        kind=kind,
        unit=unit,
        values=values[chosen],
        recorded_values=padded[chosen],
        steps=np.flatnonzero(chosen),
        recorded_sizes=tuple(sorted(sizes)),
        always=always if always is not None and always >= largest else None,
    )


def _is_decode(key: KeyRecord) -> bool:
    return key.kind == "full" and key.key.startswith("full decode")


def _of_unit(demands: tuple[Demand, ...], what: What) -> tuple[Demand, ...]:
    return tuple(demand for demand in demands if demand.unit == what)
