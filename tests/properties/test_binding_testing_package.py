"""The testing package itself: how it is imported, and what its strategies reach."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import compiled_engine
from compiled_engine.context import (
    CacheKind,
    ContextState,
    StaticForwardContext,
    bind_kv_cache,
    declared_specs,
    layer_index,
)
from compiled_engine.testing import (
    CorruptionKind,
    corruptions,
    kv_cache_specs,
    kv_caches_for,
    layer_names,
    static_forward_contexts,
)

PACKAGE = Path(compiled_engine.__file__).parent
# The first example that is found will do, shrinking it would only take time.
SEARCH = settings(max_examples=2000, phases=[Phase.generate])


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parent)


def test_without_hypothesis_the_error_names_the_extra() -> None:
    result = run("import sys; sys.modules['hypothesis'] = None; import compiled_engine.testing")
    assert result.returncode != 0
    assert "ModuleNotFoundError: compiled_engine.testing needs hypothesis" in result.stderr
    assert "compiled-engine[test]" in result.stderr


def test_the_engine_does_not_import_the_testing_package() -> None:
    result = run("import sys, compiled_engine.context; assert 'hypothesis' not in sys.modules")
    assert result.returncode == 0, result.stderr
    importers = []
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / "testing" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.startswith("compiled_engine.testing") or name == "testing" for name in names):
                importers.append(path.name)
    assert importers == []


@pytest.mark.parametrize("numbers", [0, 1, 2])
def test_names_have_no_one_or_several_numbers(numbers: int) -> None:
    name = find(layer_names(), lambda name: sum(part.isdigit() for part in name.split(".")) == numbers, settings=SEARCH)
    assert (layer_index(name) is None) == (numbers == 0)


@pytest.mark.parametrize("kind", list(CacheKind))
def test_specs_of_every_kind_can_be_drawn(kind: CacheKind) -> None:
    assert find(kv_cache_specs(), lambda spec: spec.kind is kind, settings=SEARCH).kind is kind
    assert find(kv_cache_specs(kinds=(kind,)), lambda spec: True, settings=SEARCH).kind is kind


@pytest.mark.parametrize(
    "wanted",
    [
        lambda context: len(context) == 0,
        lambda context: len(context.groups) == 3,
        lambda context: any(layer.spec is None for layer in context.values()),
        lambda context: any(spec.page_padding for spec in declared_specs(context).values()),
        lambda context: len({spec.padded_page_bytes for spec in declared_specs(context).values()}) > 1,
        lambda context: any(
            spec.shares_with is not None and context[spec.shares_with].spec.shares_with is not None
            for spec in declared_specs(context).values()
        ),
    ],
    ids=["empty", "three groups", "no cache", "padded", "unpadded", "chain"],
)
def test_contexts_of_every_sort_can_be_drawn(wanted) -> None:  # type: ignore[no-untyped-def]
    assert wanted(find(static_forward_contexts(), wanted, settings=SEARCH))


@given(context=static_forward_contexts(max_layers=3, sharing=False, without_cache=False, sealed=False))
def test_what_is_left_out_is_not_drawn(context: StaticForwardContext) -> None:
    """Property: the options of ``static_forward_contexts`` are honoured."""
    assert context.state is ContextState.OPEN
    assert len(context) <= 3
    assert all(layer.spec is not None and layer.spec.shares_with is None for layer in context.values())


@given(data=st.data(), context=static_forward_contexts(min_layers=1))
def test_corruptions_leave_the_original_alone(data: st.DataObject, context: StaticForwardContext) -> None:
    """Property: a corrupted copy differs, the original mapping can still be bound, and its bytes are as they were."""
    caches = data.draw(kv_caches_for(context))
    before = dict(caches)
    corruption = data.draw(corruptions(caches, context))
    assert corruption.kind in CorruptionKind
    assert {name: id(cache) for name, cache in corruption.kv_caches.items()} != {
        name: id(cache) for name, cache in caches.items()
    }
    assert caches.keys() == before.keys()
    assert all(caches[name] is before[name] and not caches[name].any() for name in caches)
    bind_kv_cache(caches, context)
