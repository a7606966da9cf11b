"""The compiled parts of a model, one function for each size that steps are padded to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from compiled_engine.compile.own_code import with_own_code
from compiled_engine.errors import CaptureError
from compiled_engine.models.by_value import ByValueModel, GroupInputs
from compiled_engine.runners.platforms import Function, XlaPlatform


class BucketedModel:
    """``ByValueModel`` behind compiled functions: body, choice of rows and head are graphs of their own.

    So a body is compiled once for a number of tokens and a head once for a number of rows, and only the choice of rows,
    which is tiny, for each pair. All tensors are on the platform's device. Raises ``CaptureError`` for a model that is
    not one graph.
    """

    def __init__(self, model: ByValueModel, platform: XlaPlatform) -> None:
        self._model = model
        self._platform = platform
        self._functions: dict[tuple[str, int, int], Callable[..., torch.Tensor]] = {}

    def hidden_states(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs: GroupInputs | None
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size]; see ``ByValueModel``."""
        part = "body" if inputs is not None else "body without caches"
        return self._call(part, input_ids.shape[0], 0, self._model.hidden_states, input_ids, positions, inputs)

    def logits(self, hidden_states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits [num_rows, vocab_size] of ``rows``, int64 [num_rows], of ``hidden_states``."""
        num_tokens, num_rows = hidden_states.shape[0], rows.shape[0]
        chosen = self._call("rows", num_tokens, num_rows, torch.index_select, hidden_states, 0, rows)
        return self._call("head", 0, num_rows, self._model.logits, chosen)

    def _call(
        self, part: str, num_tokens: int, num_rows: int, function: Callable[..., torch.Tensor], *args: object
    ) -> torch.Tensor:
        key = (part, num_tokens, num_rows)
        if key in self._functions:
            return self._functions[key](*args)

        def run(*args: object) -> torch.Tensor:
            return function(*args)

        compiled = self._platform.compile(with_own_code(run))
        try:
            result = compiled(*args)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise CaptureError(f"the model's {part} cannot be compiled as one graph: {error}") from error
        self._functions[key] = compiled
        return result


def compile_by_rows(platform: XlaPlatform, function: Function) -> Function:
    """``function`` compiled apart for each number of rows that its first argument has.

    Dynamo compiles one function for few shapes only, those of other runners in the process included.
    """
    functions: dict[int, Function] = {}

    def call(rows: torch.Tensor, *args: Any) -> Any:
        num_rows = rows.shape[0]
        if num_rows not in functions:
            functions[num_rows] = platform.compile(with_own_code(function))
        return functions[num_rows](rows, *args)

    return cast(Function, call)
