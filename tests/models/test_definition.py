"""The definition computes what transformers computes, from the specs it discovered; all else is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from compiled_engine.errors import ModelError, UnsupportedModelError, WeightsError
from compiled_engine.models import Checkpoint, ModelDefinition, ModelFiles, build_definition, find_model
from compiled_engine.models.attention_interface import IMPLEMENTATION, RECORDING, discover_layers, register_interface
from compiled_engine.ops.attention import AttentionSpec

WINDOW = tiny_models.WINDOW
EXPECTED: dict[str, list[tuple[int, int, int, float, int | None, float | None]]] = {
    "llama": [(4, 2, 16, 0.25, None, None)] * 3,
    "llama_tied": [(4, 1, 16, 0.25, None, None)] * 3,
    "qwen2": [(4, 2, 16, 0.25, None, None)] * 3,
    "qwen3": [(4, 2, 32, 32**-0.5, None, None)] * 3,
    "mistral": [(4, 2, 16, 0.25, WINDOW, None)] * 3,
    "gemma2": [(4, 2, 32, 24**-0.5, WINDOW, 5.0), (4, 2, 32, 24**-0.5, None, 5.0)] * 2,
    "gemma3": [(4, 2, 32, 24**-0.5, WINDOW, None), (4, 2, 32, 24**-0.5, None, None)] * 2,
    "gemma3n": [*[(4, 2, 32, 1.0, WINDOW, None)] * 2, (4, 2, 32, 1.0, None, None)] * 2,
    "gpt2": [(4, 4, 16, 0.25, None, None)] * 3,
    "phi3": [(4, 2, 16, 0.25, None, None)] * 3,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {name: tiny_models.write_tiny_model(root / name, name) for name in tiny_models.ARCHITECTURES}


def build(folder: Path, dtype: torch.dtype = torch.float32) -> ModelDefinition:
    return build_definition(find_model(str(folder)), dtype)


def from_pretrained(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


def attend_densely(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention over [1, heads, tokens, head_dim] by nothing but ``spec``; returns [1, tokens, heads, head_dim]."""
    repeats = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = q @ k.transpose(2, 3) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    visible = (distance >= 0) & (distance < (spec.sliding_window or q.shape[2]))
    return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v).transpose(1, 2)


@pytest.fixture
def dense_attention() -> Iterator[dict[str, AttentionSpec]]:
    """An attention implementation that knows layers by name only; yields its table, for the test to fill."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    specs: dict[str, AttentionSpec] = {}

    def attention(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
        assert mask is None
        return attend_densely(specs[module.compiled_engine_layer_name], q, k, v), None

    ALL_ATTENTION_FUNCTIONS.register("dense_by_name", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("dense_by_name", lambda *args, **kwargs: None)
    yield specs
    del type(ALL_ATTENTION_FUNCTIONS)._global_mapping["dense_by_name"]
    del type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping["dense_by_name"]


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_layers_are_discovered(folders: dict[str, Path], architecture: str) -> None:
    definition = build(folders[architecture])
    assert [
        (s.num_heads, s.num_kv_heads, s.head_dim, pytest.approx(s.scale), s.sliding_window, s.soft_cap)
        for s in definition.layers
    ] == EXPECTED[architecture]
    modules = dict(definition.module.named_modules())
    for spec in definition.layers:
        assert modules[spec.layer_name].compiled_engine_layer_name == spec.layer_name
    assert definition.config._attn_implementation == IMPLEMENTATION
    assert (definition.vocab_size, definition.hidden_size, definition.max_position) == (128, 64, 512)


def test_layers_that_are_handed_the_keys_of_others_share_their_cache(folders: dict[str, Path]) -> None:
    """Gemma 3n's last layers read the keys of the last layer of their kind that made some."""
    names = [f"model.layers.{index}.self_attn" for index in range(6)]
    sharing = {spec.layer_name: spec.shares_with for spec in build(folders["gemma3n"]).layers}
    assert sharing == dict.fromkeys(names[:3]) | {names[3]: names[1], names[4]: names[1], names[5]: names[2]}
    for architecture in tiny_models.ARCHITECTURES.keys() - {"gemma3n"}:
        assert all(spec.shares_with is None for spec in build(folders[architecture]).layers)


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_logits_from_specs_and_weights_equal_transformers(
    folders: dict[str, Path], architecture: str, dense_attention: dict[str, AttentionSpec]
) -> None:
    definition = build(folders[architecture])
    dense_attention.update({spec.layer_name: spec for spec in definition.layers})
    for module in definition.module.modules():
        if getattr(module, "config", None) is not None:
            module.config._attn_implementation = "dense_by_name"
    state = definition.module.state_dict()
    with Checkpoint(find_model(str(folders[architecture]))) as checkpoint:
        for name, stored in definition.weight_names.items():
            checkpoint.read(stored, out=state[name])
    input_ids = torch.randint(0, 128, (1, 4 * WINDOW))
    # eager, because sdpa leaves out the soft caps
    reference = from_pretrained(folders[architecture], attn_implementation="eager")
    with torch.no_grad():
        expected = reference(input_ids).logits
        logits = definition.module(input_ids, position_ids=torch.arange(4 * WINDOW)[None], use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_buffers_and_dtypes_equal_from_pretrained(
    folders: dict[str, Path], architecture: str, dtype: torch.dtype
) -> None:
    definition, reference = build(folders[architecture], dtype), from_pretrained(folders[architecture], dtype=dtype)
    buffers = dict(reference.named_buffers())
    assert dict(definition.expected.buffers).keys() == buffers.keys()
    for name, buffer in definition.expected.buffers.items():
        assert buffer.dtype == buffers[name].dtype
        assert torch.equal(buffer, buffers[name]), name
    state = {name: (tensor.shape, tensor.dtype) for name, tensor in reference.state_dict().items()}
    assert state == {
        name: (shape, definition.expected.dtypes[name]) for name, shape in definition.expected.shapes.items()
    }
    assert not definition.module.training
    assert not any(parameter.requires_grad for parameter in definition.module.parameters())


def test_captures_as_one_graph_with_one_attention_per_layer(folders: dict[str, Path]) -> None:
    definition = build(folders["gemma3"])
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return lambda *args: (torch.zeros(1, 1, 128),)

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return definition.module(ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=1).logits

    torch.compile(forward, fullgraph=True, dynamic=True, backend=backend)(
        torch.zeros(8, dtype=torch.long), torch.arange(8)
    )
    (graph,) = graphs
    calls = [node for node in graph.graph.nodes if str(node.target).startswith("compiled_engine.attention")]
    assert [node.args[4] for node in calls] == [spec.layer_name for spec in definition.layers]
    assert {tuple(node.args[0].meta["example_value"].shape[1:]) for node in calls} == {(4, 32)}
    assert {tuple(node.args[1].meta["example_value"].shape[1:]) for node in calls} == {(2, 32)}


def test_a_model_larger_than_memory_is_defined_without_touching_its_weights() -> None:
    from transformers import LlamaConfig

    from compiled_engine.models.definition import _build_module

    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=8, num_attention_heads=32)
    before = resident_bytes()
    register_interface()
    module = _build_module(config, torch.float32)
    layers = discover_layers(module, config.max_position_embeddings)
    assert len(layers) == 8
    assert sum(parameter.nbytes for parameter in module.parameters()) > 7 << 30
    assert resident_bytes() - before < 200 << 20


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


