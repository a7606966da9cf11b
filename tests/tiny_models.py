"""Tiny random checkpoints on disk, one per architecture, and damaged variants of them.

Each is seeded, has a few layers, 128 tokens and 512 positions, and weights wide enough that greedy text is varied and
its choices are clear; the end-of-text token does not come up by itself. All share one tokenizer, a token per character,
so that text goes in and out unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 128
MAX_POSITIONS = 512
WINDOW = 16
"""Sliding window of the architectures that have one: shorter than the tests' prompts."""

EOS_TOKEN_ID = 2
SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
}
_GEMMA: dict[str, Any] = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES),
    "llama_tied": ("LlamaConfig", {**_SIZES, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 32}),
    "mistral": ("MistralConfig", {**_SIZES, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", {**_SIZES, **_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}),
    "gemma3": ("Gemma3TextConfig", {**_SIZES, **_GEMMA}),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **_SIZES,
            **_GEMMA,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "intermediate_size": 96,
            "num_kv_shared_layers": 3,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4,
        },
    ),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITIONS}),
    "phi3": ("Phi3Config", _SIZES),
}
"""Name to transformers config class and its arguments."""


def write_tiny_model(
    folder: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "5GB",
    **overrides: Any,
) -> Path:
    """Write a tiny model of ``architecture`` (a key of ``ARCHITECTURES``) and its tokenizer; returns ``folder``.

    ``overrides`` change the config. A small ``max_shard_size`` (bytes, or text such as "20KB") gives a sharded
    checkpoint.
    """
    import transformers

    class_name, arguments = ARCHITECTURES[architecture]
    config = getattr(transformers, class_name)(**{**_COMMON, **arguments, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        _adjust_weights(model)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def _adjust_weights(model: Any) -> None:
    """Make mistakes visible and greedy text long and varied."""
    is_gemma = model.config.model_type.startswith("gemma")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            # Biases and norm weights start as zeros and ones: a mistake with them would go unseen.
            parameter.data += 0.2 * torch.randn_like(parameter)
        # Gemma scales up its embedding, which is its head too: without louder layers it repeats one token.
        if is_gemma and ".post_" in name:
            parameter.data += 2
        if is_gemma and ("q_norm" in name or "k_norm" in name or name == "model.norm.weight"):
            parameter.data += 1
    head = model.get_output_embeddings().weight.data
    if is_gemma:
        head *= 0.5
    # Special tokens, the end of text among them, are never the likeliest.
    head[: len(SPECIAL_TOKENS)] *= 0.05


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one token per character: printable ASCII, newline and some Greek letters."""
    import transformers
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    characters = [chr(code) for code in range(32, 127)] + ["\n"] + [chr(code) for code in range(0x3B1, 0x3B1 + 28)]
    tokens = (SPECIAL_TOKENS + characters)[:VOCAB_SIZE]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """Replace the weights of a single-file checkpoint by ``edit(weights)``."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(edit(weights), file, metadata={"format": "pt"})
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    """Change entries of config.json; a value of None removes the entry."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def drop_weight(folder: Path, name: str) -> Path:
    """A checkpoint that lacks weight ``name``."""
    return edit_weights(folder, lambda weights: {key: value for key, value in weights.items() if key != name})


def add_weight(folder: Path, name: str) -> Path:
    """A checkpoint with a weight that the model does not know."""
    return edit_weights(folder, lambda weights: {**weights, name: torch.zeros(2, 3)})


def reshape_weight(folder: Path, name: str) -> Path:
    """A checkpoint whose weight ``name`` has one row too many."""
    return edit_weights(folder, lambda weights: {**weights, name: torch.cat([weights[name], weights[name][:1]])})


def make_pickle_only(folder: Path) -> Path:
    """A checkpoint with a pickle file instead of safetensors."""
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def drop_config(folder: Path) -> Path:
    """A model folder without config.json."""
    (folder / "config.json").unlink()
    return folder


def want_remote_code(folder: Path) -> Path:
    """A model whose definition is code in its own folder."""
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "configuration_own.py").write_text("raise RuntimeError('remote code was run')\n")
    (folder / "modeling_own.py").write_text("raise RuntimeError('remote code was run')\n")
    return edit_config(folder, model_type="own", auto_map=auto_map)


def write_encoder_decoder(folder: Path) -> Path:
    """A tiny T5, complete with weights and tokenizer."""
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
