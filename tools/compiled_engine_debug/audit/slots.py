"""``slot-outside-mapping``: what a step did to cache slots is not what its slot mapping says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from compiled_engine_debug.audit.detector import Detector
from compiled_engine_debug.audit.step import AttentionCall, Step
from compiled_engine_debug.audit.subject import Subject
from compiled_engine_debug.findings import Finding

_MOST_SHOWN = 8
# Before a step its slots hold nothing that is wanted. They are filled with this, so that a write that was dropped shows
# even where the same K/V was there before. It is finite: what reads it by mistake goes on.
SENTINEL = 0.123


class SlotOutsideMapping(Detector):
    """Sums up every slot of every cache before and after each step.

    Named are slots that changed and are not in the step's slot mapping, slots of the mapping that were not written,
    and, where attention can be seen, slots of the mapping that hold something else than the layer's K/V. Also those
    that changed between two steps.
    """

    name = "slot-outside-mapping"
    about = "every cache slot before and after each step, against the slot mapping"

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[str, torch.Tensor] = {}
        self._owners: dict[tuple[int, int], str] = {}

    def refusal(self, subject: Subject) -> str | None:
        return "caches of XLA cannot be read without compiling" if subject.model is None else None

    def start(self, subject: Subject) -> Iterable[Finding]:
        self._sums = {name: slot_sums(slots) for name, slots in subject.slots().items()}
        return ()

    def before_step(self, subject: Subject, step: Step) -> Iterable[Finding]:
        self._note_owners(step)
        found: list[Finding] = []
        for name, slots in subject.slots().items():
            sums = slot_sums(slots)
            changed = torch.nonzero(sums != self._sums[name]).flatten().tolist()
            if changed:
                when = f"between step {step.index - 1} and step {step.index}" if step.index else "before step 0"
                found += self._by_owner(subject, step, name, changed, f"changed {when}, while nothing ran")
            mapped = torch.tensor(step.expected.slots(subject.group_of(name)), device=slots.device)
            slots[mapped] = SENTINEL
            sums[mapped] = slot_sums(slots[mapped])
            self._sums[name] = sums
        return found

    def after_step(self, subject: Subject, step: Step) -> Iterable[Finding]:
        found: list[Finding] = []
        for name, slots in subject.slots().items():
            before, after = self._sums[name], slot_sums(slots)
            self._sums[name] = after
            self.looks += len(after)
            if step.error is None:
                found += self._compare(subject, step, name, (before != after).cpu())
        return found

    def _compare(self, subject: Subject, step: Step, layer: str, changed: torch.Tensor) -> Iterator[Finding]:
        group = subject.group_of(layer)
        calls = [call for call in step.calls if call.layer == layer]
        mapped = step.expected.slots(group)
        outside = changed.clone()
        outside[step.expected.arrays[f"slot_mapping of group {group}"]] = False
        strays = torch.nonzero(outside).flatten().tolist()
        yield from self._by_owner(subject, step, layer, strays, "was written, and is not in the step's slot mapping")
        dropped = [slot for slot in mapped if not changed[slot]]
        yield from self._by_owner(subject, step, layer, dropped, "is in the step's slot mapping, and was not written")
        for call in calls:
            foreign = [slot for slot in _foreign(subject, step, call) if slot not in set(dropped)]
            says = "holds something else than the K/V that the layer was given for it"
            yield from self._by_owner(subject, step, layer, foreign, says)

    def _by_owner(self, subject: Subject, step: Step, layer: str, slots: Sequence[int], says: str) -> Iterator[Finding]:
        """One finding for each request whose slots are among ``slots``."""
        group = subject.group_of(layer)
        by_owner: dict[str | None, list[int]] = {}
        for slot in slots:
            by_owner.setdefault(self._owners.get((group, slot // subject.block_size)), []).append(slot)
        for owner, theirs in by_owner.items():
            slot = theirs[0]
            whose = "which no request has had" if owner is None else f"of request {owner!r}"
            block = f"block {slot // subject.block_size} {whose}"
            others = ", ".join(map(str, theirs[1:_MOST_SHOWN]))
            more = f", and {len(theirs) - _MOST_SHOWN} more" if len(theirs) > _MOST_SHOWN else ""
            also = f" (so do {others}{more})" if others else ""
            yield self.found(
                f"in step {step.index} slot {slot} of layer {layer!r}, in {block}, {says}{also}",
                step=step.index,
                layer=layer,
                request=owner,
                slot=slot,
                key=None if step.key is None else str(step.key),
            )

    def _note_owners(self, step: Step) -> None:
        for request in step.batch.requests:
            for group, table in enumerate(request.block_tables):
                for block in table:
                    if block:
                        self._owners[group, block] = request.request_id


def slot_sums(slots: torch.Tensor) -> torch.Tensor:
    """A number for each slot that depends on each of its bits and their places: int64 [num_slots].

    slots: [num_slots, ...]. Words are multiplied by odd numbers, modulo 2**64, so that a change of one word never goes
    unseen.
    """
    words = slots.reshape(len(slots), -1).contiguous().view(torch.uint8)
    words = words.view(torch.int64) if words.shape[1] % 8 == 0 else words.long()
    weights = torch.arange(words.shape[1], device=words.device, dtype=torch.int64) * 0x5DEECE66D + 1
    return (words * (weights | 1)).sum(1)


def _foreign(subject: Subject, step: Step, call: AttentionCall) -> list[int]:
    """Slots of real tokens that do not hold what ``call`` was given for them."""
    if call.key is None or call.value is None:
        return []
    mapped = step.expected.slots(call.group)
    kept = subject.slots()[call.layer][torch.tensor(mapped, device=call.key.device)]
    given = torch.stack([call.key, call.value], dim=1)[: step.expected.num_tokens]
    unlike = (_bits(kept) != _bits(given.to(kept.dtype))).flatten(1).any(1).tolist()
    return [slot for slot, differs in zip(mapped, unlike, strict=True) if differs]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, so that NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)
