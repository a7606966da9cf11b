"""What recording costs: the time of a step with it off, in memory and in a file, side by side.

One runner serves all three, in turns of one workload each, so that what else the machine does meets all alike. Steps
are paired by their number in the workload; the figure is the median of the ratios of their times, engine and runner
together. Decode steps dominate, which is where a fixed cost per step weighs most.

    python benchmarks/recording.py --rounds 20
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from busy import BusyClock
from compiled_engine import EngineConfig, SamplingParams
from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.recorder import Recorder
from compiled_engine.engine.core import Engine
from compiled_engine.models import find_model
from compiled_engine.runners import create_runner
from compiled_engine.runners.base import Runner

KINDS = ("off", "memory", "file")


def step_seconds(runner: Runner, recorder: Recorder | None, num_requests: int, num_tokens: int) -> list[float]:
    """Seconds of every step of ``num_requests`` prompts that get ``num_tokens`` tokens each."""
    engine = Engine(runner, enable_prefix_caching=False, recorder=recorder)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for number in range(num_requests):
        engine.add_request([5 + number, 6, 7, 8], params)
    seconds = []
    while engine.has_unfinished():
        begin = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def measure(
    runner: Runner, config: EngineConfig, folder: Path, rounds: int, num_requests: int, num_tokens: int
) -> dict[str, list[list[float]]]:
    """By kind, the seconds of the steps of every round. The kinds take turns in another order each round."""
    recorders: dict[str, Recorder | None] = {
        "off": None,
        "memory": Recorder(config, Ledger()),
        "file": Recorder(config, Ledger(), folder / "recording.jsonl"),
    }
    for recorder in filter(None, recorders.values()):
        recorder.start(runner.describe())
    step_seconds(runner, None, num_requests, num_tokens)
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for offset in range(len(KINDS)):
            kind = KINDS[(number + offset) % len(KINDS)]
            found[kind].append(step_seconds(runner, recorders[kind], num_requests, num_tokens))
    for recorder in filter(None, recorders.values()):
        recorder.close()
    return found


def ratios(found: dict[str, list[list[float]]], kind: str) -> dict[str, float]:
    """``kind`` against off: the median over all pairs of steps, and of the quickest run of every step."""
    pairs = [
        on / off for ons, offs in zip(found[kind], found["off"], strict=True) for on, off in zip(ons, offs, strict=True)
    ]
    quickest = {name: [min(times) for times in zip(*found[name], strict=True)] for name in (kind, "off")}
    return {"median_of_pairs": median(pairs), "quickest": sum(quickest[kind]) / sum(quickest["off"])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder (default: the default model)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of every kind (default 20)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16], help="batch sizes (default 1 16)")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each request (default 32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    config = EngineConfig(model=options.model, dtype="float32", max_model_len=256)
    runner = create_runner(config, find_model(config.model), Ledger())
    figures: dict[str, object] = {}
    clock = BusyClock.start()
    with tempfile.TemporaryDirectory(prefix="recording_") as folder:
        for num_requests in options.requests:
            found = measure(runner, config, Path(folder), options.rounds, num_requests, options.tokens)
            off_ms = 1e3 * median(seconds for run in found["off"] for seconds in run)
            figures[str(num_requests)] = {"off_ms": off_ms} | {kind: ratios(found, kind) for kind in KINDS[1:]}
            print(f"{num_requests} requests, {off_ms:.2f} ms per step without recording")
            for kind in KINDS[1:]:
                ratio = ratios(found, kind)
                print(f"  {kind:6}  {ratio['median_of_pairs']:.4f} of pairs, {ratio['quickest']:.4f} of the quickest")
    figures["others_share"] = clock.others_share()
    print(f"share of the CPUs that other processes took: {figures['others_share']}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    runner.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
