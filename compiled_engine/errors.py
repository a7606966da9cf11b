"""Every exception that the engine raises on purpose.

Messages follow one form: what is wrong (with its name), the limit it met, and the way out.
"""

from __future__ import annotations

from collections.abc import Sequence


class CompiledEngineError(Exception):
    """Base of all errors of this package: catch it to catch them all."""


class ConfigError(CompiledEngineError, ValueError):
    """An engine setting or a sampling parameter has a value that cannot work."""


class RequestError(CompiledEngineError, ValueError):
    """One prompt cannot be served. The engine turns it into ``finish_reason="error"`` for that request alone."""


class ModelError(CompiledEngineError):
    """A model folder, file or hub id cannot be used."""


class UnsupportedModelError(ModelError):
    """The model asks for something this engine does not honour; the message names the feature."""


class WeightsError(ModelError):
    """The checkpoint and the model definition disagree: missing, left-over or misshapen weights."""


class ContextError(CompiledEngineError):
    """Base of errors about the static forward context and cache binding."""


class ContextStateError(ContextError):
    """An operation is not allowed in the context's present state."""


class DuplicateLayerError(ContextError, ValueError):
    """A layer name is empty or already taken."""


class CacheNotBound(ContextError):
    """A layer's ``kv_cache`` was read before a cache was bound to it."""

    def __init__(self, layer_name: str, state: str) -> None:
        self.layer_name = layer_name
        super().__init__(
            f"layer {layer_name!r} has no KV cache (state: {state}): "
            "call bind_kv_cache(kv_caches, forward_context) first"
        )


class BindError(ContextError, ValueError):
    """Binding or sealing was refused. ``faults`` lists every fault that was found; nothing was changed."""

    def __init__(self, faults: Sequence[str], action: str = "bind KV caches") -> None:
        self.faults = tuple(faults)
        lines = "\n".join(f"  - {fault}" for fault in self.faults)
        super().__init__(f"cannot {action}, {len(self.faults)} fault(s), nothing was changed:\n{lines}")


class StaleGraph(ContextError):
    """A captured graph must not be replayed: something it reads is no longer where, or what, it was at capture.

    ``name`` names it: a layer, for its KV cache, or what ``role`` says. ``captured`` and ``present`` are addresses;
    ``present`` None: it has none now. ``difference`` is said instead of the addresses where these are equal.
    ``changed_by``: the source line that changed the bindings of caches last.
    """

    def __init__(
        self,
        name: str,
        captured: int,
        present: int | None,
        *,
        role: str = "KV cache of layer",
        difference: str | None = None,
        changed_by: str | None = None,
    ) -> None:
        self.name, self.captured, self.present, self.role, self.changed_by = name, captured, present, role, changed_by
        now = "has none now" if present is None else f"is at {present:#x} now"
        changed = "" if changed_by is None else f" (bindings were changed last by {changed_by})"
        super().__init__(
            f"the captured graph is stale: the {role} {name!r} {difference or f'was at {captured:#x} and {now}'}"
            f"{changed}: put back what it was captured with, or capture again"
        )


class GraphOutputKept(ContextError):
    """An output of a captured graph is still held when the next replay is to overwrite it."""


class ForwardContextError(ContextError):
    """The per-step forward context is missing, or set twice."""


class CaptureError(CompiledEngineError):
    """``torch.compile`` could not capture the model as one graph; the message names the source line."""


class CompiledAfterWarmup(CompiledEngineError):
    """Something was captured or compiled in a step, after warm-up was to have covered every step.

    ``what`` names it, ``reason`` is torch's reason for compiling it, ``inputs`` describes what it was called with;
    ``reason`` and ``inputs`` are None where torch does not tell.
    """

    def __init__(self, what: str, reason: str | None = None, inputs: str | None = None) -> None:
        self.what, self.reason, self.inputs = what, reason, inputs
        details = "".join(
            f"\n  {name}: {text}" for name, text in (("reason", reason), ("inputs", inputs)) if text is not None
        )
        self.message = (
            f"compiled after warm-up: {what}{details}\n"
            "Run it during warm-up with inputs like these, or let its sizes be dynamic; on_compile='warn' goes on "
            "with a warning."
        )
        super().__init__(self.message)


class PlanError(CompiledEngineError):
    """A graph plan does not fit what it is run with (weights, pieces, context)."""


class OutOfMemoryError(CompiledEngineError):
    """A cache or buffer does not fit; the message names the knob and the amount."""


class LogitsError(CompiledEngineError):
    """The model returned logits from which no token can be chosen (NaN, or no finite value in a row)."""


class BlockPoolError(CompiledEngineError):
    """A cache block was freed twice, or an id was used that the pool never handed out."""


class EngineStateError(CompiledEngineError):
    """The engine cannot do this now: it is closed, or busy in another thread."""


class KernelBuildError(CompiledEngineError):
    """The C++ kernels cannot be built, or their library is not safe to load."""


class StoreError(CompiledEngineError):
    """The store of compiled graphs cannot be used as asked. Running without a store is always a way out."""


class StoreAccessError(StoreError):
    """The store is not this user's alone, and its files are code. ``command`` mends it; ``path`` is what it met."""

    def __init__(self, path: object, fault: str, command: str) -> None:
        self.path, self.command = path, command
        super().__init__(
            f"the graph store is refused: {path} {fault}, and its files are code that would run. If you trust what is "
            f"in it, mend it with:\n  {command}\nElse use another folder (COMPILED_ENGINE_CACHE), or no store."
        )


class StoreDamagedError(StoreError):
    """An entry is damaged in a store that cannot be written, so that it can be neither set aside nor replaced."""


class StoreWriteError(StoreError):
    """The store could not be written (disk full, no permission). What was there before is unharmed."""


class NotPrecompiledError(StoreError):
    """Graphs would have to be compiled, which the settings forbid; the message says what the store has instead."""
