"""Which sizes are captured: request counts of decode steps, token counts of all other steps.

A step is padded to the next captured size, so sizes lie closely where padding costs most in proportion: 1, 2, 4, then
multiples of 8 to 256, of 16 to 512, of 32 to 1024, and so on. From 128 on, padding adds less than a sixteenth.

A limit that lies between two of these sizes is captured as it is. Rounded down, it would leave the largest and most
frequent batch of a busy engine without a graph (vllm-project/vllm#57355 and #37865); rounded up, it would pad.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from compiled_engine.errors import ConfigError

LARGEST_DEFAULT_TOKEN_SIZE = 512
"""Mixed steps of more tokens than this keep the device busy enough that launching them eagerly costs little."""


def decode_sizes(
    max_num_seqs: int, explicit: tuple[int, ...] | None = None, maximum: int | None = None
) -> tuple[int, ...]:
    """Request counts of the decode graphs, ascending; the last is ``maximum``, or ``max_num_seqs`` without one.

    ``explicit``: sizes to capture instead of the default ones, in any order; the last is added to them. ``maximum``:
    capture nothing larger, so that larger batches run without a decode graph. Raises ``ConfigError`` for a size that
    no step can have or that is above ``maximum``.
    """
    _positive("max_num_seqs", max_num_seqs)
    _check("decode graph", explicit, maximum, "max_num_seqs", max_num_seqs)
    top = max_num_seqs if maximum is None else maximum
    return _up_to(top, explicit)


def token_sizes(
    max_num_batched_tokens: int, explicit: tuple[int, ...] | None = None, maximum: int | None = None
) -> tuple[int, ...]:
    """Token counts of the mixed and the piecewise graphs, ascending.

    The last is ``maximum``; without one, the largest of ``explicit``; without these too, ``max_num_batched_tokens`` or
    512, whichever is less. ``explicit``: sizes to capture instead of the default ones, in any order. Raises
    ``ConfigError`` for a size that no step can have or that is above ``maximum``.
    """
    _positive("max_num_batched_tokens", max_num_batched_tokens)
    _check("token graph", explicit, maximum, "max_num_batched_tokens", max_num_batched_tokens)
    if maximum is not None:
        return _up_to(maximum, explicit)
    if explicit is not None:
        return _up_to(max(explicit), explicit)
    return _up_to(min(max_num_batched_tokens, LARGEST_DEFAULT_TOKEN_SIZE), None)


def _up_to(top: int, explicit: Iterable[int] | None) -> tuple[int, ...]:
    sizes = _default_sizes(top) if explicit is None else explicit
    return tuple(sorted({*sizes, top}))


def _default_sizes(top: int) -> Iterator[int]:
    """The default sizes that are at most ``top``."""
    yield from (size for size in (1, 2, 4) if size <= top)
    size = 8
    while size <= top:
        yield size
        power = 1 << (size.bit_length() - 1)
        size += max(8, power // 16)


def _check(what: str, explicit: tuple[int, ...] | None, maximum: int | None, limit_name: str, limit: int) -> None:
    if maximum is not None:
        _positive(f"the maximum {what} size", maximum)
        if maximum > limit:
            raise ConfigError(f"the maximum {what} size is {maximum}, above {limit_name} {limit}: no step is so large")
    if explicit is None:
        return
    if not explicit:
        raise ConfigError(f"there are no {what} sizes: give at least one, or None for the default ones")
    for size in explicit:
        _positive(f"a {what} size", size)
        if size > limit:
            raise ConfigError(f"a {what} size is {size}, above {limit_name} {limit}: no step is so large")
        if maximum is not None and size > maximum:
            raise ConfigError(f"a {what} size is {size}, above the maximum {maximum}: drop it, or raise the maximum")


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}: give a whole number of at least 1")