# The head follows the checkpoint.


def test_tied_head_is_the_embedding(folders: dict[str, Path]) -> None:
    definition = build(folders["llama_tied"])
    assert definition.expected.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert definition.weight_names["lm_head.weight"] == "model.embed_tokens.weight"


def test_head_of_its_own_is_used_although_the_config_ties(tmp_path: Path) -> None:
    folder = tiny_models.write_tiny_model(tmp_path / "m", "llama_tied")
    tiny_models.edit_weights(
        folder, lambda weights: {**weights, "lm_head.weight": 2 * weights["model.embed_tokens.weight"]}
    )
    definition = build(folder)
    assert definition.expected.tied == {}
    assert definition.config.tie_word_embeddings is False
    assert definition.weight_names["lm_head.weight"] == "lm_head.weight"
    module = definition.module
    assert module.lm_head.weight.data_ptr() != module.model.embed_tokens.weight.data_ptr()


def test_missing_head_is_an_error_when_the_config_does_not_tie(tmp_path: Path) -> None:
    folder = tiny_models.drop_weight(tiny_models.write_tiny_model(tmp_path / "m"), "lm_head.weight")
    with pytest.raises(WeightsError, match=r"1 missing: lm_head\.weight"):
        build(folder)


# Checkpoints and definitions that disagree.


def test_missing_left_over_and_misshapen_weights_are_listed(tmp_path: Path) -> None:
    folder = tiny_models.write_tiny_model(tmp_path / "m")
    tiny_models.drop_weight(folder, "model.layers.1.mlp.up_proj.weight")
    tiny_models.add_weight(folder, "model.layers.9.mlp.up_proj.weight")
    tiny_models.reshape_weight(folder, "model.norm.weight")
    with pytest.raises(WeightsError) as caught:
        build(folder)
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "1 left over: model.layers.9.mlp.up_proj.weight" in str(caught.value)
    assert "1 of another shape: model.norm.weight (model (64,), checkpoint (65,))" in str(caught.value)


