"""``padding-leak``: something that is nobody's reaches a real row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from compiled_engine.compile.plan import INPUT_IDS, PieceStep
from compiled_engine.errors import CompiledEngineError
from compiled_engine.runners.batch import ScheduledBatch
from compiled_engine_debug.audit.detector import Detector
from compiled_engine_debug.audit.expected import ExpectedStep, expected_step
from compiled_engine_debug.audit.liveness import live_slots
from compiled_engine_debug.audit.probes import probed
from compiled_engine_debug.audit.step import AttentionCall, Step
from compiled_engine_debug.audit.subject import Subject
from compiled_engine_debug.findings import Finding


@dataclass(frozen=True)
class _Ran:
    """A step of the sound run: what it was asked, and what came out."""

    step: Step
    batch: ScheduledBatch
    token_ids: tuple[int, ...]
    logits: tuple[bytes, ...]


class PaddingLeak(Detector):
    """Runs every step of the workload again with NaN wherever nothing is that a real row may read.

    That is: every cache slot that no later step reads before it is written (block 0, free blocks, ends of blocks,
    positions behind a sliding window), the embedding of the padding token, and the rows of padding that leave
    attention. Tokens and logits of real rows must be the same, bit for bit.
    """

    name = "padding-leak"
    about = "the same steps with NaN in padding rows and unused slots, bit for bit"

    def __init__(self) -> None:
        super().__init__()
        self._ran: list[_Ran] = []

    def refusal(self, subject: Subject) -> str | None:
        return "caches of XLA cannot be written without compiling" if subject.model is None else None

    def after_step(self, subject: Subject, step: Step) -> Iterable[Finding]:
        if step.output is not None:
            tokens = step.output.sampled.token_ids
            self._ran.append(_Ran(step, step.batch, tokens, _row_hashes(step.logits, len(tokens))))
            step.calls = []
            step.logits = None
        return ()

    @torch.inference_mode()
    def finish(self, subject: Subject) -> Iterable[Finding]:
        """Leaves all caches zeroed."""
        live = live_slots([ran.batch for ran in self._ran], subject.block_size, subject.windows)
        witness = _Witness()
        embeddings = _padding_embeddings(subject, self._ran)
        kept = [row.clone() for row in embeddings]
        try:
            for row in embeddings:
                row.fill_(torch.nan)
            with probed(subject, witness):
                for ran, slots in zip(self._ran, live, strict=True):
                    _poison(subject, slots)
                    found = self._run_again(subject, ran, witness)
                    if found is not None:
                        return [found]
        finally:
            for row, value in zip(embeddings, kept, strict=True):
                row.copy_(value)
            for tensor in [*subject.slots().values(), *witness.poisoned.values()]:
                tensor.zero_()
        return ()

    def _run_again(self, subject: Subject, ran: _Ran, witness: _Witness) -> Finding | None:
        witness.begin(expected_step(ran.batch, subject.block_size, ran.step.key))
        self.looks += max(1, len(ran.token_ids))
        try:
            output = subject.runner.execute(ran.batch)
        except CompiledEngineError as error:
            return self._leak(ran, witness, f"the step fails: {error}", None)
        tokens = output.sampled.token_ids
        hashes = _row_hashes(_logits_of(subject, ran.step, witness, len(tokens)), len(tokens))
        sampling = [request.request_id for request in ran.batch.requests if request.samples]
        for row, request in enumerate(sampling):
            if tokens[row] != ran.token_ids[row] or hashes[row] != ran.logits[row]:
                what = "logits are" if tokens[row] == ran.token_ids[row] else "next token and its logits are"
                return self._leak(ran, witness, f"the {what} others", request)
        if witness.first_nan is not None:
            return self._leak(ran, witness, "NaN reaches a real row", None)
        return None

    def _leak(self, ran: _Ran, witness: _Witness, says: str, request: str | None) -> Finding:
        layer = node = None
        where = "after the last attention"
        if witness.first_nan is not None:
            layer, node, request = witness.first_nan
            where = f"first in the {node} of layer {layer!r}"
        return self.found(
            f"with NaN in padding and in unused slots, in step {ran.step.index} of request {request!r} {says}; {where}",
            step=ran.step.index,
            layer=layer,
            request=request,
            key=None if ran.step.key is None else str(ran.step.key),
            node=node,
        )


@dataclass
class _Witness:
    """A ``probes.Listener``: where NaN first reaches a real row of a step. ``first_nan``: layer, tensor, request.

    ``poisoned``: rows of padding that were filled with NaN, by place in memory: graphs use them again.
    """

    first_nan: tuple[str, str, str] | None = None
    logits: torch.Tensor | None = None
    poisoned: dict[tuple[int, tuple[int, ...]], torch.Tensor] = field(default_factory=dict)
    _expected: ExpectedStep | None = None

    def begin(self, expected: ExpectedStep) -> None:
        """A step begins."""
        self.first_nan, self.logits, self._expected = None, None, expected

    def before_attention(self, call: AttentionCall) -> None:
        for node, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
            if tensor is not None:
                self._look(call, node, tensor)

    def after_attention(self, call: AttentionCall) -> None:
        self._look(call, "attention output", call.out)
        if self._expected is not None:
            padding = call.out[self._expected.num_tokens :]
            padding.fill_(torch.nan)
            self.poisoned[padding.data_ptr(), tuple(padding.shape)] = padding

    def model_given(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Nothing to see."""

    def logits_made(self, logits: torch.Tensor) -> None:
        self.logits = logits.clone()

    def _look(self, call: AttentionCall, node: str, tensor: torch.Tensor) -> None:
        if self._expected is None or self.first_nan is not None:
            return
        rows = torch.nonzero(tensor[: self._expected.num_tokens].isnan().flatten(1).any(1)).flatten()
        if len(rows):
            owner = self._expected.token_owners[int(rows[0])]
            self.first_nan = (call.layer, node, str(owner))


