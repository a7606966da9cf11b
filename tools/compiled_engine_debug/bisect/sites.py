"""What the tensors that rungs are compared by are called in a plan, or in a split graph."""

from __future__ import annotations

from compiled_engine.compile.plan import AttentionStep, GraphPlan
from compiled_engine.compile.split import SplitGraph
from compiled_engine_debug.bisect.trace import Site, TensorName


def value_sites(graph: GraphPlan | SplitGraph) -> dict[str, Site]:
    """The values of ``graph`` that can be seen from outside its pieces, each with its site.

    A value that several sites have (one tensor as key and value) counts as the first of them.
    """
    found: dict[str, Site] = {}
    for step in graph.steps:
        if isinstance(step, AttentionStep):
            for tensor, name in _of_attention(step).items():
                if name is not None:
                    found.setdefault(name, Site(step.layer_name, tensor))
    found.setdefault(graph.hidden, Site(None, TensorName.HIDDEN))
    found.setdefault(graph.head.outputs[0], Site(None, TensorName.LOGITS))
    return found


def value_name(site: Site, graph: GraphPlan | SplitGraph) -> str:
    """What ``graph`` calls the tensor at ``site``. Raises ``ValueError`` for one that no piece makes."""
    if site.tensor is TensorName.LOGITS:
        return graph.head.outputs[0]
    if site.tensor is TensorName.HIDDEN:
        return graph.hidden
    attentions = [step for step in graph.steps if isinstance(step, AttentionStep) and step.layer_name == site.layer]
    name = _of_attention(attentions[0]).get(site.tensor) if attentions else None
    if name is None:
        raise ValueError(f"the graph makes no {site}")
    return name


def _of_attention(step: AttentionStep) -> dict[TensorName, str | None]:
    return {
        TensorName.QUERY: step.query,
        TensorName.KEY: step.key,
        TensorName.VALUE: step.value,
        TensorName.OUT: step.out,
    }
