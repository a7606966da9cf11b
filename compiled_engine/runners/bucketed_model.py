"""The compiled parts of a model, one function for each size that steps are padded to."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

import torch

from compiled_engine.compile.own_code import forget_compiled, with_own_code
from compiled_engine.errors import CaptureError, OutOfMemoryError
from compiled_engine.models.by_value import ByValueModel, GroupInputs
from compiled_engine.runners.platforms import Function, XlaPlatform


class CompiledFunctions:
    """Functions that are compiled apart for each size, so that Dynamo's limit of shapes for one function is never met.

    What was compiled holds the tensors that it was compiled with, until ``close``.
    """

    def __init__(self, platform: XlaPlatform) -> None:
        self._platform = platform
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._own: list[Any] = []

    def call(self, what: str, sizes: tuple[int, ...], function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, compiled when this ``what`` is called with these ``sizes`` for the first time.

        Raises ``CaptureError`` for a function that is not one graph and ``OutOfMemoryError`` where the device has no
        room; both name ``what``.
        """
        key = (what, sizes)
        if key not in self._compiled:

            def run(*args: Any) -> Any:
                return function(*args)

            self._own.append(with_own_code(run))
            self._compiled[key] = self._platform.compile(self._own[-1])
        try:
            return self._compiled[key](*args)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise CaptureError(f"the model's {what} cannot be compiled as one graph: {error}") from error
        except RuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise OutOfMemoryError(
                f"the model's {what} of size {', '.join(map(str, sizes))} does not fit into the device's memory: lower "
                f"max_num_batched_tokens, max_num_seqs or max_model_len ({error})"
            ) from error

    def by_rows(self, function: Function) -> Function:
        """``function`` compiled apart for each number of rows that its first argument has."""

        def call(rows: torch.Tensor, *args: Any) -> Any:
            return self.call(function.__name__, (rows.shape[0],), function, rows, *args)

        return cast(Function, call)

    def close(self) -> None:
        """Drop everything that was compiled, and what it holds. Idempotent."""
        forget_compiled(self._own)
        self._own.clear()
        self._compiled.clear()


class BucketedModel:
    """``ByValueModel`` behind compiled functions: body, choice of rows and head are graphs of their own.

    So a body is compiled once for a number of tokens and a head once for a number of rows, and only the choice of rows,
    which is tiny, for each pair. All tensors are on the platform's device.
    """

    def __init__(self, model: ByValueModel, functions: CompiledFunctions) -> None:
        self._model = model
        self._functions = functions

    def hidden_states(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs: GroupInputs | None
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size]; see ``ByValueModel`` and ``CompiledFunctions.call``."""
        part = "body" if inputs is not None else "body without caches"
        hidden_states: torch.Tensor = self._functions.call(
            part, (input_ids.shape[0],), self._model.hidden_states, input_ids, positions, inputs
        )
        return hidden_states

    def logits(self, hidden_states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits [num_rows, vocab_size] of ``rows``, int64 [num_rows], of ``hidden_states``."""
        sizes = (hidden_states.shape[0], rows.shape[0])
        chosen = self._functions.call("choice of rows", sizes, torch.index_select, hidden_states, 0, rows)
        logits: torch.Tensor = self._functions.call("head", sizes[1:], self._model.logits, chosen)
        return logits
