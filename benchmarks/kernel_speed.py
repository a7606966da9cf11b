"""The CPU's kernels beside what the machine can do: its memory bandwidth and its rate of float32 multiply-adds.

Rooflines are measured first, with the same threads: reading a buffer far beyond the caches, the best of a few square
products of oneDNN, and multiply-adds in registers. Weights of a shape take turns, so that together they exceed the
caches, as in a real step of a model. Times are minima: what another process does to a run is no property of a kernel.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from attention_speed import attention_rows
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.ops.cpu.build import load_kernels
from compiled_engine.ops.cpu.packing import ALIGNMENT, WeightPart, pack_into, packed_num_bytes
from compiled_engine.ops.cpu.threads import CpuThreads
from compiled_engine.ops.quantized_rows import QuantizedRows

RESULTS = Path(__file__).resolve().parent / "results" / "kernels.json"
CACHE_BYTES = 96 << 20
SHAPES = {
    "qkv": (576, 960),
    "attention out": (576, 576),
    "gate, up": (576, 3072),
    "down": (1536, 576),
    "head": (576, 49152),
    "8B attention out": (4096, 4096),
    "8B gate": (4096, 14336),
}
STORAGES = ("float32", "bfloat16", "int8", "int4")
GROUP_SIZE = 32

MULTIPLY_ADDS = """
#include <cstdint>
extern "C" float multiply_adds(int64_t count) {
    typedef float Floats __attribute__((vector_size(64)));
    Floats sums[10], factor = Floats{} + 0.5f;
    for (int j = 0; j < 10; ++j) sums[j] = Floats{} + static_cast<float>(j);
    for (int64_t i = 0; i < count; ++i)
#pragma GCC unroll 10
        for (int j = 0; j < 10; ++j)
            sums[j] = sums[j] * factor + factor;
    for (int j = 1; j < 10; ++j) sums[0] += sums[j];
    return sums[0][0];
}
"""


@dataclass(frozen=True)
class Rooflines:
    """bandwidth: bytes read per second. product: operations per second of oneDNN's best square float32 product.
    registers: operations per second of multiply-adds that touch no memory, on all threads (one thread's rate times
    their number).
    """

    bandwidth: float
    product: float
    registers: float


@dataclass(frozen=True)
class Measurement:
    """The shortest of many runs of one kernel. num_bytes: read from memory. operations: two per multiply-add."""

    kernel: str
    shape: str
    storage: str
    num_rows: int
    seconds: float
    num_bytes: int
    operations: int


@dataclass(frozen=True)
class Limits:
    """How long one measurement goes on: until both are reached."""

    seconds: float
    runs: int = 5


def shortest(run: Callable[[int], object], limits: Limits) -> float:
    """Seconds of the shortest of many ``run(index)``."""
    best, index, end = float("inf"), 0, time.monotonic() + limits.seconds
    while index < limits.runs or time.monotonic() < end:
        start = time.perf_counter()
        run(index)
        best = min(best, time.perf_counter() - start)
        index += 1
    return best


def measure_rooflines(threads: int, limits: Limits) -> Rooflines:
    """What this machine can do with ``threads`` threads."""
    pieces = torch.ones((8 * CACHE_BYTES) // 8 // 4, dtype=torch.int64).repeat(4).chunk(32)
    bandwidth = pieces[0].nbytes / shortest(lambda index: pieces[index % len(pieces)].sum(), limits)
    product = 0.0
    for size in (768, 1024, 1536, 2048):
        left, right = torch.randn(size, size), torch.randn(size, size)
        packed = torch.ops.mkldnn._reorder_linear_weight(right, None)
        multiply = partial(torch.ops.mkldnn._linear_pointwise, left, packed, None, "none", [], "")
        product = max(product, 2 * size**3 / shortest(lambda _: multiply(), limits))  # noqa: B023
    return Rooflines(bandwidth, product, threads * register_rate(limits))


def register_rate(limits: Limits) -> float:
    """Operations per second of one thread's multiply-adds in registers, with the compiler's best instructions."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "multiply_adds.cpp", Path(folder) / "multiply_adds.so"
        source.write_text(MULTIPLY_ADDS, encoding="utf-8")
        command = [os.environ.get("CXX") or "g++", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        function = ctypes.CDLL(str(library)).multiply_adds
        function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_float
        count = 20_000
        return count * 10 * 16 * 2 / shortest(lambda _: function(count), limits)


def weight_part(rows: int, in_features: int, storage: str) -> WeightPart:
    """Random numbers; quantised ones with float16 scales for ``GROUP_SIZE`` numbers each."""
    if storage == "float32":
        return torch.randn(rows, in_features)
    if storage == "bfloat16":
        return torch.randn(rows, in_features).bfloat16()
    scales = torch.rand(rows, in_features // GROUP_SIZE).half()
    if storage == "int8":
        return QuantizedRows(8, torch.randint(-128, 128, (rows, in_features), dtype=torch.int8), scales, None)
    return QuantizedRows(4, torch.randint(0, 16, (rows, in_features), dtype=torch.uint8), scales, None)


def packed_copies(part: WeightPart, library: ctypes.CDLL) -> list[torch.Tensor]:
    """So many copies of the packed weight that together they exceed the caches."""
    num_bytes = packed_num_bytes([part])
    stride = -(-num_bytes // ALIGNMENT) * ALIGNMENT
    count = max(1, -(-CACHE_BYTES // num_bytes))
    buffer = torch.empty(count * stride + ALIGNMENT, dtype=torch.uint8)
    start = -buffer.data_ptr() % ALIGNMENT
    copies = [buffer[start + index * stride :][:num_bytes] for index in range(count)]
    for copy in copies:
        pack_into([part], copy, library)
    return copies


def measure_linear(
    library: ctypes.CDLL, shapes: Sequence[str], storages: Sequence[str], row_counts: Sequence[int], limits: Limits
) -> Iterator[Measurement]:
    """``packed_linear`` on float32 rows."""
    function = library.packed_linear
    for shape in shapes:
        in_features, out_features = SHAPES[shape]
        for storage in storages:
            copies = packed_copies(weight_part(out_features, in_features, storage), library)
            places = [copy.data_ptr() for copy in copies]
            for num_rows in row_counts:
                x, out = torch.randn(num_rows, in_features), torch.empty(num_rows, out_features)
                source, target = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
                stride, rows = ctypes.c_int64(in_features), ctypes.c_int64(num_rows)
                none, zero = ctypes.c_void_p(None), ctypes.c_int64(0)

                def run(index: int) -> None:
                    place = ctypes.c_void_p(places[index % len(places)])  # noqa: B023
                    function(source, stride, rows, 0, place, none, none, zero, target, zero)  # noqa: B023

                yield Measurement(
                    "packed_linear",
                    f"{shape} {in_features}x{out_features}",
                    storage,
                    num_rows,
                    shortest(run, limits),
                    copies[0].nbytes,
                    2 * num_rows * in_features * out_features,
                )


def measure_attention(kernel_folder: Path | None, seconds: float) -> Iterator[Measurement]:
    """One layer of SmolLM2's shape, with a float32 and a bfloat16 cache."""
    spec = AttentionSpec("layer", num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        for row in attention_rows(spec, dtype, kernel_folder, seconds):
            took = row.microseconds * 1e-6
            num_bytes, operations = row.gigabytes_per_second * 1e9 * took, row.gigaflops_per_second * 1e9 * took
            num_rows = row.case.batch_size * row.case.new
            yield Measurement("attention", row.case.name, name, num_rows, took, round(num_bytes), round(operations))


def table_of(rooflines: Rooflines, measurements: Sequence[Measurement], threads: int) -> Table:
    """The measurements as parts of the rooflines."""
    title = (
        f"{threads} threads: memory {rooflines.bandwidth / 1e9:.1f} GB/s, "
        f"oneDNN {rooflines.product / 1e9:.0f} GFLOP/s, registers {rooflines.registers / 1e9:.0f} GFLOP/s"
    )
    table = Table(title=title)
    for name in ("kernel", "shape", "storage"):
        table.add_column(name)
    for name in ("rows", "us", "GB/s", "% memory", "GFLOP/s", "% oneDNN", "% registers", "x bound"):
        table.add_column(name, justify="right")
    for item in measurements:
        bandwidth, rate = item.num_bytes / item.seconds, item.operations / item.seconds
        bound = max(item.num_bytes / rooflines.bandwidth, item.operations / rooflines.registers)
        table.add_row(
            item.kernel,
            item.shape,
            item.storage,
            str(item.num_rows),
            f"{item.seconds * 1e6:.1f}",
            f"{bandwidth / 1e9:.1f}",
            f"{100 * bandwidth / rooflines.bandwidth:.0f}",
            f"{rate / 1e9:.0f}",
            f"{100 * rate / rooflines.product:.0f}",
            f"{100 * rate / rooflines.registers:.0f}",
            f"{item.seconds / bound:.2f}",
        )
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--path", help="instruction path of the kernels (default: the best that this CPU runs)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 32, 512])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--storages", nargs="+", choices=STORAGES, default=list(STORAGES), metavar="STORAGE")
    parser.add_argument("--attention", action=argparse.BooleanOptionalAction, default=True, help="attention too")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each measurement")
    parser.add_argument("--kernels", type=Path, help="folder that keeps the built kernels (default: built anew)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON file")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    library = load_kernels(arguments.kernels, arguments.path)
    limits = Limits(arguments.seconds)
    rooflines = measure_rooflines(arguments.threads, limits)
    CpuThreads(library, arguments.threads)
    measurements = list(measure_linear(library, arguments.shapes, arguments.storages, arguments.rows, limits))
    if arguments.attention:
        measurements += measure_attention(arguments.kernels, arguments.seconds)
    Console(width=160).print(table_of(rooflines, measurements, arguments.threads))
    report = {
        "machine": platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "rooflines": asdict(rooflines),
        "measurements": [asdict(item) for item in measurements],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
