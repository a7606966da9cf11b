"""What capturing all graphs takes, in seconds and memory, by key."""

from __future__ import annotations

from typing import Any

from compiled_engine.compile.graphs.backend import GraphRecord
from compiled_engine.compile.graphs.keys import GraphKey
from compiled_engine.compile.ledger import Ledger
from gpu_checks.lab import Lab, name_of
from gpu_checks.report import Outcome, passed_if


def check(lab: Lab) -> Outcome:
    """The default sizes for the largest batch that is timed, in mode full_and_piecewise."""
    folder, dtype = lab.measured_llama()
    ledger = Ledger()
    most, context = max(lab.sizes.batches), lab.sizes.context
    settings: dict[str, Any] = {
        "graph_mode": "full_and_piecewise",
        "dtype": name_of(dtype),
        "max_num_seqs": most,
        "max_num_batched_tokens": min(512, most * context),
        "max_model_len": context,
    }
    with lab.runner(folder, ledger, **settings) as runner:
        keys = runner.dispatcher.keys()
        by_key: dict[GraphKey, list[GraphRecord]] = {key: [] for key in keys}
        for record in runner.graph_records:
            by_key.setdefault(record.part.key, []).append(record)
    faults = [f"{key} was not captured" for key, records in by_key.items() if not records]
    faults += [f"{key} was captured and is never asked for" for key in by_key if key not in keys]
    rows = [_row(key, records) for key, records in by_key.items()]
    figures = {
        "keys": len(keys),
        "graphs": sum(row["graphs"] for row in rows),
        "seconds": sum(row["ms"] for row in rows) / 1e3,
        "bytes": sum(row["kib"] for row in rows) * 1024,
        "start_phases": ledger.to_json()["phases"],
    }
    summary = (
        f"{figures['keys']} keys, {figures['graphs']} graphs captured in {figures['seconds']:.2f} s, "
        f"{figures['bytes'] / 2**20:.0f} MiB"
    )
    return passed_if(faults, summary, figures=figures, rows=rows)


def _row(key: GraphKey, records: list[GraphRecord]) -> dict[str, Any]:
    return {
        "key": str(key),
        "graphs": len(records),
        "launches": sum(len(record.launches) for record in records),
        "ms": 1e3 * sum(record.seconds for record in records),
        "kib": sum(record.num_bytes for record in records) // 1024,
    }
