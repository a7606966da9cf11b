"""A runner whose model is a hash of what its paged cache holds, and a slow independent account of what it should say.

The next token's logits follow from the tokens that are read back from the cache through the block table. So a wrong
block table, a wrong position, a block with two owners, or a recompute that was left out changes the text, and most of
them are named at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from compiled_engine.ops.sampling import SamplingBatch, sample
from compiled_engine.runners.base import Runner, RunnerLimits
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
    seed = 1
    for token in token_ids:
        seed = (seed * 6364136223846793005 + 2 * int(token) + 1) % 2**64
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(vocab_size, dtype=np.float32) * spread)


class FakeRunner(Runner):
    """Checks every batch against the contract of ``ScheduledBatch`` and answers by ``model_logits``.

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
        num_cache_groups: int = 1,
    ) -> None:
        self._limits = RunnerLimits(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            vocab_size=vocab_size,
            num_cache_groups=num_cache_groups,
        )
        self.caches = [np.full((num_blocks, block_size, 2), -1, np.int64) for _ in range(num_cache_groups)]
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
        prefixes = [self._read(request) for request in batch.requests]
        rows = [p for p, request in zip(prefixes, batch.requests, strict=True) if request.samples]
        if not rows:
            return StepOutput(sample(torch.empty(0, self.limits.vocab_size), batch.sampling))
        logits = torch.stack([model_logits(prefix, self.limits.vocab_size) for prefix in rows])
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
        owners: dict[int, str] = {}
        for request in batch.requests:
            assert request.num_scheduled_tokens > 0
            assert request.seq_len <= limits.max_model_len
            assert len(request.block_tables) == limits.num_cache_groups
            for table in request.block_tables:
                assert len(table) == -(-request.seq_len // limits.block_size)
                for block in table:
                    assert 0 < block < limits.num_blocks
                    assert block not in owners, f"block {block} of {request.request_id} is {owners[block]}'s too"
                    owners[block] = request.request_id

    def _write(self, request: ScheduledRequest) -> None:
        for cache, table in zip(self.caches, request.block_tables, strict=True):
            for offset, token in enumerate(request.token_ids):
                block, slot = divmod(request.num_computed_tokens + offset, self.limits.block_size)
                cache[table[block], slot] = (token, request.num_computed_tokens + offset)

    def _read(self, request: ScheduledRequest) -> list[int]:
        read = []
        for cache, table in zip(self.caches, request.block_tables, strict=True):
            entries = cache[list(table)].reshape(-1, 2)[: request.seq_len]
            assert entries[:, 1].tolist() == list(range(request.seq_len)), f"{request.request_id} reads wrong positions"
            read.append(entries[:, 0].tolist())
        assert all(tokens == read[0] for tokens in read)
        return read[0]


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
