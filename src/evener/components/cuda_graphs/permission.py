"""Whether a run may use CUDA graphs, decided from facts that are known when it is set up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunFacts:
    """What decides. A text is empty, and a flag False, where there is nothing of the kind."""

    device: str
    """The type of device."""
    records: bool
    """True if operations of such a device can be recorded."""
    strategy: str
    divides_batches_only: bool
    """True if the strategy runs forward and backward of the whole model on each rank, one after the other."""
    several_passes: bool
    """True if steps may be repeated or cut by free memory."""
    updates_in_backward: bool
    bits: bool
    """True if the run is exact in bits."""
    recompute: bool
    offload: str
    compiles: bool
    communicates: str
    """The name of a layer that communicates in forward."""
    of_samples: str
    """The name of a layer that draws random numbers by the samples."""
    hooked: str
    """The name of a module with hooks."""
    sparse: str
    """The name of a parameter with sparse gradients."""


def reason_against(facts: RunFacts) -> str:
    """Returns why a run cannot use CUDA graphs, with the way out if there is one; "" if it can."""
    reasons = (
        (not facts.records, f"a device of type {facts.device} has none"),
        (facts.bits, "exact=bits runs grain by grain"),
        (facts.several_passes, "micro_batch=auto and memory_limit may repeat a pass in smaller pieces"),
        (facts.updates_in_backward, "update_in_backward updates the weights within a pass"),
        (
            not facts.divides_batches_only,
            f"strategy {facts.strategy!r} runs passes in another way than single and ddp",
        ),
        (facts.recompute, "recompute runs Python in backward"),
        (bool(facts.offload), f"offload {facts.offload} copies to the host within a pass"),
        (
            facts.compiles,
            "with compile, compile_mode=reduce-overhead records graphs of the compiled code instead",
        ),
        (
            bool(facts.communicates),
            f"layer {facts.communicates} communicates with other ranks in forward; a BatchNorm does not with "
            "batch_norm=local, which is another training",
        ),
        (
            bool(facts.of_samples),
            f"layer {facts.of_samples} draws random numbers by the samples; nn.Dropout draws the device's",
        ),
        (bool(facts.hooked), f"layer {facts.hooked} has hooks, which a replay would not call"),
        (bool(facts.sparse), f"the gradients of {facts.sparse} are sparse"),
    )
    return next((words for holds, words in reasons if holds), "")
