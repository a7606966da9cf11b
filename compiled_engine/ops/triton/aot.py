"""Triton kernels compiled ahead of time, for GPUs that this machine need not have.

Triton's JIT keeps what it compiled in a folder, under a key of source, signature, specialisation, options and target.
``compile_variants`` sends every variant down the JIT's own path, with a driver in place that has no device and only
names the target; a process on a GPU that then calls ``use_kernel_cache`` with the folder finds everything there. What
is left for it to build is the C launcher of each signature, which needs the GPU driver's library: Triton builds it with
the C compiler at the first launch and keeps it in the same folder.

``python -m compiled_engine.ops.triton.aot --help`` compiles all that a model needs and prints what it takes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from compiled_engine.config import default_kernel_folder
from compiled_engine.errors import ConfigError
from compiled_engine.ops.triton.kernel_cache import use_kernel_cache
from compiled_engine.ops.triton.model_variants import SMOLLM2, ModelShape, layer_shape, model_variants, read_model_shape
from compiled_engine.ops.triton.resources import Resources, resources_of
from compiled_engine.ops.triton.variants import KernelVariant

_TABLE_WIDTH = 120
_WARP_SIZES = {"cuda": 32, "hip": 64}
_ARCHITECTURES = {
    "cuda": ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"),
    "hip": ("gfx90a", "gfx942", "gfx950"),
}


@dataclass(frozen=True)
class CompiledVariant:
    """One variant for one target: what it takes on a device, and what it took here.

    ``target``: as ``parse_target`` reads it.   ``binary_bytes``: of the cubin or hsaco.   ``seconds``: wall time.
    ``was_cached``: the folder had it, nothing was compiled.
    """

    name: str
    target: str
    resources: Resources
    binary_bytes: int
    seconds: float
    was_cached: bool


def parse_target(name: str) -> GPUTarget:
    """The target of a name like ``sm_90`` or ``gfx942``. Raises ``ConfigError`` for one that is not supported."""
    for backend, names in _ARCHITECTURES.items():
        if name in names:
            arch = int(name.removeprefix("sm_")) if backend == "cuda" else name
            return GPUTarget(backend, arch, _WARP_SIZES[backend])
    raise ConfigError(f"target {name!r} is not supported: choose among {', '.join(_supported())}")


def _supported() -> tuple[str, ...]:
    return tuple(name for names in _ARCHITECTURES.values() for name in names)


def compile_variants(
    variants: Sequence[KernelVariant],
    targets: Sequence[str],
    folder: Path,
    on_compiled: Callable[[CompiledVariant], None] = lambda _: None,
) -> tuple[CompiledVariant, ...]:
    """Compiles each of ``variants`` for each of ``targets`` into ``folder``, in the form ``use_kernel_cache`` reads.

    No device is needed or touched. ``on_compiled`` is called with each as it is ready. Raises ``ConfigError`` for a
    target that is not supported, and where Triton was told to interpret kernels instead of compiling them.

    On AMD Triton compiles for tensors of up to 2 GiB and for larger ones apart; these are the former.
    """
    if triton.knobs.runtime.interpret:
        raise ConfigError("kernels cannot be compiled with TRITON_INTERPRET set: unset it")
    parsed = {name: parse_target(name) for name in targets}
    results = []
    with triton.knobs.cache.scope():
        use_kernel_cache(folder)
        for name, target in parsed.items():
            with _no_device(target):
                for variant in variants:
                    result = _compile(variant, name)
                    on_compiled(result)
                    results.append(result)
    return tuple(results)


class _NoDevice:
    """As much of a Triton driver as compiling asks for. It is its own device, so that its kernels are nobody else's."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> _NoDevice:
        return self

    def get_current_stream(self, device: _NoDevice) -> int:
        return 0


@contextmanager
def _no_device(target: GPUTarget) -> Iterator[None]:
    driver.set_active(_NoDevice(target))
    try:
        yield
    finally:
        # Triton finds the machine's own driver when it next needs one.
        driver.set_active(None)


def _compile(variant: KernelVariant, target: str) -> CompiledVariant:
    hits: list[bool] = []
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
        start = time.perf_counter()
        kernel = variant.compile()
        seconds = time.perf_counter() - start
    return CompiledVariant(variant.name, target, resources_of(kernel), len(kernel.kernel), seconds, all(hits))


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m compiled_engine.ops.triton.aot",
        description="Compile the Triton kernels of a model for GPUs that need not be here, and print what they take.",
    )
    parser.add_argument(
        "--targets",
        default="sm_80,sm_90,sm_100,gfx942",
        help="comma-separated (default: %(default)s); supported are " + ", ".join(_supported()),
    )
    parser.add_argument("--config", type=Path, help="config.json of the model; it goes before the numbers below")
    layer = SMOLLM2.layers[0]
    parser.add_argument("--heads", type=int, default=layer.num_heads, help="query heads (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=layer.num_kv_heads, help="KV heads (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=layer.head_dim, help="size of a head (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=SMOLLM2.vocab_size, help="vocabulary size (default: %(default)s)")
    parser.add_argument(
        "--window",
        type=int,
        action="append",
        metavar="N",
        help="positions that a layer with a sliding window sees; 0: all (the default). Repeat it for mixed models",
    )
    parser.add_argument("--soft-cap", type=float, help="soft cap of attention scores (default: none)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per KV cache block (default: %(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=default_kernel_folder(),
        help="folder for the binaries, which go into its folder triton (default: %(default)s, the store's, where the "
        "engine looks for them)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (default: that of the process); returns the exit code, 2 for a wrong argument."""
    arguments = build_parser().parse_args(argv)
    folder = arguments.out / "triton"
    try:
        variants = model_variants(_shape(arguments), getattr(torch, arguments.dtype), arguments.block_size)
        results = _compile_with_progress(variants, arguments.targets.split(","), folder)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH).print(_table(results))
    num_compiled = sum(not result.was_cached for result in results)
    print(f"{num_compiled} compiled, {len(results) - num_compiled} were there already: {folder}")
    if any(result.resources.registers is None for result in results):
        print("registers and spills of some are unknown: Triton's cuobjdump is missing")
    return 0


def _shape(arguments: argparse.Namespace) -> ModelShape:
    if arguments.config is not None:
        return read_model_shape(arguments.config)
    layers = (
        layer_shape(arguments.heads, arguments.kv_heads, arguments.head_dim, window or None, arguments.soft_cap)
        for window in arguments.window or [0]
    )
    return ModelShape(tuple(layers), arguments.vocab)


def _compile_with_progress(
    variants: Sequence[KernelVariant], targets: Sequence[str], folder: Path
) -> tuple[CompiledVariant, ...]:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling kernels", total=len(variants) * len(targets))
        return compile_variants(variants, targets, folder, on_compiled=lambda _: progress.advance(task))


def _table(results: Sequence[CompiledVariant]) -> Table:
    table = Table()
    table.add_column("variant", overflow="fold")
    table.add_column("target")
    for heading in ("registers", "shared B", "spill B", "binary B", "seconds"):
        table.add_column(heading, justify="right")
    for result in results:
        resources = result.resources
        numbers = (resources.registers, resources.shared_bytes, resources.spill_bytes, result.binary_bytes)
        cells = ("?" if number is None else f"{number:,}" for number in numbers)
        table.add_row(result.name, result.target, *cells, "cached" if result.was_cached else f"{result.seconds:.1f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
