"""Every weight of the model has exactly one tensor of the checkpoint, or the error lists them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.errors import UnsupportedModelError, WeightsError
from compiled_engine.models.safetensors_file import TensorInfo
from compiled_engine.models.weights import ExpectedWeights, expected_weights, resolve_names


def stored(**shapes: tuple[int, ...]) -> dict[str, TensorInfo]:
    names = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return {name: TensorInfo(name, "F32", shape, Path("x"), 0, 0) for name, shape in names.items()}


def as_stored(shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, "F32", shape, Path("x"), 0, 0) for name, shape in shapes.items()}


names = st.sampled_from(["model.a", "model.b", "model.c", "head", "model.n"])
shapes = st.sampled_from([(2,), (2, 3)])
weights = st.dictionaries(names, shapes)


@given(model=weights, checkpoint=weights)
def test_strict_both_ways(model: dict[str, tuple[int, ...]], checkpoint: dict[str, tuple[int, ...]]) -> None:
    expected = ExpectedWeights(shapes=model, base_prefix="base")
    if model == checkpoint:
        assert resolve_names(as_stored(checkpoint), expected) == {name: name for name in model}
        return
    with pytest.raises(WeightsError) as caught:
        resolve_names(as_stored(checkpoint), expected)
    faults = dict.fromkeys(("missing", "left over", "of another shape"), "")
    for line in str(caught.value).splitlines():
        for kind in faults:
            if f" {kind}: " in line:
                faults[kind] = line
    for name in {*model, *checkpoint}:
        assert (name in faults["missing"]) == (name not in checkpoint)
        assert (name in faults["left over"]) == (name not in model)
        both = name in model and name in checkpoint
        assert (name in faults["of another shape"]) == (both and model[name] != checkpoint[name])


def test_long_lists_are_cut_and_counted() -> None:
    expected = ExpectedWeights(shapes={f"w{i:02}": (1,) for i in range(50)})
    with pytest.raises(WeightsError, match=r"50 missing: w00, .*, w19 and 30 more"):
        resolve_names({}, expected)


def test_base_prefix_may_be_absent_or_superfluous() -> None:
    inner = ExpectedWeights(shapes={"model.a": (1,), "head": (1,)}, base_prefix="model")
    assert resolve_names(stored(a=(1,), head=(1,)), inner) == {"model.a": "a", "head": "head"}
    bare = ExpectedWeights(shapes={"a": (1,)}, base_prefix="model")
    assert resolve_names(stored(model__a=(1,)), bare) == {"a": "model.a"}
    with pytest.raises(WeightsError, match="both 'model.a'"):
        resolve_names(stored(a=(1,), model__a=(1,), head=(1,)), inner)


def test_tied_names_share_what_is_stored_under_either() -> None:
    expected = ExpectedWeights(shapes={"embed": (4,), "head": (4,)}, tied={"head": "embed"})
    assert resolve_names(stored(embed=(4,)), expected) == {"embed": "embed", "head": "embed"}
    assert resolve_names(stored(head=(4,)), expected) == {"embed": "head", "head": "head"}
    with pytest.raises(WeightsError, match="2 missing: embed, head"):
        resolve_names({}, expected)


def test_ignored_patterns_excuse_left_over_weights_only() -> None:
    expected = ExpectedWeights(shapes={"h.0.attn.bias_like": (1,)}, ignored=(r"attn\.bias",))
    checkpoint = stored(h__0__attn__bias_like=(1,)) | as_stored({"h.0.attn.bias": (9, 9)})
    assert resolve_names(checkpoint, expected) == {"h.0.attn.bias_like": "h.0.attn.bias_like"}
    with pytest.raises(WeightsError, match="1 missing"):
        resolve_names({}, expected)


def test_renames_apply_to_names_the_model_does_not_know() -> None:
    expected = ExpectedWeights(
        shapes={"norm.weight": (1,), "gamma": (1,)}, rename=lambda name: name.replace("gamma", "weight")
    )
    assert resolve_names(as_stored({"norm.gamma": (1,), "gamma": (1,)}), expected) == {
        "norm.weight": "norm.gamma",
        "gamma": "gamma",
    }


def test_weights_that_need_converting_are_refused_by_name() -> None:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, pad_token_id=0,
    )  # fmt: skip
    expected = expected_weights(transformers.MixtralForCausalLM(config))
    checkpoint = as_stored({"model.layers.0.block_sparse_moe.experts.0.w1.weight": (16, 16)})
    with pytest.raises(UnsupportedModelError, match=r"experts.*must be converted \(MergeModulelist"):
        resolve_names(checkpoint, expected)


def test_legacy_layer_norm_names_of_transformers_are_understood() -> None:
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1))
    assert expected_weights(model).rename("embeddings.LayerNorm.gamma") == "embeddings.LayerNorm.weight"
