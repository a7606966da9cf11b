"""A recording as lines of JSON with places instead of addresses, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from compiled_engine.compile.records import CapturedGraphRecord, HeaderRecord, StepRecord
from compiled_engine_debug.bundle.regions import RegionMap
from compiled_engine_debug.bundle.scrub import scrub_data, scrub_text
from compiled_engine_debug.recording import Recording

_to_json = json.JSONEncoder(separators=(",", ":")).encode

Line = dict[str, Any]


def lines_of(recording: Recording, regions: RegionMap) -> Iterator[bytes]:
    """The lines of ``recording``, each made of the fields that are known, so that nothing else gets out."""
    return ((_to_json(line) + "\n").encode() for line in _lines(recording, regions))


def with_addresses(lines: Iterable[bytes], regions: RegionMap) -> Iterator[bytes]:
    """What ``lines_of`` wrote, with addresses in ``regions``. Raises ``ValueError`` for a place that is none."""
    for line in lines:
        # Most lines are steps, which have no addresses.
        if b'"address":' not in line:
            yield line
            continue
        data = json.loads(line)
        for item in (data, *data.get("bindings", ())):
            if item.get("address") is not None:
                item["address"] = regions.address(item["address"])
        yield (_to_json(data) + "\n").encode()


def _lines(recording: Recording, regions: RegionMap) -> Iterator[Line]:
    yield {"kind": "header", **_header(recording.header)}
    for phase in recording.phases:
        yield {"kind": "phase", **scrub_data(asdict(phase))}
    if recording.plan is not None:
        yield {"kind": "plan", "plan": json.loads(recording.plan.to_json())}
    for kind, records in (("cache", recording.caches), ("weight", recording.weights)):
        for record in records:
            yield {"kind": kind, **_placed(asdict(record), regions.place)}
    for graph in recording.graphs:
        yield {"kind": "graph", **_graph(graph, regions)}
    yield {"kind": "keys", "keys": [asdict(key) for key in recording.keys]}
    if recording.memory is not None:
        yield {"kind": "memory", **asdict(recording.memory)}
    for compiled in recording.compiles:
        yield {"kind": "compile", **scrub_data(asdict(compiled))}
    for step in recording.steps:
        yield {"kind": "step", **_step(step)}
    if not recording.truncated:
        yield {"kind": "end", "num_steps": len(recording.steps)}


def _header(header: HeaderRecord) -> Line:
    # "record" names the file of this very recording.
    return {**asdict(header), "config": {**scrub_data(header.config), "record": None}}


def _graph(graph: CapturedGraphRecord, regions: RegionMap) -> Line:
    data = asdict(graph)
    return {**data, "bindings": [_placed(binding, regions.place) for binding in data["bindings"]]}


def _step(step: StepRecord) -> Line:
    return {**vars(step), "reason": None if step.reason is None else scrub_text(step.reason)}


def _placed(record: Line, place: Callable[[int], str]) -> Line:
    return {**record, "address": None if record["address"] is None else place(record["address"])}