def test_old_gpt2_checkpoint_without_prefix_and_with_tables(tmp_path: Path) -> None:
    folder = tiny_models.write_tiny_model(tmp_path / "m", "gpt2")

    def as_published(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        bare = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
        return {**bare, **{f"h.{i}.attn.bias": torch.ones(1, 1, 8, 8) for i in range(3)}}

    tiny_models.edit_weights(folder, as_published)
    names = build(folder).weight_names
    assert names["transformer.h.1.attn.c_attn.weight"] == "h.1.attn.c_attn.weight"
    assert names["lm_head.weight"] == names["transformer.wte.weight"] == "wte.weight"


def test_sharded_checkpoint(tmp_path: Path) -> None:
    folder = tiny_models.write_tiny_model(tmp_path / "m", max_shard_size="60KB")
    single = load_file(tiny_models.write_tiny_model(tmp_path / "s") / "model.safetensors")
    definition = build(folder)
    with Checkpoint(find_model(str(folder))) as checkpoint:
        for name, stored in definition.weight_names.items():
            assert torch.equal(checkpoint.read(stored), single[name])


# Models that are refused.


def refused(folder: Path, config: Any, match: str) -> None:
    config.save_pretrained(folder)
    save_file({"w": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=match):
        build(folder)


SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("class_name", "arguments", "match"),
    [
        ("BertConfig", SMALL, "bidirectional"),
        ("Gemma3TextConfig", {**SMALL, "use_bidirectional_attention": True}, "bidirectional"),
        (
            "GptOssConfig",
            {**SMALL, "num_local_experts": 1, "head_dim": 8, "num_key_value_heads": 4},
            r"sinks \(s_aux\)",
        ),
        ("DeepseekV3Config", {**SMALL, **MLA}, "values of another head size"),
        ("MixtralConfig", {**SMALL, "num_key_value_heads": 4}, "mixture of experts"),
        ("BloomConfig", {"vocab_size": 32, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "0 of its 2 layers"),
        ("FalconConfig", SMALL, "cannot build a falcon model"),
        ("MambaConfig", {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2}, "linear_attention|recurrent"),
        ("Llama4TextConfig", {**SMALL, "num_local_experts": 1, "attention_chunk_size": 8}, "chunked"),
        ("LlamaConfig", {**SMALL, "rope_parameters": DYNAMIC_ROPE}, "rope type dynamic"),
        ("LlamaConfig", {**SMALL, "quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized .gptq"),
        (
            "GPT2Config",
            {"vocab_size": 32, "n_embd": 32, "n_layer": 1, "n_head": 4, "add_cross_attention": True},
            "cross",
        ),
        ("Gemma3Config", {}, "multimodal"),
        ("ViTConfig", {}, "no causal language model"),
    ],
)
def test_unsupported_models_are_refused_by_feature(
    tmp_path: Path, class_name: str, arguments: dict[str, Any], match: str
) -> None:
    import transformers

    refused(tmp_path, getattr(transformers, class_name)(**arguments), match)


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    tiny_models.write_encoder_decoder(tmp_path)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        build(tmp_path)


def test_remote_code_is_refused_and_never_run(tmp_path: Path) -> None:
    folder = tiny_models.want_remote_code(tiny_models.write_tiny_model(tmp_path / "m"))
    with pytest.raises(UnsupportedModelError, match="wants remote code"):
        build(folder)
    # A model that transformers defines itself is built from its own definition, whatever code lies beside it.
    tiny_models.edit_config(folder, model_type="llama")
    assert type(build(folder).module).__module__.startswith("transformers.models.llama")


def test_unknown_or_broken_config(tmp_path: Path) -> None:
    folder = tiny_models.write_tiny_model(tmp_path / "m")
    tiny_models.edit_config(folder, model_type="nonesuch")
    with pytest.raises(UnsupportedModelError, match="'nonesuch': transformers .* does not know it"):
        build(folder)
    for text in ("{", "[]"):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json cannot be read"):
            build(folder)


def recording_llama() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    register_interface()
    return AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), attn_implementation=RECORDING).eval()


def test_a_layer_that_attends_twice_is_refused() -> None:
    model = recording_llama()
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    with pytest.raises(UnsupportedModelError, match=r"'model\.layers\.0\.self_attn' attends twice"):
        discover_layers(model, 64)


def test_a_declared_window_must_be_that_of_the_mask() -> None:
    model = recording_llama()
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda **kwargs: forward(**kwargs, sliding_window=8)
    with pytest.raises(UnsupportedModelError, match=r"declares a sliding window of 8, but its mask shows all"):
        discover_layers(model, 64)


def test_a_mask_of_the_models_own_is_refused() -> None:
    model = recording_llama()
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda **kwargs: forward(**{**kwargs, "attention_mask": torch.ones(1, 1, 4, 4)})
    with pytest.raises(UnsupportedModelError, match="a mask that the model builds itself"):
        discover_layers(model, 64)


def test_an_unknown_attention_argument_is_refused() -> None:
    model = recording_llama()
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda **kwargs: forward(**kwargs, temperature_per_head=torch.ones(4))
    with pytest.raises(UnsupportedModelError, match=r"an attention argument \(temperature_per_head\)"):
        discover_layers(model, 64)


def test_definition_needs_no_weight_file_open(tmp_path: Path) -> None:
    folder = tiny_models.write_tiny_model(tmp_path / "m")
    files = find_model(str(folder))
    checkpoint = Checkpoint(files)
    definition = build_definition(ModelFiles(folder, (), "headers only"), torch.float32, checkpoint)
    assert set(definition.weight_names) == set(checkpoint)
    sources = dict(definition.sources)
    assert sources.pop("transformers")
    assert [(name, len(digest)) for name, digest in sources.items()] == [("modeling_llama.py", 64)]
