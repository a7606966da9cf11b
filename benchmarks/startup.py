"""Start-up: from the start of a process to the first token, warm and cold, beside ``import torch`` alone.

Every figure is the wall time of a whole process. Warm starts alternate with ``python -c "import torch"``, because the
import is what no engine on torch can be faster than; the ratio of medians is what counts. The cold start begins with an
empty store and empty compiler caches, and is measured once.

    python benchmarks/startup.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

FIRST_TOKEN = """
import sys
from compiled_engine import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype="float32", max_model_len=1024)
llm.generate(["What is the capital of France?"], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
print(llm.ledger, file=sys.stderr)
"""


def seconds(command: list[str], environment: dict[str, str]) -> tuple[float, str]:
    """Wall seconds of a process that must succeed, and its standard error."""
    start = time.perf_counter()
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    elapsed = time.perf_counter() - start
    if result.returncode:
        raise SystemExit(f"{' '.join(command[:2])} failed:\n{result.stderr}")
    return elapsed, result.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder (default: the default model)")
    parser.add_argument("--rounds", type=int, default=5, help="alternating pairs (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    from compiled_engine.models import find_model

    folder = str(find_model(options.model).folder)
    with tempfile.TemporaryDirectory(prefix="startup_") as cache:
        environment = os.environ | {
            "COMPILED_ENGINE_CACHE": f"{cache}/engine",
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        }
        engine = [sys.executable, "-c", FIRST_TOKEN, folder]
        torch_alone = [sys.executable, "-c", "import torch"]
        cold, cold_ledger = seconds(engine, environment)
        print(f"cold start to first token: {cold:.1f} s\n{cold_ledger}")
        warm, imports, ledger = [], [], ""
        for number in range(options.rounds):
            imports.append(seconds(torch_alone, environment)[0])
            elapsed, ledger = seconds(engine, environment)
            warm.append(elapsed)
            print(f"round {number + 1}: import torch {imports[-1]:.2f} s, warm start {warm[-1]:.2f} s")
    ratio = median(warm) / median(imports)
    print(f"{ledger}\nmedians: import torch {median(imports):.2f} s, warm start to first token {median(warm):.2f} s")
    print(f"ratio {ratio:.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps({"cold_s": cold, "warm_s": warm, "import_torch_s": imports, "ratio": ratio}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
