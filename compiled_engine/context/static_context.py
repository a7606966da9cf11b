"""The static forward context: which layers have caches, under which names, in which state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from compiled_engine.errors import BindError, ConfigError, ContextStateError, DuplicateLayerError

from .groups import CacheGroup, group_specs, project_groups, unify_page_sizes
from .layer import CacheLayer, ContextState, declared_specs
from .sharing import sharing_faults
from .spec import KVCacheSpec


class StaticForwardContext(Mapping[str, CacheLayer]):
    """All cache layers of one engine, by name, in registration order.

    Compiled graphs find their caches here instead of getting them as arguments. ``epoch`` counts the bindings and
    unbindings that changed a layer: whoever remembers addresses remembers the epoch with them.
    Caches are set by ``bind_kv_cache`` and ``unbind_kv_cache`` alone.

    Two models live in one context as two namespaces (see ``namespace``). Contexts are compared by identity.
    """

    def __init__(self) -> None:
        self._name = ""
        self._parent: StaticForwardContext | None = None
        self._namespaces: dict[str, StaticForwardContext] = {}
        self._layers: dict[str, CacheLayer] = {}
        self._groups: tuple[CacheGroup, ...] = ()
        self._state = ContextState.OPEN
        self._epoch = 0
        self._changed_by: str | None = None

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def state(self) -> ContextState:
        return self._state

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def changed_by(self) -> str | None:
        """The source line (``file:line in function``) that asked for the last change of bindings; None: none was."""
        return self._changed_by

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups that were fixed when the context was sealed; empty before."""
        return self._groups

    @property
    def name(self) -> str:
        """Of a namespace: its name, with those of the namespaces around it (``"target"``). Else empty."""
        return f"{self._parent.name}/{self._name}".lstrip("/") if self._parent is not None else self._name

    @property
    def namespaces(self) -> Mapping[str, StaticForwardContext]:
        """The open, sealed and bound namespaces, by name."""
        return MappingProxyType(self._namespaces)

    def namespace(self, name: str) -> StaticForwardContext:
        """A new part of this context for one model, such as ``"target"`` or ``"draft"``.

        The part is a context with layers, groups, state and epoch of its own: it is sealed, bound, unbound and closed
        alone. In it layers have the names they registered with; this context shows them as ``target/<name>``.
        Layers share caches only within a part. A context holds namespaces or layers of its own, never both.
        Raises ``DuplicateLayerError`` for a taken name, ``ConfigError`` for one that is empty or has a slash, and
        ``ContextStateError`` when the context has layers or is not open.
        """
        self._require_state(ContextState.OPEN, action=f"add namespace {name!r}")
        if not name or "/" in name:
            raise ConfigError(f"{name!r} cannot name a namespace: give a name without slashes")
        if self._layers:
            raise ContextStateError(f"cannot add namespace {name!r}: {self._title()} has layers of its own")
        if name in self._namespaces:
            raise DuplicateLayerError(f"namespace {name!r} exists already: close it first, or choose another name")
        part = StaticForwardContext()
        part._name, part._parent = name, self
        self._namespaces[name] = part
        return part

    def register(self, name: str, layer: CacheLayer) -> None:
        """Add ``layer`` under ``name``.

        Raises ``DuplicateLayerError`` for an empty or taken name (layers built with an empty prefix collide this
        way: vllm-ascend#4603) and for a layer that is registered already, ``ConfigError`` for what is no
        ``CacheLayer``, and ``ContextStateError`` once the context is sealed.
        """
        self.require(ContextState.OPEN, action=f"register layer {name!r}")
        if not isinstance(layer, CacheLayer):
            raise ConfigError(f"{name!r} is a {type(layer).__name__}: only a CacheLayer can be registered")
        if not isinstance(name, str) or not name:
            raise DuplicateLayerError(
                f"a {type(layer).__name__} registers with the empty name {name!r}: give its full dotted path"
            )
        if name in self._layers:
            raise DuplicateLayerError(
                f"layer name {name!r} is taken by {_owner(self._layers[name])} and asked for by {_owner(layer)}: "
                "give each layer its full dotted path"
            )
        if layer._context_state not in (None, ContextState.CLOSED):
            raise DuplicateLayerError(
                f"{_owner(layer)} cannot register as {name!r}: it is registered already, and one layer has one cache"
            )
        self._layers[name] = layer
        layer._context_state = self._state

    def seal(self, *, groups: Sequence[CacheGroup] | None = None, pad_pages: bool = True) -> None:
        """End registration: check what layers share, form cache groups, set every ``layer.group``. Allowed once.

        ``groups`` are those of the whole model when this context holds one pipeline stage of it (see
        ``project_groups``); by default they are formed from the layers at hand. ``pad_pages`` gives every layer a
        ``spec`` with the same page size; a runner whose layers own their memory can do without.
        Raises ``BindError`` with every fault of sharing and groups; the context stays open then.
        """
        self.require(ContextState.OPEN, action="seal the context")
        declared = {name: layer.spec for name, layer in self._layers.items()}
        if faults := sharing_faults(declared, check_order=True):
            raise BindError(faults, action="seal the context")
        specs = declared_specs(self._layers)
        if pad_pages:
            specs = unify_page_sizes(specs, max((group.page_bytes for group in groups or ()), default=0))
        self._groups = group_specs(specs) if groups is None else project_groups(groups, self)
        for name, spec in specs.items():
            self._layers[name].spec = spec
        for group in self._groups:
            for name in group.layer_names:
                self._layers[name].group = group.index
        self._enter(ContextState.SEALED)

    def close(self) -> None:
        """Drop every cache and every layer, and all namespaces. Idempotent; nothing else is possible afterwards.

        A namespace also leaves the context it is in; what else that one holds stays as it is.
        """
        if self._state is ContextState.CLOSED:
            return
        for part in list(self._namespaces.values()):
            part.close()
        for layer in self._layers.values():
            layer._kv_cache = None
        self._enter(ContextState.CLOSED)
        self._layers.clear()
        self._groups = ()
        self._count_change("closing the context")
        if self._parent is not None:
            del self._parent._namespaces[self._name]
            self._name, self._parent = self.name, None

    def require(self, *allowed: ContextState, action: str) -> None:
        """Raise ``ContextStateError`` unless the context is in one of the ``allowed`` states.

        A context that holds namespaces has no state of its own to act in: its parts are acted upon.
        """
        if self._namespaces:
            names = ", ".join(map(repr, self._namespaces))
            raise ContextStateError(f"cannot {action}: {self._title()} holds the namespaces {names}, use one of them")
        self._require_state(*allowed, action=action)

    def _require_state(self, *allowed: ContextState, action: str) -> None:
        if self._state not in allowed:
            wanted = " or ".join(state.value for state in allowed)
            raise ContextStateError(f"cannot {action}: {self._title()} is {self._state.value}, it must be {wanted}")

    def _rebind(self, caches: Mapping[str, torch.Tensor | None], state: ContextState, changed_by: str) -> None:
        """Set caches and state together; called by the binding functions after every check has passed."""
        changed = [name for name, cache in caches.items() if self._layers[name]._kv_cache is not cache]
        for name in changed:
            self._layers[name]._kv_cache = caches[name]
        if changed:
            self._count_change(changed_by)
        self._enter(state)

    def _bound_elsewhere(self) -> dict[str, tuple[KVCacheSpec, torch.Tensor]]:
        """Specs and caches of the layers that are bound in other parts of the same engine, by full name."""
        top = self
        while top._parent is not None:
            top = top._parent
        own = {id(layer) for layer in self._layers.values()}
        return {
            name: (layer.spec, layer.kv_cache)
            for name, layer in (top.items() if top is not self else ())
            if layer.spec is not None and layer.is_bound and id(layer) not in own
        }

    def _enter(self, state: ContextState) -> None:
        self._state = state
        for layer in self._layers.values():
            layer._context_state = state

    def _count_change(self, changed_by: str) -> None:
        self._epoch += 1
        self._changed_by = changed_by
        if self._parent is not None:
            self._parent._count_change(changed_by)

    def _title(self) -> str:
        return f"the namespace {self.name!r}" if self.name else "the context"

    def __getitem__(self, name: str) -> CacheLayer:
        layer = self._layers.get(name)
        if layer is not None:
            return layer
        part, slash, rest = name.partition("/")
        if slash and part in self._namespaces:
            return self._namespaces[part][rest]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from self._layers
        for part_name, part in self._namespaces.items():
            for name in part:
                yield f"{part_name}/{name}"

    def __len__(self) -> int:
        return len(self._layers) + sum(map(len, self._namespaces.values()))

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        return f"StaticForwardContext({name}{len(self)} layers, {self._state.value}, epoch {self._epoch})"


def cache_groups(source: Mapping[str, CacheLayer] | Mapping[str, KVCacheSpec]) -> tuple[CacheGroup, ...]:
    """The cache groups of a context, or of specs by layer name. See ``CacheGroup``.

    A sealed or bound context has its groups fixed; those of an open one, or of specs, are formed as sealing would
    form them, without padding. Raises ``ContextStateError`` for a context that holds namespaces, because each of
    them has groups of its own, and ``BindError`` for specs whose sharing is at fault.
    """
    if isinstance(source, StaticForwardContext):
        source.require(*ContextState, action="form cache groups")
        if source.state is not ContextState.OPEN:
            return source.groups
    entries = {name: entry.spec if isinstance(entry, CacheLayer) else entry for name, entry in source.items()}
    if faults := sharing_faults(entries):
        raise BindError(faults, action="form cache groups")
    return group_specs({name: spec for name, spec in entries.items() if spec is not None})


def _owner(layer: CacheLayer) -> str:
    return f"{type(layer).__name__} {layer.layer_name!r} at {id(layer):#x}"
