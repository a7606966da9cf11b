"""A CUDA GPU as a device: Triton attention and sampling, CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from compiled_engine.compile.graphs.cuda import CudaGraphBackend
from compiled_engine.compile.store_checks import check_access
from compiled_engine.compile.store_files import make_folder, make_parents
from compiled_engine.config import default_kernel_folder
from compiled_engine.context import StaticForwardContext
from compiled_engine.errors import ConfigError
from compiled_engine.ops.attention import AttentionSpec
from compiled_engine.runners.gpus import find_gpu

if TYPE_CHECKING:
    from compiled_engine.config import EngineConfig
    from compiled_engine.ops.triton.attention import TritonAttention
    from compiled_engine.runners.graph_sampler import GraphSampler

# Longest sequences of which one program per KV head reads all cached tokens without being much slower than many.
_SHORT_SEQ_LEN = 1024


class CudaDevice:
    """A ``Device``. Raises ``ConfigError`` where the GPU that ``config`` names, or Triton, is missing."""

    def __init__(self, config: EngineConfig, dtype: torch.dtype) -> None:
        self.torch_device = find_gpu(config.device)
        self._dtype = dtype
        self._memory_fraction = config.gpu_memory_fraction
        torch.cuda.set_device(self.torch_device)
        self._properties = torch.cuda.get_device_properties(self.torch_device)
        if dtype is torch.bfloat16 and self._properties.major < 8 and torch.version.hip is None:
            raise ConfigError(f"dtype is bfloat16, and {self._properties.name} has no bfloat16: use float16 or float32")
        if config.quantization is not None:
            raise ConfigError(
                f"quantization is {config.quantization!r}: quantised weights run on device='cpu' only; leave it out"
            )
        self._block_size = config.block_size
        _check_triton()
        if config.store:
            _use_stored_kernels()

    def attention_backend(self, layers: Sequence[AttentionSpec]) -> TritonAttention:
        """See ``Device``. Compiles the kernels of all layers, or finds them in the store."""
        from compiled_engine.ops.triton.attention import TritonAttention, attention_variants

        for layer in layers:
            for variant in attention_variants(layer, layer.cache_spec(self._block_size, self._dtype), self._dtype):
                variant.compile()
        return TritonAttention(layers, self._dtype, self.torch_device, self._properties.multi_processor_count)

    def graph_backend(self, static_context: StaticForwardContext) -> CudaGraphBackend:
        """See ``Device``."""
        return CudaGraphBackend(static_context, self.torch_device)

    def sampler(self, vocab_size: int, max_rows: int, dtype: torch.dtype) -> GraphSampler:
        """See ``Device``."""
        from compiled_engine.ops.triton.sampling import sampling_variants
        from compiled_engine.runners.graph_sampler import GraphSampler

        for variant in sampling_variants(vocab_size, (dtype,)):
            variant.compile()
        return GraphSampler(vocab_size, max_rows, dtype, self.torch_device)

    def max_seq_len_buckets(self, max_model_len: int) -> tuple[int, ...]:
        """See ``Device``. Only longer sequences are worth splitting."""
        return tuple(sorted({min(_SHORT_SEQ_LEN, max_model_len), max_model_len}))

    def prepare_step(self, num_tokens: int) -> None:
        """See ``Device``. Which device is current is a matter of each thread, and Triton launches on that one."""
        torch.cuda.set_device(self.torch_device)

    def free_memory(self) -> int:
        """See ``Device``. What the process may take in all, less what is in use on the GPU."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return max(0, int(total * self._memory_fraction) - (total - free))

    def default_cache_memory(self, free: int) -> int | None:
        """See ``Device``. All that is left is for caches."""
        return free

    def reset_peak(self) -> None:
        """See ``Device``."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_above_current(self) -> int:
        """See ``Device``."""
        torch.cuda.synchronize(self.torch_device)
        peak = torch.cuda.max_memory_allocated(self.torch_device)
        return max(0, peak - torch.cuda.memory_allocated(self.torch_device))


def _use_stored_kernels() -> None:
    """Let Triton find and keep its kernels beside the stored graphs. Raises ``StoreAccessError``."""
    from compiled_engine.ops.triton.kernel_cache import use_kernel_cache

    folder = default_kernel_folder() / "triton"
    make_parents(folder.parent.parent)
    for part in (folder.parent.parent, folder.parent, folder):
        make_folder(part)
        check_access(part, part.lstat())
    use_kernel_cache(folder)


def _check_triton() -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ConfigError("device is a GPU, which needs Triton: pip install 'compiled-engine[gpu]'") from error
