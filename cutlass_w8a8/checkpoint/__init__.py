"""Checkpoints in the compressed-tensors format, as llm-compressor writes and vLLM reads them: W8A8, int8 and fp8.

    from cutlass_w8a8.checkpoint import load_, save

    load_(model, "folder")  # model has the float architecture, possibly on the meta device

Needs the packages of the extra ``checkpoints``.
"""

from cutlass_w8a8.checkpoint.load import load_
from cutlass_w8a8.checkpoint.read import Checkpoint
from cutlass_w8a8.checkpoint.save import save

__all__ = ["Checkpoint", "load_", "save"]
