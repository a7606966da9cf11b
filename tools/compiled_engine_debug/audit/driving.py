"""Steps made for a graph, so that every graph is replayed once under the eyes of the detectors."""

from __future__ import annotations

from collections.abc import Iterator

from compiled_engine.compile.graphs.keys import GraphKey, StepShape
from compiled_engine.ops.sampling import greedy_batch
from compiled_engine.runners.batch import ScheduledBatch, ScheduledRequest
from compiled_engine_debug.audit.subject import Subject
from compiled_engine_debug.audit.unused_graph import shape_for

_TOKEN = 5


def driving_batches(subject: Subject, key: GraphKey) -> Iterator[ScheduledBatch]:
    """Steps of which the last is dispatched to ``key``; those before it compute what its longest request has cached.

    Nothing where no step is dispatched to it, or where the caches have too few blocks for one.
    """
    shape = shape_for(subject, key)
    if shape is None:
        return
    # As few cached tokens as the key allows.
    shortest = max(shape.max_query_len, _least_length(subject, key, shape))
    layout = _Layout(subject, shape, shortest)
    if not layout.fits:
        return
    for start in range(0, layout.cached, layout.chunk):
        request = layout.request(0, start, min(layout.chunk, layout.cached - start), samples=False)
        yield ScheduledBatch((request,), greedy_batch(0))
    requests = tuple(
        layout.request(row, layout.cached if row == 0 else 0, length, samples=True)
        for row, length in enumerate(layout.lengths)
    )
    yield ScheduledBatch(requests, greedy_batch(len(requests)))


def _least_length(subject: Subject, key: GraphKey, shape: StepShape) -> int:
    """The smallest ``max_seq_len`` with which the step still goes to ``key``: a bucket begins after the one before."""
    smaller = [other.max_seq_len for other in subject.keys if other.max_seq_len < (key.max_seq_len or 1)]
    for length in sorted({shape.max_query_len, *(end + 1 for end in smaller)}):
        if shape.max_query_len <= length <= shape.max_seq_len:
            tried = StepShape(shape.num_tokens, shape.num_requests, shape.max_query_len, length, shape.is_uniform)
            if subject.gpu is not None and subject.gpu.decide(tried).key == key:
                return length
    return shape.max_seq_len


class _Layout:
    """Who has which blocks: request 0 the first ones, the others those after them, none twice."""

    def __init__(self, subject: Subject, shape: StepShape, longest: int) -> None:
        limits = subject.runner.limits
        self._size = limits.block_size
        self._groups = len(limits.cache_groups)
        self.cached = longest - shape.max_query_len
        self.chunk = limits.max_num_batched_tokens
        self.lengths = [shape.max_query_len, *[1] * (shape.num_requests - 1)]
        self._first = -(-longest // self._size)
        blocks = self._first + shape.num_requests - 1
        self.fits = all(group.num_blocks > blocks for group in limits.cache_groups)

    def request(self, row: int, start: int, length: int, *, samples: bool) -> ScheduledRequest:
        """``length`` tokens from ``start`` on of the request in ``row``."""
        blocks = -(-(start + length) // self._size)
        table = tuple(range(1, 1 + blocks)) if row == 0 else (self._first + row,)
        return ScheduledRequest(f"made {row}", (_TOKEN,) * length, start, (table,) * self._groups, samples)
