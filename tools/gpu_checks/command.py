"""The command line: which sections run, in which order, and what becomes of one that fails."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError
from gpu_checks.lab import TINY, Lab, Sizes
from gpu_checks.report import (
    Outcome,
    Result,
    Verdict,
    exit_code,
    new_console,
    print_details,
    print_summary,
    read_json,
    skipped,
    write_json,
)

SECTIONS: Mapping[str, str] = {
    "environment": "versions, the GPU, its memory and driver",
    "kernels": "Triton attention and sampling against the reference",
    "greedy": "tokens in every graph mode against transformers' generate, float32",
    "stale": "graphs refuse caches that were bound anew",
    "bindings": "graphs use the caches and weights that they declare, told from their kernels' parameters",
    "capture": "seconds and memory of capturing, by graph",
    "bandwidth": "decode attention against the memory's bandwidth; prefill throughput",
    "warm_start": "a second start compiles nothing",
    "decode": "time of a decode step against transformers with CUDA graphs",
}
"""Each is the function ``check`` of the module of that name. The one that takes longest is the last."""

NO_GPU = 3
_ROOT = Path(__file__).parents[2]
_EXAMPLES = """\
examples:
  python tools/gpu_check.py                                 everything, on the first GPU
  python tools/gpu_check.py --model ~/SmolLM2-135M-Instruct compare tokens on a real model
  python tools/gpu_check.py --sections decode --budget 600  one section, with more time
  TRITON_INTERPRET=1 python tools/gpu_check.py --device cpu all but the GPU, on a tiny model

Run it from the root of the repository. Exit codes: 0 all that ran passed, 1 something failed, 2 a wrong option, 3 no
GPU. The sections decode, capture and bandwidth measure and judge no time.
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python tools/gpu_check.py",
        description="Check and measure the engine on one GPU.",
        epilog="sections:\n" + "".join(f"  {name:<13}{what}\n" for name, what in SECTIONS.items()) + "\n" + _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu for the emulation (default: %(default)s)")
    parser.add_argument("--sections", type=_sections, default=tuple(SECTIONS), help="comma-separated (default: all)")
    parser.add_argument("--budget", type=float, default=360, help="seconds; no section starts later (default: 360)")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="JSON file (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="folder of a small model for greedy and stale (default: random)")
    parser.add_argument("--piece-compiler", default="aoti", help="see EngineConfig (default: %(default)s)")
    sizes = parser.add_argument_group("sizes of the random Llama and of batches (default: 1B on a GPU, tiny on a CPU)")
    for item in fields(Sizes):
        sizes.add_argument(
            f"--{item.name.replace('_', '-')}",
            type=_numbers if isinstance(item.default, tuple) else int,
            metavar="N,N" if isinstance(item.default, tuple) else "N",
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections; returns the exit code."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        config = EngineConfig(device=arguments.device, piece_compiler=arguments.piece_compiler)
        if config.device_type == "tpu":
            raise ConfigError("device is 'tpu': choose one of cpu, cuda, cuda:N")
        device = torch.device(config.device)
    except ConfigError as error:
        parser.error(str(error))
    missing = _why_no_gpu(device)
    if missing:
        print(missing, file=sys.stderr)
        return NO_GPU
    if arguments.model is not None and not (arguments.model / "config.json").is_file():
        parser.error(f"--model {arguments.model}: there is no config.json in that folder")
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
        lab = Lab(
            device=device,
            sizes=_sizes(arguments, device),
            model=None if arguments.model is None else arguments.model.resolve(),
            piece_compiler=arguments.piece_compiler,
            scratch=Path(scratch),
            deadline=time.monotonic() + arguments.budget,
        )
        results = _Run(lab, arguments, sys.argv[1:] if argv is None else argv).all()
    return exit_code(results)


class _Run:
    """Runs sections one after another, and keeps the JSON file up to date."""

    def __init__(self, lab: Lab, arguments: argparse.Namespace, argv: Sequence[str]) -> None:
        self._lab = lab
        self._out: Path = arguments.out
        self._names: Sequence[str] = arguments.sections
        self._argv = argv
        self._console = new_console()
        self._results: list[Result] = []
        self._begin = time.monotonic()

    def all(self) -> list[Result]:
        """Every section's result, in order."""
        for index, name in enumerate(self._names):
            print(f"{name}: {SECTIONS[name]} ...", file=sys.stderr, flush=True)
            self._add(run_section(name, self._lab))
            rest = self._names[index + 1 :]
            if rest and self._results[-1].outcome.verdict is Verdict.ERROR and device_is_broken(self._lab):
                for result in self._in_a_new_process(rest):
                    self._add(result)
                break
        print_summary(self._results, self._console)
        print(f"written to {self._out}")
        return self._results

    def _add(self, result: Result) -> None:
        self._results.append(result)
        print_details(result, self._console)
        heading: dict[str, Any] = {
            "device": str(self._lab.device),
            "seconds": time.monotonic() - self._begin,
            "sizes": {item.name: getattr(self._lab.sizes, item.name) for item in fields(Sizes)},
        }
        write_json(self._out, self._results, heading)

    def _in_a_new_process(self, names: Sequence[str]) -> list[Result]:
        """An error on the device stays with its process: what is left needs another one."""
        out = self._lab.scratch / "rest.json"
        # Of an option that is given twice, the last counts.
        options = ["--sections", ",".join(names), "--out", str(out), "--budget", str(max(0, self._lab.seconds_left))]
        command = [sys.executable, str(_ROOT / "tools" / "gpu_check.py"), *self._argv, *options]
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        process = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        if not out.exists():
            why = f"the device was broken before, and a new process ended with {process.returncode}"
            return [Result(name, 0.0, Outcome(Verdict.ERROR, why)) for name in names]
        return read_json(out)


def run_section(name: str, lab: Lab) -> Result:
    """The section's result, whatever it raises."""
    if lab.seconds_left <= 0:
        return Result(name, 0.0, skipped("the budget was spent: run it alone, or give more with --budget"))
    begin = time.perf_counter()
    try:
        outcome = importlib.import_module(f"gpu_checks.{name}").check(lab)
        lab.release_memory()
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr)
        message = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        outcome = Outcome(Verdict.ERROR, message, {"traceback": traceback.format_exc()})
    seconds = time.perf_counter() - begin
    return Result(name, seconds, outcome)


def device_is_broken(lab: Lab) -> bool:
    """Whether the GPU refuses all further work of this process, as it does after an illegal access."""
    if not lab.on_gpu:
        return False
    try:
        torch.ones(1, device=lab.device).sum().item()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        print(f"the device is broken for this process: {error}", file=sys.stderr)
        return True
    return False


def _why_no_gpu(device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) < count:
        return ""
    return (
        f"gpu_check: {device} is not there, torch {torch.__version__} sees {count} GPU(s): use a machine with a GPU "
        "and a CUDA build of torch, or add --device cpu for the emulation"
    )


def _sizes(arguments: argparse.Namespace, device: torch.device) -> Sizes:
    given = {item.name: getattr(arguments, item.name) for item in fields(Sizes)}
    known = {name: value for name, value in given.items() if value is not None}
    return replace(TINY if device.type == "cpu" else Sizes(), **known)


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown section {unknown[0]!r}: choose among {', '.join(SECTIONS)}")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 1,8,32") from None
