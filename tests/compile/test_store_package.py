"""A real compiled package through the store: saved, moved, and run in a process that has no compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compiled_engine.compile.store import GraphStore
from store_models import make_key, make_model

RUN = """
import sys
import torch
from pathlib import Path
from compiled_engine.compile.store import GraphStore
from store_models import make_key
loaded = GraphStore(Path(sys.argv[1])).load(make_key())
(path,) = loaded.packages.values()
loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
(result,) = loader.run([torch.arange(12.0).view(3, 4), loaded.constants["weight"]])
print(result.tolist())
assert not [name for name in ("torch._dynamo", "torch._inductor", "transformers") if name in sys.modules]
"""


class Piece(torch.nn.Module):
    def forward(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(hidden @ weight) * 3


@pytest.mark.slow
def test_a_compiled_package_runs_from_a_store_that_was_moved(tmp_path: Path) -> None:
    examples = (torch.arange(8.0).view(2, 4), torch.linspace(-1, 1, 20).view(4, 5))
    exported = torch.export.export(Piece(), examples, dynamic_shapes=({0: torch.export.Dim.DYNAMIC}, None))
    package = tmp_path / "compiled.pt2"
    torch._inductor.aoti_compile_and_package(exported, package_path=str(package))
    model = make_model(tmp_path / "packages", pieces=("head",))
    model = replace(model, packages={model.plan.head.piece: package}, constants={"weight": examples[1]})
    GraphStore(tmp_path / "store").save(make_key(), model)
    package.unlink()
    (tmp_path / "store").rename(tmp_path / "moved")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", RUN, str(tmp_path / "moved")]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    result = torch.tensor(json.loads(output))
    torch.testing.assert_close(result, Piece()(torch.arange(12.0).view(3, 4), examples[1]))
