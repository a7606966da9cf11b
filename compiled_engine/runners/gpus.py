"""Which GPU a setting means, if any."""

from __future__ import annotations

import torch

from compiled_engine.errors import ConfigError


def find_gpu(name: str) -> torch.device:
    """The GPU that ``name``, cuda or cuda:N, means. Raises ``ConfigError`` where it is not there, with the way out."""
    way_out = "use device='cpu', or a machine with a GPU, its driver and a CUDA build of torch"
    if not torch.cuda.is_available():
        build = (
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else (f"torch {torch.__version__} is a build without CUDA")
        )
        raise ConfigError(f"device is {name!r}, and there is no GPU to be used here ({build}): {way_out}")
    index = int(name.partition(":")[2] or torch.cuda.current_device())
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, and torch sees {torch.cuda.device_count()} GPU(s): {way_out}")
    return torch.device("cuda", index)


def check_toolkit() -> None:
    """Raise ``ConfigError`` where ahead-of-time compiling for a GPU cannot work: it needs NVIDIA's compiler."""
    from torch.utils import cpp_extension

    if torch.version.cuda is not None and cpp_extension.CUDA_HOME is None:
        raise ConfigError(
            "piece_compiler is 'aoti', which compiles for a GPU with the CUDA toolkit, and neither nvcc nor $CUDA_HOME "
            "is there: install the toolkit, use piece_compiler='inductor', or run from precompiled graphs"
        )
