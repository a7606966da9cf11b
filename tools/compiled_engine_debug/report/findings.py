"""Findings at the top of the page: those that other tools found, and what a recording shows by itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from compiled_engine.compile.graphs.bindings import Role
from compiled_engine_debug.findings import Finding
from compiled_engine_debug.recording import Recording
from compiled_engine_debug.report.bindings import graph_name, moved_bindings
from compiled_engine_debug.report.key_use import KeyUse
from compiled_engine_debug.report.text import count_text, counted, listed, seconds_text, share_text

PROBLEM, WARNING, NOTE = "problem", "warning", "note"

WASTEFUL_SHARE = 0.5
"""A key is wasteful when at least this share of what it computed is padding, ..."""
WASTEFUL_PART = 0.05
"""... and its padding is at least this part of everything that all steps computed."""

_PLACES = ("step", "layer", "request", "slot", "key", "node")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Card:
    """One finding as the page shows it."""

    severity: str
    finding: Finding

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Where it was found, as name and text."""
        found = ((name, getattr(self.finding, name)) for name in _PLACES)
        return tuple((name, str(value)) for name, value in found if value is not None)


def given_findings(findings: Iterable[Finding]) -> tuple[Card, ...]:
    """Those of an audit or a bisection, in their order; each is a problem."""
    return tuple(Card(PROBLEM, finding) for finding in findings)


def own_findings(recording: Recording, uses: Sequence[KeyUse]) -> tuple[Card, ...]:
    """What ``recording`` shows without an audit, the worst first. ``uses``: of its keys."""
    found = [
        *_cut_short(recording),
        *_failed_phases(recording),
        *_moved(recording),
        *_late_compiles(recording),
        *_fallbacks(recording),
        *_wasteful(uses),
        *_not_captured(uses),
        *_unused(recording, uses),
    ]
    return tuple(sorted(found, key=lambda card: (PROBLEM, WARNING, NOTE).index(card.severity)))


def _cut_short(recording: Recording) -> Iterator[Card]:
    if recording.header.model is None:
        yield Card(PROBLEM, Finding("start", "The engine did not start: the recording ends before it was ready."))
    if recording.truncated:
        text = (
            "The file has no last line: the process was killed, or still ran when the file was read. It holds "
            f"{counted(len(recording.steps), 'step')}; later ones are missing."
        )
        yield Card(PROBLEM, Finding("truncated file", text))


def _failed_phases(recording: Recording) -> Iterator[Card]:
    for phase in recording.phases:
        if phase.note is not None and "failed" in phase.note.split(", "):
            text = f"The phase {phase.name!r} failed after {seconds_text(phase.seconds)}."
            yield Card(PROBLEM, Finding("failed phase", text))


def _moved(recording: Recording) -> Iterator[Card]:
    """Of each role, one card for all tensors that the same graphs have elsewhere: a rebinding moves many at once."""
    graphs: dict[tuple[str, str, int, int], list[str]] = {}
    for moved in moved_bindings(recording):
        binding = moved.binding
        place = (binding.role, binding.name, binding.address, moved.present)
        graphs.setdefault(place, []).append(graph_name(moved.graph))
    alike: dict[tuple[str, tuple[str, ...]], list[tuple[str, str]]] = {}
    for (role, name, captured, present), names in graphs.items():
        text = f"{role} {name!r} is at {captured:#x}, while the engine has it at {present:#x}"
        alike.setdefault((role, tuple(names)), []).append((name, text))
    for (role, in_graphs), tensors in alike.items():
        text = f"In {counted(len(in_graphs), 'captured graph')} the {listed([text for _, text in tensors])}."
        only = tensors[0][0] if len(tensors) == 1 else None
        is_cache = role == Role.CACHE.value
        yield Card(
            PROBLEM,
            Finding(
                "stale address",
                f"{text} The graphs: {listed(in_graphs)}.",
                layer=only if is_cache else None,
                node=None if is_cache else only,
            ),
        )


def _late_compiles(recording: Recording) -> Iterator[Card]:
    for record in recording.compiles:
        if record.after_warmup:
            reason = record.reason or "torch gives no reason"
            text = f"Compiled after warm-up, in {seconds_text(record.seconds)}: {record.what}. Reason: {reason}"
            yield Card(PROBLEM, Finding("compile after warm-up", text))


def _fallbacks(recording: Recording) -> Iterator[Card]:
    """Steps that ran eagerly though graphs were declared. Reasons that differ in numbers alone are one."""
    if not recording.keys:
        return
    steps = recording.steps
    alike: dict[str, list[int]] = {}
    for position in np.flatnonzero(steps.mode == "eager").tolist():
        alike.setdefault(_NUMBER.sub("N", steps.reason[position] or "no reason is given"), []).append(position)
    for reason, positions in alike.items():
        first, tokens = positions[0], int(steps.num_tokens[positions].sum())
        text = (
            f"{counted(len(positions), 'step')} of {count_text(len(steps))} ran eagerly, with "
            f"{counted(tokens, 'token')}. In the first of them: {steps.reason[first] or reason}."
        )
        yield Card(WARNING, Finding("fallback to eager", text, step=int(steps.index[first])))


def _wasteful(uses: Sequence[KeyUse]) -> Iterator[Card]:
    everything = sum(use.num_padded for use in uses)
    wasteful = [
        use
        for use in uses
        if use.num_wasted and use.num_wasted >= max(WASTEFUL_SHARE * use.num_padded, WASTEFUL_PART * everything)
    ]
    for use in sorted(wasteful, key=lambda use: -use.num_wasted):
        text = (
            f"{share_text(use.num_wasted, use.num_padded)} of what this key computed is padding: "
            f"{count_text(use.num_wasted)} of {counted(use.num_padded, 'token')} in {counted(use.num_steps, 'step')}."
        )
        yield Card(WARNING, Finding("wasteful key", text, key=use.key))


def _not_captured(uses: Sequence[KeyUse]) -> Iterator[Card]:
    missing = [use.key for use in uses if use.is_declared and use.kind != "bucket" and not use.num_graphs]
    if missing:
        text = f"{counted(len(missing), 'declared key')} without a captured graph: {listed(missing)}."
        yield Card(WARNING, Finding("key not captured", text))


def _unused(recording: Recording, uses: Sequence[KeyUse]) -> Iterator[Card]:
    unused = [use for use in uses if use.is_declared and not use.num_steps]
    if unused and len(recording.steps):
        spent = sum(use.captured_seconds for use in unused)
        text = (
            f"{counted(len(unused), 'declared key')} of {sum(use.is_declared for use in uses)} served no step; "
            f"capturing them took {seconds_text(spent)}: {listed([use.key for use in unused])}."
        )
        yield Card(NOTE, Finding("key never used", text))