def _poison(subject: Subject, live: tuple[set[int], ...]) -> None:
    for name, slots in subject.slots().items():
        dead = torch.ones(len(slots), dtype=torch.bool, device=slots.device)
        dead[sorted(live[subject.group_of(name)])] = False
        slots[dead] = torch.nan


def _padding_embeddings(subject: Subject, ran: list[_Ran]) -> list[torch.Tensor]:
    """Rows of weights that only padding reads: token 0 of every embedding that is not the head too.

    Empty if the workload has token 0 itself.
    """
    plan, model = subject.plan, subject.model
    if plan is None or model is None or any(0 in request.token_ids for item in ran for request in item.batch.requests):
        return []
    readers = [step for step in plan.steps if isinstance(step, PieceStep) and f"value:{INPUT_IDS}" in step.inputs]
    read = {name for step in readers for name in step.inputs} - set(plan.head.inputs)
    recipes = [recipe for recipe in plan.weights if f"weight:{recipe.key}" in read and not recipe.packed]
    weights = model.weights
    return [
        weights[recipe.key][0]
        for recipe in recipes
        if len(recipe.shape) == 2 and recipe.shape[0] == plan.vocab_size and weights[recipe.key].is_floating_point()
    ]


def _logits_of(subject: Subject, step: Step, witness: _Witness, num_rows: int) -> torch.Tensor | None:
    if witness.logits is not None or subject.gpu is None or num_rows == 0:
        return witness.logits
    return subject.gpu.sampler.outputs(num_rows)["logits"]


def _row_hashes(logits: torch.Tensor | None, num_rows: int) -> tuple[bytes, ...]:
    """A hash of each row's bits."""
    if logits is None or num_rows == 0:
        return (b"",) * num_rows
    rows = logits[:num_rows].contiguous().view(torch.uint8).cpu().numpy()
    return tuple(hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows)
