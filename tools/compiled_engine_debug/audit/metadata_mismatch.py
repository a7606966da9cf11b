"""``metadata-mismatch``: a step's arrays do not say what the scheduler wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch

from compiled_engine_debug.audit.detector import Detector
from compiled_engine_debug.audit.expected import ExpectedStep
from compiled_engine_debug.audit.step import Step
from compiled_engine_debug.audit.subject import Subject
from compiled_engine_debug.findings import Finding


class MetadataMismatch(Detector):
    """Compares what is staged, and what each attention launch was given, with an independent reading of the batch.

    Padding is compared too: a row that an earlier step has left where padding should be is as wrong as a real one.
    """

    name = "metadata-mismatch"
    about = "staged arrays and block tables against the scheduled batch, padding included"

    def refusal(self, subject: Subject) -> str | None:
        return "XLA's inputs cannot be read back without compiling" if subject.model is None else None

    def after_step(self, subject: Subject, step: Step) -> Iterable[Finding]:
        """One fault shows in the buffers and in the launches of all layers: it is told once, and a layer is named only
        where others were given something else."""
        seen: dict[tuple[str, str | None], _Seen] = {}
        carriers: Counter[str] = Counter()
        for source in self._sources(subject, step):
            carriers.update({*source.arrays, *(f"block_table of group {group}" for group in source.tables)})
            for wrong in [*self._arrays(step, source), *self._tables(step, source)]:
                seen.setdefault((wrong.array, wrong.owner), _Seen(wrong)).layers.append(source.layer)
        return [self._finding(step, item, carriers[item.wrong.array]) for item in seen.values()]

    def _sources(self, subject: Subject, step: Step) -> Iterator[_Source]:
        if subject.gpu is not None:
            buffers, sizes = subject.gpu.buffers, step.expected.arrays
            arrays = {name: getattr(buffers, name).tensor[: len(sizes[name])].cpu() for name in _STAGED}
            tables = {}
            for group, (slots, table) in enumerate(zip(buffers.slot_mappings, buffers.block_tables, strict=True)):
                name = f"slot_mapping of group {group}"
                arrays[name] = slots.tensor[: len(sizes[name])].cpu()
                tables[group] = table.tensor[: len(sizes["seq_lens"])].cpu()
            yield _Source(None, arrays, tables)
        elif step.inputs:
            yield _Source(None, step.inputs, {})
        for call in step.calls:
            yield _Source(call.layer, call.arrays, {call.group: call.block_table})

    def _arrays(self, step: Step, source: _Source) -> Iterator[_Wrong]:
        for name, tensor in source.arrays.items():
            wanted, present = step.expected.arrays[name], tensor.tolist()
            self.looks += 1
            if len(present) != len(wanted):
                yield _Wrong(name, None, f"has {len(present)} entries, the scheduler's has {len(wanted)}")
            elif present != wanted:
                yield from _wrong_entries(step.expected, name, present, wanted)

    def _tables(self, step: Step, source: _Source) -> Iterator[_Wrong]:
        for group, table in source.tables.items():
            for row, blocks in enumerate(step.expected.block_tables[group]):
                self.looks += 1
                present = table[row].tolist() if row < len(table) else []
                # What a row has beyond its request's blocks is padding.
                wanted = [*blocks, *[0] * (len(present) - len(blocks))]
                if present != wanted:
                    columns = enumerate(zip_longest(present, wanted))
                    column, (one, other) = next((index, pair) for index, pair in columns if pair[0] != pair[1])
                    yield _Wrong(
                        f"block_table of group {group}",
                        step.expected.request_owners[row],
                        f"has in row {row}, column {column} block {one}, the scheduler's is {other}",
                    )

    def _finding(self, step: Step, seen: _Seen, num_carriers: int) -> Finding:
        wrong, layer = seen.wrong, seen.layers[0]
        if None in seen.layers or len(seen.layers) == num_carriers:
            layer = None
        whose = "is padding" if wrong.owner is None else f"belongs to request {wrong.owner!r}"
        given = "" if layer is None else f" given to layer {layer!r}"
        return self.found(
            f"in step {step.index} {wrong.array}{given} {wrong.says}; the row {whose}",
            step=step.index,
            layer=layer,
            request=wrong.owner,
            key=None if step.key is None else str(step.key),
            node=wrong.array,
        )


@dataclass(frozen=True)
class _Source:
    """Who has arrays of a step (``layer`` None: the runner): by name, and block tables by group."""

    layer: str | None
    arrays: Mapping[str, torch.Tensor]
    tables: Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class _Wrong:
    """Where an array differs: in rows of ``owner``, None: padding."""

    array: str
    owner: str | None
    says: str


@dataclass
class _Seen:
    """The same difference in several sources."""

    wrong: _Wrong
    layers: list[str | None] = field(default_factory=list)


def _wrong_entries(
    expected: ExpectedStep, name: str, present: Sequence[int], wanted: Sequence[int]
) -> Iterator[_Wrong]:
    """One for each owner of entries that differ."""
    by_owner: dict[str | None, list[int]] = {}
    for index, pair in enumerate(zip(present, wanted, strict=True)):
        if pair[0] != pair[1]:
            by_owner.setdefault(expected.owner(name, index), []).append(index)
    for owner, indices in by_owner.items():
        index = indices[0]
        values = f"{present[index]}, the scheduler's is {wanted[index]}"
        if name == "input_ids":  # token ids are the user's text
            values = "another token than was scheduled"
        more = f" (and {len(indices) - 1} more)" if len(indices) > 1 else ""
        yield _Wrong(name, owner, f"has in row {index}{_position(expected, name, index)} {values}{more}")


_STAGED = ("input_ids", "positions", "query_start_loc", "seq_lens", "logits_indices")


def _position(expected: ExpectedStep, name: str, index: int) -> str:
    """Of a token row: its position in its request."""
    if name in ("query_start_loc", "seq_lens", "logits_indices"):
        return ""
    return f", position {expected.arrays['positions'][index]},"
