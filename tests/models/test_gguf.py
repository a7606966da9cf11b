"""A GGUF file becomes the folder it was made from, once, and never half."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compiled_engine.config import default_cache_root
from compiled_engine.errors import ModelError
from compiled_engine.models import build_definition, find_model
from compiled_engine.models import gguf as gguf_module
from compiled_engine.models.gguf import convert_gguf

HEADS, KV_HEADS, LAYERS, HIDDEN, INTERMEDIATE = 4, 2, 2, 64, 96
TOKENS = ["<pad>", "<bos>", "<eos>", *map(chr, range(33, 127)), "Ġ", "Ċ", "ab"]
TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in GGUF's order: the two halves of a head's rotary pairs interleaved."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, tied: bool, quantized: bool = False) -> dict[str, torch.Tensor]:
    """Write a tiny random Llama as a GGUF file; returns its weights under transformers' names."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)

    weights: dict[str, torch.Tensor] = {}

    def add(gguf_name: str, name: str, shape: tuple[int, ...], heads: int = 0) -> None:
        weight = weights[name] = torch.randn(shape)
        data = (interleaved(weight, heads) if heads else weight).contiguous().numpy()
        if quantized and len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, data)

    add("token_embd.weight", "model.embed_tokens.weight", (len(TOKENS), HIDDEN))
    add("output_norm.weight", "model.norm.weight", (HIDDEN,))
    if not tied:
        add("output.weight", "lm_head.weight", (len(TOKENS), HIDDEN))
    for i in range(LAYERS):
        block, layer, kv_size = f"blk.{i}", f"model.layers.{i}", HIDDEN * KV_HEADS // HEADS
        add(f"{block}.attn_q.weight", f"{layer}.self_attn.q_proj.weight", (HIDDEN, HIDDEN), HEADS)
        add(f"{block}.attn_k.weight", f"{layer}.self_attn.k_proj.weight", (kv_size, HIDDEN), KV_HEADS)
        add(f"{block}.attn_v.weight", f"{layer}.self_attn.v_proj.weight", (kv_size, HIDDEN))
        add(f"{block}.attn_output.weight", f"{layer}.self_attn.o_proj.weight", (HIDDEN, HIDDEN))
        add(f"{block}.ffn_gate.weight", f"{layer}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN))
        add(f"{block}.ffn_up.weight", f"{layer}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN))
        add(f"{block}.ffn_down.weight", f"{layer}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE))
        add(f"{block}.attn_norm.weight", f"{layer}.input_layernorm.weight", (HIDDEN,))
        add(f"{block}.ffn_norm.weight", f"{layer}.post_attention_layernorm.weight", (HIDDEN,))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPILED_ENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folders_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "gguf").iterdir())


@pytest.mark.parametrize("tied", [False, True])
def test_converted_weights_are_the_original_ones(tmp_path: Path, tied: bool) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf", tied)
    files = find_model(str(tmp_path / "tiny.gguf"))
    converted = load_file(files.weight_files[0])
    assert converted.keys() == weights.keys()
    for name, tensor in converted.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, weights[name]), name
    config = json.loads((files.folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["tie_word_embeddings"], config["dtype"]) == (tied, "float32")
    assert json.loads((files.folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert build_definition(files, torch.float32).weight_names.keys() == weights.keys() | {"lm_head.weight"}


def test_saved_config_does_not_call_the_weights_quantized(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(quantization_config={"quant_method": "gguf", "gguf_file": "tiny.gguf"})
    gguf_module._save_config(SimpleNamespace(config=config), tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in saved
    assert saved["dtype"] == "float32"


def test_quantized_weights_become_floats(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf", tied=True, quantized=True)
    converted = load_file(find_model(str(tmp_path / "tiny.gguf")).weight_files[0])
    for name, tensor in weights.items():
        assert converted[name].dtype == torch.float32
        # Q8_0 keeps 8 bits for the largest of 32 values.
        torch.testing.assert_close(converted[name], tensor, rtol=0, atol=float(tensor.abs().max()) / 127)


def test_tokenizer_and_chat_template_come_along(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf", tied=True)
    folder = convert_gguf(tmp_path / "tiny.gguf")
    assert (folder / "tokenizer.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<hi>"
    assert tokenizer.decode(tokenizer("Hello!", add_special_tokens=False)["input_ids"]) == "Hello!"
    assert tokenizer.eos_token_id == 2


def test_a_file_is_converted_once_wherever_it_lies(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tied=True)
    first = convert_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf_module, "_convert", lambda *args: pytest.fail("converted again"))
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "tiny.gguf", tmp_path / "elsewhere" / "tiny.gguf")
    assert convert_gguf(tmp_path / "elsewhere" / "tiny.gguf") == first
    assert folders_in(own_cache) == [first.name]
    assert (first / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_other_content_or_version_is_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(path: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(path.read_bytes())

    monkeypatch.setattr(gguf_module, "_convert", convert)
    (tmp_path / "m.gguf").write_bytes(b"GGUF one")
    first = convert_gguf(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF two")
    second = convert_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(gguf_module, "CONVERTER_VERSION", gguf_module.CONVERTER_VERSION + 1)
    third = convert_gguf(tmp_path / "m.gguf")
    assert len({first, second, third}) == 3
    assert (first / "model.safetensors").read_bytes() == b"GGUF one"
    assert (second / "model.safetensors").read_bytes() == b"GGUF two"


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")

    def fail_halfway(path: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_module, "_convert", fail_halfway)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(tmp_path / "m.gguf")
    assert folders_in(own_cache) == []


def test_the_slower_of_two_processes_uses_the_faster_ones_folder(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")

    def convert(path: Path, folder: Path, author: str = "slower") -> None:
        if author == "slower":
            # While this one works, the other process starts, finishes and moves its folder into place.
            monkeypatch.setattr(gguf_module, "_convert", lambda path, folder: convert(path, folder, "faster"))
            convert_gguf(path)
        (folder / "model.safetensors").write_text(author)

    monkeypatch.setattr(gguf_module, "_convert", convert)
    folder = convert_gguf(tmp_path / "m.gguf")
    assert (folder / "model.safetensors").read_text() == "faster"
    assert folders_in(own_cache) == [folder.name]


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_ENGINE_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_root() == Path("/own")
    monkeypatch.delenv("COMPILED_ENGINE_CACHE")
    assert default_cache_root() == Path("/xdg/compiled_engine")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_root() == Path("/home/someone/.cache/compiled_engine")


def test_missing_packages_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(gguf_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r'gguf and accelerate: pip install "compiled-engine\[gguf\]"'):
        convert_gguf(tmp_path / "m.gguf")


def test_files_that_cannot_be_converted_are_named(tmp_path: Path, own_cache: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ModelError, match=r"text\.gguf is not a GGUF file"):
        convert_gguf(tmp_path / "text.gguf")
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="one part of a split GGUF"):
        convert_gguf(tmp_path / "m-00001-of-00003.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(range(200)))
    with pytest.raises(ModelError, match=r"cannot convert GGUF file .*broken\.gguf"):
        convert_gguf(tmp_path / "broken.gguf")
    assert folders_in(own_cache) == []


def test_unwritable_cache_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="COMPILED_ENGINE_CACHE"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "file")


def test_default_model_has_the_standard_chat_prompt(smollm2_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token == "<|im_end|>"
    assert json.loads((smollm2_folder / "generation_config.json").read_text())["eos_token_id"] == 2
    definition = build_definition(find_model(str(smollm2_folder)), torch.float32)
    assert len(definition.layers) == 30
    assert definition.expected.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert (definition.max_position, definition.vocab_size) == (8192, 49152)
