"""The names of launches that a plan asks for, in order."""

from __future__ import annotations

from compiled_engine.compile.plan import AttentionStep, GraphPlan, PieceStep, Step

COPY_TO_NEXT_PART = "copy to the next part"


def attention_launch_name(step: AttentionStep) -> str:
    """What the launch of an attention step is called."""
    return f"attention of layer {step.layer_name!r}"


def launch_name(step: Step) -> str:
    """What the launch of a plan's step is called."""
    return attention_launch_name(step) if isinstance(step, AttentionStep) else piece_launch_name(step)


def piece_launch_name(step: PieceStep) -> str:
    """What the launch of a piece is called."""
    return f"piece {step.piece[:12]} ({', '.join(step.outputs)})"


def full_launches(plan: GraphPlan) -> list[str]:
    """The launches of a graph of a whole step, up to its logits."""
    return [*map(launch_name, plan.steps), piece_launch_name(plan.head)]


def part_launches(plan: GraphPlan) -> dict[int, list[str]]:
    """The launches of the graphs of a piecewise key, by part: stretches of pieces, attentions numbered with them."""
    parts: list[list[Step]] = []
    for step in plan.steps:
        if isinstance(step, PieceStep) and parts and isinstance(parts[-1][-1], PieceStep):
            parts[-1].append(step)
        else:
            parts.append([step])
    return {
        index: [*map(launch_name, part), COPY_TO_NEXT_PART]
        for index, part in enumerate(parts)
        if isinstance(part[0], PieceStep)
    }
