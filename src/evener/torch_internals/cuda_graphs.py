"""Private names for CUDA graphs: what a recording that fails leaves behind.

- ``torch.cuda.graph`` ends a recording by ``CUDAGraph.capture_end``. If an operation has made the recording invalid,
  that raises before the random generator and the allocator have heard of the end. From then on every random operation
  of the process fails ("Offset increment outside graph capture"), and the allocator never takes back memory that
  another stream has used. The generator forgets it with a copy of its state, for which there are public names:
  ``Generator.clone_state`` and ``graphsafe_set_state``. The allocator is told by ``torch._C._cuda_endAllocateToPool``,
  for which there is none. It raises if the allocator has heard already.

Tested with torch 2.11, 2.13.
On a GPU with 2.11 alone.
"""

from __future__ import annotations

from typing import Any

import torch


def end_failed_recording(device: torch.device, pool: Any) -> None:
    """Tells the random generator and the allocator of ``device`` that nothing is recorded to ``pool`` any more."""
    number = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[number]
    generator.graphsafe_set_state(generator.clone_state())
    try:
        torch._C._cuda_endAllocateToPool(number, pool)
    except (AttributeError, RuntimeError):
        return  # the allocator has heard already, or this PyTorch has another name for it
