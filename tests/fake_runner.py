"""A runner whose model is a hash of what its paged cache holds, and a slow independent account of what it should say.

What the cache holds of a position is its token and a digest of the whole prefix, made from the digest that the cache
holds of the position before. The next token's logits follow from the last digest. So a wrong block table, a wrong
position, a block that two requests write, a recompute that was left out, or a prefix taken from the wrong request
changes the text, and most of them are named at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from compiled_engine.ops.sampling import SamplingBatch, sample
from compiled_engine.runners.base import CacheGroupLimits, Runner, RunnerLimits
from compiled_engine.runners.batch import ScheduledBatch, ScheduledRequest, StepOutput

BYTE_VOCAB_SIZE = 259
BYTE_EOS, BYTE_BOS = 256, 257
SPECIAL_TOKENS = ("<eos>", "<bos>", "<unused>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_CHARACTERS = [chr(256 + _OTHERS.index(byte)) if byte in _OTHERS else chr(byte) for byte in range(256)]


def model_logits(token_ids: Sequence[int], vocab_size: int, spread: float = 3.0) -> torch.Tensor:
    """The fake model: logits after ``token_ids``, a function of every one of them and of their order."""
    return logits_after(prefix_digest(token_ids), vocab_size, spread)


def prefix_digest(token_ids: Sequence[int], before: int = 1) -> int:
    """64 bits that follow from every token; ``before`` is the digest of what stands in front of them."""
    for token in token_ids:
        before = (before * 6364136223846793005 + 2 * int(token) + 1) % 2**64
    return before


def logits_after(seed: int, vocab_size: int, spread: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(vocab_size, dtype=np.float32) * spread)


class FakeRunner(Runner):
    """Checks every batch against the contract of ``ScheduledBatch`` and answers by ``model_logits``.

    cache_groups: None stands for one full-attention group of ``num_blocks`` blocks. One group must be full or have a
        window of at least 2, or else a token could not see what came before it.
    fail_at: step number at which ``error`` is raised, before or (``fail_late``) after the cache was written.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 64,
        cache_groups: Sequence[CacheGroupLimits] | None = None,
    ) -> None:
        groups = (CacheGroupLimits(num_blocks),) if cache_groups is None else tuple(cache_groups)
        assert any(group.sliding_window != 1 for group in groups)
        self._limits = RunnerLimits(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            cache_groups=groups,
            vocab_size=vocab_size,
        )
        # Of each slot: token, position, digest of the prefix up to it.
        self.caches = [np.full((group.num_blocks * block_size, 3), -1, np.int64) for group in groups]
        self.num_steps = 0
        self.batches: list[ScheduledBatch] = []
        self.fail_at: int | None = None
        self.fail_late = False
        self.error: BaseException = RuntimeError("the device is on fire")
        self.closed = 0

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        self._check(batch)
        self.batches.append(batch)
        failing = self.num_steps == self.fail_at
        self.num_steps += 1
        if failing and not self.fail_late:
            raise self.error
        for request in batch.requests:
            self._write(request)
        if failing:
            raise self.error
        digests = [self._read(request) for request in batch.requests]
        rows = [digest for digest, request in zip(digests, batch.requests, strict=True) if request.samples]
        if not rows:
            return StepOutput(sample(torch.empty(0, self.limits.vocab_size), batch.sampling))
        logits = torch.stack([logits_after(digest, self.limits.vocab_size) for digest in rows])
        return StepOutput(sample(logits, batch.sampling))

    def close(self) -> None:
        self.closed += 1

    def _check(self, batch: ScheduledBatch) -> None:
        limits = self.limits
        assert 0 < batch.num_scheduled_tokens <= limits.max_num_batched_tokens
        assert 0 < len(batch.requests) <= limits.max_num_seqs
        assert len({request.request_id for request in batch.requests}) == len(batch.requests)
        sampling = [request for request in batch.requests if request.samples]
        assert len(batch.sampling.temperature) == len(sampling)
        assert batch.sampling.positions.tolist() == [request.seq_len for request in sampling]
        for request in batch.requests:
            assert request.num_scheduled_tokens > 0
            assert request.seq_len <= limits.max_model_len
            assert len(request.block_tables) == len(limits.cache_groups)
        for index, group in enumerate(limits.cache_groups):
            self._check_tables(batch, index, group)

    def _check_tables(self, batch: ScheduledBatch, index: int, group: CacheGroupLimits) -> None:
        """Blocks that a request sees or writes are real; one that is written is in no other place of the batch."""
        block_size = self.limits.block_size
        holders: dict[int, set[tuple[str, int]]] = {}
        for request in batch.requests:
            table = request.block_tables[index]
            assert len(table) == -(-request.seq_len // block_size)
            seen = self._first_visible(request, group) // block_size
            assert not any(table[:seen]), f"{request.request_id} holds blocks that its window has left behind"
            for column, block in enumerate(table[seen:], seen):
                assert 0 < block < group.num_blocks
                holders.setdefault(block, set()).add((request.request_id, column))
        for request in batch.requests:
            table = request.block_tables[index]
            for column in range(request.num_computed_tokens // block_size, len(table)):
                others = holders[table[column]] - {(request.request_id, column)}
                assert not others, f"{request.request_id} writes block {table[column]}, which is {others}'s too"

    def _write(self, request: ScheduledRequest) -> None:
        start = request.num_computed_tokens
        digest = prefix_digest(()) if start == 0 else self._digest_at(request, start - 1)
        for offset, token in enumerate(request.token_ids):
            digest = prefix_digest([token], digest)
            for cache, table in zip(self.caches, request.block_tables, strict=True):
                cache[self._slots(table, [start + offset])] = (token, start + offset, _signed(digest))

    def _read(self, request: ScheduledRequest) -> int:
        """The digest at the request's last token, after a check of everything that its tokens see."""
        for group, cache, table in zip(self.limits.cache_groups, self.caches, request.block_tables, strict=True):
            positions = range(self._first_visible(request, group), request.seq_len)
            entries = cache[self._slots(table, positions)]
            assert entries[:, 1].tolist() == list(positions), f"{request.request_id} reads wrong positions"
            tokens, digests = entries[:, 0].tolist(), entries[:, 2].tolist()
            before = prefix_digest(()) if positions.start == 0 else None
            for token, digest in zip(tokens, digests, strict=True):
                assert before is None or _signed(prefix_digest([token], before)) == digest, (
                    f"{request.request_id} reads a mixture of prefixes"
                )
                before = digest % 2**64
        return self._digest_at(request, request.seq_len - 1)

    def _digest_at(self, request: ScheduledRequest, position: int) -> int:
        """The digest that the cache holds of ``position``, the same in each group in which the next token sees it."""
        digests = {
            int(cache[self._slots(table, [position])][0, 2])
            for group, cache, table in zip(self.limits.cache_groups, self.caches, request.block_tables, strict=True)
            if group.sliding_window != 1
        }
        assert len(digests) == 1, f"{request.request_id} reads other prefixes in other cache groups"
        return digests.pop() % 2**64

    def _slots(self, table: Sequence[int], positions: Sequence[int]) -> list[int]:
        size = self.limits.block_size
        return [table[position // size] * size + position % size for position in positions]

    @staticmethod
    def _first_visible(request: ScheduledRequest, group: CacheGroupLimits) -> int:
        window = group.sliding_window
        return 0 if window is None else max(0, request.num_computed_tokens - window + 1)


def _signed(digest: int) -> int:
    return digest - 2**64 if digest >= 2**63 else digest


def expected_tokens(
    prompt: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int = 64,
    stop_ids: Sequence[int] = (),
    min_tokens: int = 0,
    seed: int = 0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[int]:
    """What the fake model says to one prompt alone, token by token, without engine, cache or batch."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < num_tokens:
        forbidden = tuple(stop_ids) if len(tokens) - len(prompt) < min_tokens else ()
        batch = SamplingBatch(
            temperature=torch.tensor([temperature]),
            top_k=torch.tensor([top_k]),
            top_p=torch.tensor([top_p]),
            min_p=torch.tensor([min_p]),
            seeds=torch.tensor([seed]),
            positions=torch.tensor([len(tokens)]),
            forbidden_token_ids=(forbidden,),
            num_logprobs=(-1,),
        )
        tokens.append(sample(model_logits(tokens, vocab_size)[None], batch).token_ids[0])
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def byte_tokenizer(extra_tokens: Sequence[bytes] = ()) -> Tokenizer:
    """A byte-level tokenizer: id b is byte b, then <eos>, <bos> and <unused>, then ``extra_tokens``.

    ``extra_tokens``: different strings of two or more bytes. No merge makes them, so they matter for decoding only.
    """
    names = [*(byte_token(bytes([byte])) for byte in range(256)), *SPECIAL_TOKENS, *map(byte_token, extra_tokens)]
    fast = Tokenizer(models.BPE(vocab={name: token_id for token_id, name in enumerate(names)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    return fast


def byte_token(data: bytes) -> str:
    """How byte-level vocabularies spell ``data``: one printable character per byte."""
    return "".join(BYTE_CHARACTERS[byte] for byte in data)


def write_byte_model_folder(folder: Path) -> Path:
    """A model folder as far as the engine room reads it: tokenizer, chat template and end-of-sequence id."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": BYTE_EOS}))
    return folder
