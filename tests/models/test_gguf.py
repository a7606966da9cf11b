"""A GGUF file becomes the folder it was made from, once, and never half."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_gguf_pytorch_utils import GGUFTensor, LlamaTensorProcessor

from compiled_engine.config import default_cache_root
from compiled_engine.errors import ModelError
from compiled_engine.models import build_definition, find_model, gguf_tensors
from compiled_engine.models import gguf as gguf_module
from compiled_engine.models.checkpoint import Checkpoint
from compiled_engine.models.gguf import convert_gguf
from expanded_gguf import expand_gguf

HEADS, KV_HEADS, LAYERS, HIDDEN, INTERMEDIATE = 4, 2, 2, 64, 96
TOKENS = ["<pad>", "<bos>", "<eos>", *map(chr, range(33, 127)), "Ġ", "Ċ", "ab"]
TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"


def halves_of_heads(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection as transformers has them: GGUF interleaves the halves of rotary pairs."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    with Checkpoint([folder / "model.safetensors"]) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint}


def types_of(folder: Path) -> dict[str, str]:
    return {name: info.dtype_name for name, info in Checkpoint([folder / "model.safetensors"]).items()}


def write_gguf(path: Path, tied: bool, quantized: str | None = None, without: str = "") -> dict[str, torch.Tensor]:
    """Write a tiny random Llama as a GGUF file; returns its weights under transformers' names.

    Its matrices are of ggml type ``quantized``, and the returned ones what gguf reads of them. The GGUF tensor named
    ``without`` is left out.
    """
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
        if gguf_name == without:
            return
        data = np.random.randn(*shape).astype(np.float32)
        if quantized and len(shape) == 2:
            kind = gguf.GGMLQuantizationType[quantized]
            blocks = gguf.quants.quantize(data, kind)
            writer.add_tensor(gguf_name, blocks, raw_dtype=kind)
            data = gguf.quants.dequantize(blocks, kind)
        else:
            writer.add_tensor(gguf_name, data)
        weight = torch.from_numpy(data)
        weights[name] = halves_of_heads(weight, heads) if heads else weight

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
    converted = read_all(files.folder)
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
    gguf_module._save_config(SimpleNamespace(config=config, can_generate=lambda: False), tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in saved
    assert saved["dtype"] == "float32"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("tied", [False, True])
def test_quantized_matrices_stay_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, tied: bool
) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf", tied, kind)
    files = find_model(str(tmp_path / "tiny.gguf"))
    assert types_of(files.folder) == {name: kind if tensor.ndim == 2 else "F32" for name, tensor in weights.items()}
    for name, tensor in read_all(files.folder).items():
        assert torch.equal(tensor, weights[name]), name
    assert files.weight_files[0].stat().st_size < (tmp_path / "tiny.gguf").stat().st_size
    assert build_definition(files, torch.float32).weight_names.keys() == weights.keys() | {"lm_head.weight"}
    assert "widening all" not in caplog.text


def test_other_types_become_floats(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf", tied=True, quantized="BF16")
    folder = convert_gguf(tmp_path / "tiny.gguf")
    assert set(types_of(folder).values()) == {"F32"}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in read_all(folder).items())


def change_numbers(self: Any, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
    return GGUFTensor(weights - 1 if weights.ndim == 2 else weights, name, {})


def transpose(self: Any, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
    return GGUFTensor(weights.T.copy() if "attn_output" in name else weights, name, {})


def double_one_number(self: Any, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
    # Not where all numbers of a row are equal, so that only the weights themselves can show it.
    if weights.ndim == 2 and weights[5, 5] != weights[5, 6]:
        weights = weights.copy()
        weights[5, 5] *= 2
    return GGUFTensor(weights, name, {})


def repeat_a_row(self: Any, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
    return GGUFTensor(weights[[0, *range(len(weights) - 1)]] if weights.ndim == 2 else weights, name, {})


def reverse_rows(self: Any, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
    return GGUFTensor(weights[::-1] if weights.ndim == 2 else weights, name, {})


@pytest.mark.parametrize(
    ("process", "kept"),
    [
        (change_numbers, set()),
        (transpose, {"q", "k", "v"}),
        (double_one_number, set()),
        (repeat_a_row, set()),
        (reverse_rows, {"q", "k", "v", "o"}),
    ],
)
def test_blocks_are_kept_only_where_rows_alone_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: Callable[..., Any], kept: set[str]
) -> None:
    """Whatever an architecture does to its tensors, the weights are those that it makes."""
    monkeypatch.setattr(LlamaTensorProcessor, "process", process)
    write_gguf(tmp_path / "tiny.gguf", tied=False, quantized="Q4_1")
    folder = convert_gguf(tmp_path / "tiny.gguf")
    found = types_of(folder)
    types = {letter: found[f"model.layers.1.self_attn.{letter}_proj.weight"] for letter in "qkvo"}
    assert types == {letter: "Q4_1" if letter in kept else "F32" for letter in "qkvo"}
    (tmp_path / "plain").mkdir()
    expected = load_file(expand_gguf(tmp_path / "tiny.gguf", tmp_path / "plain") / "model.safetensors")
    assert_same_weights(read_all(folder), expected)


@pytest.mark.parametrize("fault", ["missing tensor", "missing helper", "other loader"])
def test_without_the_parts_of_transformers_all_is_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    without = "blk.1.ffn_norm.weight" if fault == "missing tensor" else ""
    weights = write_gguf(tmp_path / "tiny.gguf", tied=True, quantized="Q8_0", without=without)
    if fault == "missing helper":
        # Not taken away from transformers, whose own loader needs it.
        monkeypatch.setattr(gguf_tensors.GgufTensors, "__init__", lambda self, path: no_such_part())
    if fault == "other loader":
        monkeypatch.setattr(gguf_tensors, "_has_a_loader_of_its_own", lambda architecture: architecture == "llama")
    folder = convert_gguf(tmp_path / "tiny.gguf")
    assert "widening all of tiny.gguf to float32" in caplog.text
    assert set(types_of(folder).values()) == {"F32"}
    converted = read_all(folder)
    assert all(torch.equal(converted[name], tensor) for name, tensor in weights.items())


def no_such_part() -> None:
    raise ImportError("cannot import name 'TENSOR_PROCESSORS'")


def test_a_full_disk_is_no_reason_to_widen(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: Any, weights: Any, file: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_tensors.GgufTensors, "write", write)
    write_gguf(tmp_path / "tiny.gguf", tied=True, quantized="Q8_0")
    with pytest.raises(OSError, match="No space left"):
        convert_gguf(tmp_path / "tiny.gguf")
    assert folders_in(own_cache) == []


def assert_same_weights(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype == torch.float32
        assert torch.equal(ours[name].view(torch.int32), tensor.view(torch.int32)), name


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


@pytest.mark.slow
def test_every_weight_of_the_default_model_is_transformers_own(smollm2_folder: Path, smollm2_expanded: Path) -> None:
    assert_same_weights(read_all(smollm2_folder), load_file(smollm2_expanded / "model.safetensors"))
    assert Counter(types_of(smollm2_folder).values()) == {"Q4_1": 210, "Q8_0": 1, "F32": 61}


@pytest.mark.slow
def test_every_weight_of_gemma_is_transformers_own(gemma3_folder: Path, gemma3_expanded: Path) -> None:
    expected = load_file(gemma3_expanded / "model.safetensors")
    assert_same_weights(read_all(gemma3_folder), expected)
    floats = {name for name, kind in types_of(gemma3_folder).items() if kind == "F32"}
    assert floats == {name for name, tensor in expected.items() if tensor.ndim == 1}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_conversion_never_holds_the_widened_model(gemma3_file: Path, tmp_path: Path) -> None:
    """From after the file's header was read to the end: one widened tensor, and the pages of the file itself."""
    program = """
import sys
from pathlib import Path
from compiled_engine.models.gguf_tensors import GgufTensors

def memory(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))

tensors = GgufTensors(Path(sys.argv[1]))
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
weights = tensors.plan()
tensors.write(weights, Path(sys.argv[2]))
print(memory("VmHWM") - before)
"""
    command = [sys.executable, "-c", program, str(gemma3_file), str(tmp_path / "model.safetensors")]
    used = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    largest = max(tensor.numel() for tensor in read_all(tmp_path).values()) * 4
    assert used < 1.2 * largest + gemma3_file.stat().st_size + (64 << 20)
