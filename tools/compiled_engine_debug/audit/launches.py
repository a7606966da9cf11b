"""The names of launches that a plan asks for, in order."""

from __future__ import annotations

from compiled_engine.compile.plan import GraphPlan, PieceStep, Step

COPY_TO_NEXT_PART = "copy to the next part"


def full_launches(plan: GraphPlan) -> list[str]:
    """The launches of a graph of a whole step, up to its logits."""
    return [step.launch_name for step in (*plan.steps, plan.head)]


def part_launches(plan: GraphPlan) -> dict[int, list[str]]:
    """The launches of the graphs of a piecewise key, by part: stretches of pieces, attentions numbered with them."""
    parts: list[list[Step]] = []
    for step in plan.steps:
        if isinstance(step, PieceStep) and parts and isinstance(parts[-1][-1], PieceStep):
            parts[-1].append(step)
        else:
            parts.append([step])
    return {
        index: [*(step.launch_name for step in part), COPY_TO_NEXT_PART]
        for index, part in enumerate(parts)
        if isinstance(part[0], PieceStep)
    }
