"""Engine settings: one frozen dataclass whose every field is documented and checked when it is made."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from compiled_engine.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "int4")
GRAPH_MODES = ("none", "full_decode_only", "piecewise", "full", "full_and_piecewise")
PIECE_COMPILERS = ("aoti", "inductor", "eager")
ON_COMPILE = ("raise", "warn")

# Settings of which a TPU takes some values only, and why.
_ON_TPU: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("graph_mode", (None, "none"), "XLA compiles whole steps"),
    ("quantization", (None,), "the TPU runner multiplies with plain weights"),
    ("graphs", (None,), "XLA's graphs are compiled at every start and never kept"),
    ("require_precompiled", (False,), "XLA's graphs are compiled at every start and never kept"),
)

_UNITS = {"": 1, "b": 1, "k": 2**10, "kib": 2**10, "m": 2**20, "mib": 2**20, "g": 2**30, "gib": 2**30}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_bytes(value: int | str) -> int:
    """Number of bytes in ``value``: an integer, or text such as ``"512MiB"``, ``"4GB"`` or ``"2g"``.

    Raises ``ConfigError`` for anything else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{value!r} is not a number of bytes: give an integer, or text such as '512MiB' or '2GiB'")
    if isinstance(value, int):
        return value
    text = value.strip().lower()
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text[len(digits) :].strip()
    try:
        return int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{value!r} is not a number of bytes: give an integer, or text such as '512MiB'") from None


def default_cache_root() -> Path:
    """``$COMPILED_ENGINE_CACHE``, else ``$XDG_CACHE_HOME/compiled_engine``, else ``~/.cache/compiled_engine``."""
    own = os.environ.get("COMPILED_ENGINE_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "compiled_engine"


def default_store_root() -> Path:
    """The folder of this user's compiled graphs: ``graphs`` in ``default_cache_root()``."""
    return default_cache_root() / "graphs"


def default_kernel_folder() -> Path:
    """Where this user's compiled kernels are kept, beside the graphs that call them."""
    return default_store_root() / "kernels"


def _doc(text: str, default: Any = dataclasses.MISSING) -> Any:
    return field(default=default, metadata={"doc": text})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of one engine. Immutable; raises ``ConfigError`` when a value cannot work.

    ``EngineConfig.explain()`` returns the documentation of every field as text.
    """

    model: str | None = _doc(
        "Model folder, GGUF file or hub id. None: $COMPILED_ENGINE_MODEL, else the installed default model.", None
    )
    device: str = _doc(
        "Where the model runs: cpu, cuda, cuda:N for the N-th GPU, or tpu (XLA; with PJRT_DEVICE=CPU it runs XLA on "
        "the CPU).",
        "cpu",
    )
    dtype: str = _doc(
        "Arithmetic and cache type: auto, float32, bfloat16 or float16. auto on a GPU or TPU is bfloat16; on CPU, "
        "also behind XLA, it is float32, except for a 16-bit checkpoint on a CPU with bf16 instructions: bfloat16.",
        "auto",
    )
    quantization: Literal["int8", "int4"] | None = _doc(
        "Store the weights of linear layers as 8-bit integers with a scale per row, or as 4-bit integers with a scale "
        "and an offset per 32 numbers (the output head stays int8). None: as the checkpoint stores them; the blocks of "
        "a GGUF file are kept.",
        None,
    )
    max_model_len: int | None = _doc(
        "Most tokens of one request, prompt and output together. None: the model's own limit.", None
    )
    max_num_seqs: int = _doc("Most requests that run in one step.", 64)
    max_num_batched_tokens: int = _doc("Token budget of one step; longer prompts are computed in chunks of it.", 512)
    block_size: int = _doc("Tokens in one block of the KV cache.", 16)
    kv_cache_memory: int | str | None = _doc(
        "Bytes for the KV cache (an integer, or text such as '2GiB'). None: what max_num_seqs requests of "
        "max_model_len tokens need; on CPU at most 4 GiB and half of the free memory, on a GPU at most what "
        "gpu_memory_fraction leaves.",
        None,
    )
    enable_prefix_caching: bool = _doc(
        "Keep the K/V of finished requests until its memory is needed, so that a later prompt that begins alike does "
        "not compute it again.",
        True,
    )
    graph_mode: str | None = _doc(
        "Which steps are captured as graphs at the start and replayed later: none, full_decode_only (steps of one "
        "token per request), piecewise (all steps, with attention between the graphs), full (all steps, attention "
        "inside) or full_and_piecewise (steps of one token per request whole, others piecewise). On a GPU these are "
        "CUDA graphs; on CPU they are emulated, for tests and debugging; on a TPU XLA compiles whole steps instead. "
        "None: full_and_piecewise on a GPU, none elsewhere.",
        None,
    )
    graph_sizes: tuple[int, ...] | None = _doc(
        "Numbers of tokens, and of requests with a token each, to capture graphs for; max_num_seqs, or max_graph_size "
        "where that is less, is always among them. None: 1, 2, 4, and from 8 on in growing steps.",
        None,
    )
    max_graph_size: int | None = _doc(
        "The largest number of tokens to capture a graph for; it is captured as it is. None: max_num_batched_tokens, "
        "at most 512.",
        None,
    )
    token_buckets: tuple[int, ...] | None = _doc(
        "Numbers of tokens that steps are padded to on a TPU, where each is compiled at the start; "
        "max_num_batched_tokens is always among them. None: powers of two from 16, see bucket_gap.",
        None,
    )
    request_buckets: tuple[int, ...] | None = _doc(
        "Numbers of sampled rows that steps are padded to on a TPU; max_num_seqs, or max_num_batched_tokens where that "
        "is less, is always among them. None: powers of two from 8.",
        None,
    )
    bucket_gap: int = _doc(
        "From where powers of two lie further apart than this, token_buckets of None go on in steps of it: less "
        "padding, more to compile. 0: powers of two only.",
        0,
    )
    gpu_memory_fraction: float = _doc(
        "Share of a GPU's or TPU's memory that weights, graphs and the KV cache may take together.", 0.9
    )
    piece_compiler: str = _doc(
        "What compiles the pieces of a graph: aoti (ahead of time, fastest steps), inductor (faster to compile) or "
        "eager (runs the FX graph; for debugging).",
        "aoti",
    )
    graphs: str | None = _doc(
        "Folder of graphs that `compiled-engine precompile --out` made: run from it instead of the store of this "
        "user. It is only read.",
        None,
    )
    store: bool = _doc(
        "Keep compiled graphs on disk ($COMPILED_ENGINE_CACHE, else the user's cache folder) and take them from there "
        "at the next start.",
        True,
    )
    require_precompiled: bool = _doc(
        "Refuse to start, saying why, when the graphs are not there yet and would have to be compiled.", False
    )
    on_compile: str = _doc(
        "What to do if something is compiled after warm-up, which costs seconds in the middle of a step: raise "
        "(an error that names it) or warn.",
        "raise",
    )
    record: str | None = _doc(
        "Record the start, every step and every compilation, never prompts or tokens: memory keeps the last steps, "
        "anything else names a file of JSON lines, which is replaced; see compiled-engine-debug. None: nothing.",
        None,
    )
    seed: int = _doc("Seed of requests that bring none of their own.", 0)
    num_threads: int | None = _doc("CPU threads of the kernels. None: the cores this process may use.", None)

    def __post_init__(self) -> None:
        _choice("dtype", self.dtype, DTYPES)
        if not isinstance(self.device, str) or not re.fullmatch(r"cpu|cuda(:\d+)?|tpu", self.device):
            raise ConfigError(f"device is {self.device!r}: choose one of cpu, cuda, cuda:N, tpu")
        self._check_graphs()
        self._check_buckets()
        if self.quantization is not None:
            _choice("quantization", self.quantization, QUANTIZATIONS)
        _choice("piece_compiler", self.piece_compiler, PIECE_COMPILERS)
        _choice("on_compile", self.on_compile, ON_COMPILE)
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            _positive(name, getattr(self, name))
        for name in ("max_model_len", "num_threads"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name in ("enable_prefix_caching", "store", "require_precompiled"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: give True or False")
        if self.graphs is not None and (not isinstance(self.graphs, str) or not self.graphs):
            raise ConfigError(f"graphs is {self.graphs!r}: give a folder as text")
        if self.record is not None and (not isinstance(self.record, str) or not self.record):
            raise ConfigError(f"record is {self.record!r}: give a file as text, or 'memory'")
        if self.require_precompiled and not self.store and self.graphs is None:
            raise ConfigError("require_precompiled needs a place to find graphs in: leave store on, or set graphs")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed is {self.seed!r}: give an integer")
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise ConfigError(f"model is {self.model!r}: give a folder, a GGUF file or a hub id as text")
        if self.kv_cache_memory is not None:
            amount = parse_bytes(self.kv_cache_memory)
            if amount < 1:
                raise ConfigError(f"kv_cache_memory is {self.kv_cache_memory!r}: give a positive number of bytes")
            object.__setattr__(self, "kv_cache_memory", amount)
        if self.device_type == "tpu":
            self._check_tpu()

    @property
    def device_type(self) -> str:
        """The device without its index: cpu, cuda or tpu."""
        return self.device.partition(":")[0]

    @property
    def captures_graphs(self) -> bool:
        """Whether steps are captured and replayed."""
        return self.resolved_graph_mode != "none"

    @property
    def resolved_graph_mode(self) -> str:
        """``graph_mode``, or what it is by default on this device."""
        if self.graph_mode is not None:
            return self.graph_mode
        return "full_and_piecewise" if self.device_type == "cuda" else "none"

    def _check_graphs(self) -> None:
        if self.graph_mode is not None:
            _choice("graph_mode", self.graph_mode, GRAPH_MODES)
        if self.graph_sizes is not None:
            object.__setattr__(self, "graph_sizes", _sizes("graph_sizes", self.graph_sizes))
        if self.max_graph_size is not None:
            _positive("max_graph_size", self.max_graph_size)
        fraction = self.gpu_memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
            raise ConfigError(f"gpu_memory_fraction is {fraction!r}: give a number above 0 and at most 1")

    def _check_buckets(self) -> None:
        for name in ("token_buckets", "request_buckets"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _sizes(name, getattr(self, name)))
        gap = self.bucket_gap
        if isinstance(gap, bool) or not isinstance(gap, int) or gap < 0:
            raise ConfigError(f"bucket_gap is {gap!r}: give a number of tokens, or 0 for powers of two only")

    def _check_tpu(self) -> None:
        for name, allowed, reason in _ON_TPU:
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r} and device is 'tpu', but {reason}: leave {name} out")

    @classmethod
    def explain(cls) -> str:
        """The documentation of every field, one paragraph each, with its default."""
        return "\n".join(
            f"{item.name} (default {item.default!r})\n    {item.metadata['doc']}" for item in dataclasses.fields(cls)
        )


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}: choose one of {', '.join(allowed)}")


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}: give a whole number of at least 1")


def _sizes(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"{name} is {value!r}: give whole numbers, such as (1, 2, 4, 8)")
    sizes = tuple(value)
    for size in sizes:
        _positive(f"one of {name}", size)
    return sizes
