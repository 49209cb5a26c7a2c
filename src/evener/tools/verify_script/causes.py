"""Describes the first difference between two runs and its likely cause, in words."""

from __future__ import annotations

import math

from evener.tools.verify.hints import common_factor, listed
from evener.tools.verify_script.comparison import Parting, ScriptRuns, gradients_part, values_part
from evener.tools.verify_script.events import Event, Record, ScriptLine, What

_ALIKE = 0.01
"""Relative tolerance for factors, and for the part of a difference that a factor leaves unexplained."""
_DIVIDED = (
    "ranks have only their own samples: a prepared loss and evener.global_mean give the number of all, and "
    "evener.gather the rows, evener.batch_size() how many there are"
)
_OWN_GRAD = (
    "torch.autograd.grad gives a gradient of this rank's samples, which is summed where it is asked for one of a "
    "prepared loss: call what evener.prepare returned. An inner step, whose graph is wanted (create_graph), takes "
    "samples that all ranks have"
)


def line_of(runs: ScriptRuns, parting: Parting) -> ScriptLine:
    """Returns the line to report, usually that of the event. If the difference follows from a ``torch.autograd.grad``
    of a rank's own samples, it is the line of that call. If a gradient differs and no backward pass computed it, it is
    the line of the call of ``torch.autograd.grad`` that did.
    """
    own = _own_grad(runs, parting)
    if own is not None:
        return own.line
    if parting.kind == "gradient":
        before = _since_last_step(runs.reference, parting.event)
        if not any(event.what is What.BACKWARD for event in before):
            return next((event.line for event in before if event.what is What.GRAD), parting.line)
    return parting.line


def difference(runs: ScriptRuns, parting: Parting) -> str:
    """Describes what differs, as a sentence without its beginning."""
    return {
        "course": _course,
        "samples": _samples,
        "shape": _shape,
        "loss": _value,
        "backward": _value,
        "grad": _value,
        "gradient": _gradient,
        "printed": _printed,
    }.get(parting.kind, _tensors)(runs, parting)


def cause(runs: ScriptRuns, parting: Parting) -> str:
    """Describes what to look at."""
    explain = {
        "course": _cause_of_course,
        "samples": _cause_of_samples,
        "shape": _cause_of_shape,
        "loss": _cause_of_loss,
        "backward": _cause_of_backward,
        "grad": lambda *_: _OWN_GRAD,
        "gradient": _cause_of_gradient,
        "printed": _cause_of_text,
        "replicas": _cause_of_replicas,
    }
    return explain.get(parting.kind, _cause_of_tensors)(runs, parting)


# What differs


def _course(runs: ScriptRuns, parting: Parting) -> str:
    return f"rank {parting.rank} comes to {parting.texts[1]}, one device to {parting.texts[0]}"


def _samples(runs: ScriptRuns, parting: Parting) -> str:
    number = sum(event.what is What.BATCH for event in runs.reference.events[: parting.event])
    return f"batch {number} has other samples than on one device"


def _shape(runs: ScriptRuns, parting: Parting) -> str:
    a, b = runs.reference.events[parting.event], runs.divided[parting.rank].events[parting.event]
    if a.what is What.LOSS:
        return f"the loss has {b.dims} dimensions on ranks, and {a.dims} on one device"
    return "the optimizer has other parameters than on one device"


def _value(runs: ScriptRuns, parting: Parting) -> str:
    values = [run.events[parting.event].value for run in runs.divided]
    shown = f"{values[0]:.9g} on all ranks"
    if any(value != values[0] for value in values) and not all(map(math.isnan, values)):
        shown = ", ".join(f"{value:.9g} on rank {rank}" for rank, value in enumerate(values))
    kinds = {"loss": "the loss", "grad": "the value whose gradient is asked for"}
    what = kinds.get(parting.kind, "the value that is back-propagated")
    return f"{what} is {runs.reference.events[parting.event].value:.9g} on one device, and {shown}"


def _gradient(runs: ScriptRuns, parting: Parting) -> str:
    backward = [event.line for event in _since_last_step(runs.reference, parting.event)]
    lines = ", ".join(dict.fromkeys(line.described for line in backward))
    since = f", left by {lines}" if lines else ""
    how = "ranks have different ones" if _parted_ranks(runs, parting) else "ranks agree on another one"
    return f"the gradient of {listed(list(parting.names))} differs before the update{since}: {how}"


def _printed(runs: ScriptRuns, parting: Parting) -> str:
    return f"one device prints {parting.texts[0]!r}, and rank 0 {parting.texts[1]!r}"


def _tensors(runs: ScriptRuns, parting: Parting) -> str:
    if parting.kind == "replicas":
        return f"the bits of {listed(list(parting.names))} are not the same on ranks 0 and {parting.rank}"
    is_end = parting.event == len(runs.reference.events)
    is_batch = not is_end and runs.reference.events[parting.event].what is What.BATCH
    when = "at the end" if is_end else "after the batch before" if is_batch else "after the update"
    return f"{listed(list(parting.names))} differs {when}"


# Likely causes


def _cause_of_course(runs: ScriptRuns, parting: Parting) -> str:
    return (
        f"something that decides it is a rank's own number, or was drawn on each rank by itself; {_DIVIDED}"
    )


def _cause_of_samples(runs: ScriptRuns, parting: Parting) -> str:
    return (
        "the order of the samples is drawn from another state of the generator: look for torch.manual_seed after "
        "evener.prepare, for a sampler that draws from a generator of its own, and for random numbers that are drawn "
        "on one device from the generator from which the order comes"
    )


def _cause_of_shape(runs: ScriptRuns, parting: Parting) -> str:
    return (
        "a loss of each sample (reduction='none') is not the mean that ranks are given; multiply by weights within "
        "the loss, or give evener.global_mean the weighted mean and the sum of the weights"
    )


def _cause_of_loss(runs: ScriptRuns, parting: Parting) -> str:
    if _own_grad(runs, parting) is not None:
        return _OWN_GRAD
    norms = runs.divided[0].norms
    if norms:
        return (
            f"{norms} BatchNorm layers of models that were not prepared computed in training mode, from each rank's "
            "own samples: give evener.prepare such a model too, as a teacher, or call its eval()"
        )
    if runs.divided[0].dropouts or runs.reference.events[parting.event].drew:
        return _of_drawing(runs)
    if any(event.what is What.STEP for event in runs.reference.events[: parting.event]):
        return (
            f"{_padding(runs, parting)}all events before agree, so look at what changed the weights or the samples "
            "since the last update, at a queue or a memory of earlier rows, which must be those of all ranks "
            "(evener.gather), and at losses that only later batches bring out: tokens that are padding, masks that are "
            "empty"
        )
    return (
        f"{_padding(runs, parting)}the forward pass or the loss: is it a mean over all its terms, such as tokens that "
        "are not padding, of which evener.loss or evener.global_mean(value, count) says the number? What is computed "
        "over the batch dimension needs the rows of all ranks (evener.gather): mean and std that normalize inputs or "
        "advantages, flip, roll and randperm that mix them, a queue of rows, a loss or layer that compares them with "
        "each other. A second model in training mode, as a teacher, is to be prepared too, or in eval(). Buffers that "
        "the forward pass writes, as the observers of quantization do, hold what a rank saw"
    )


def _padding(runs: ScriptRuns, parting: Parting) -> str:
    """Returns a text if a tensor of the current batch has another length on a rank, besides another number of samples;
    else an empty string.
    """
    for number in reversed(range(parting.event)):
        alone = runs.reference.events[number]
        if alone.what is What.BATCH:
            break
    else:
        return ""
    for rank, run in enumerate(runs.divided):
        for whole, part in zip(alone.sizes, run.events[number].sizes, strict=False):
            if sum(a != b for a, b in zip(whole, part, strict=False)) > 1:
                return (
                    f"a tensor of the batch has the sizes {_by(whole)} on one device and {_by(part)} on rank {rank}: a "
                    "collate function pads to the longest sample of a rank's share. A model that reads the padding "
                    "computes something else then: pad all batches to one length, or mask the padding. If that is "
                    "done, "
                )
    return ""


def _by(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _of_drawing(runs: ScriptRuns) -> str:
    dropouts = runs.divided[0].dropouts
    what = (
        f"the model has {dropouts} modules with dropout of torch.nn, which"
        if dropouts
        else "numbers drawn there"
    )
    return (
        f"random numbers: {what} draw for each rank's samples by themselves, and not what one device draws for the "
        "whole batch; evener.nn.Dropout and evener.draw do. Nothing may be wrong with the sums: verify without them, "
        "or with these"
    )


def _cause_of_backward(runs: ScriptRuns, parting: Parting) -> str:
    event = runs.reference.events[parting.event]
    if event.drew and _parted_ranks(runs, parting):
        return _of_drawing(runs)
    if _parted_ranks(runs, parting):
        return (
            "a term, a factor or a divisor of it is of each rank's own samples, and went through no prepared loss: say "
            "evener.global_mean(term) of a mean over samples; divide by evener.batch_size(), not by len(x)"
        )
    return "prepared losses before it agree, so look at what is computed from them on this line"


def _cause_of_gradient(runs: ScriptRuns, parting: Parting) -> str:
    events = _since_last_step(runs.reference, parting.event)
    if any(event.what is What.GRAD for event in events):
        return _OWN_GRAD
    if _parted_ranks(runs, parting):
        return (
            "it is of each rank's own samples and was not summed when backward() ended: was the parameter there, with "
            "requires_grad, when evener.prepare was called? Was its .grad assigned, or clipped by a rank's own number?"
        )
    return (
        f"{_factor(runs, parting)}look for a hook (register_hook) that clamps or scales each rank's part, for a value "
        "that is no sum over samples (a mean over words, taken for one over sentences), and for layers that mix samples"
    )


def _factor(runs: ScriptRuns, parting: Parting) -> str:
    """Returns a text if all differing gradients are the same multiple of those of one device; else an empty string."""
    reference = runs.reference.events[parting.event].gradients
    divided = runs.divided[parting.rank].events[parting.event].gradients
    pairs = [(divided[n], reference[n]) for n in parting.names if n in reference and n in divided]
    factor = common_factor(pairs) if len(pairs) == len(parting.names) else None
    return "" if factor is None else f"they are {factor:.6g} times those of one device; "


def _cause_of_text(runs: ScriptRuns, parting: Parting) -> str:
    return (
        "losses, gradients and weights before it agree: the training is right, and the number that is printed of it is "
        f"rank 0's own. {_DIVIDED[0].upper()}{_DIVIDED[1:]}; a sum over batches such as "
        "`total += loss.item() * len(x)` counts a rank's own samples"
    )


def _cause_of_replicas(runs: ScriptRuns, parting: Parting) -> str:
    rates = [run.events[parting.event : parting.event + 1] for run in runs.divided]
    shown = [event.rates for events in rates for event in events]
    if any(rate != shown[0] for rate in shown):
        listed_rates = ", ".join(f"{_rates_of(rate)} on rank {rank}" for rank, rate in enumerate(shown))
        return f"the learning rate is {listed_rates}: it depends on a rank's own samples, and must not; {_DIVIDED}"
    if _own_grad(runs, parting) is not None:
        return _OWN_GRAD
    return "the ranks hold different weights, though rounding explains the difference: all must get the same update"


def _cause_of_tensors(runs: ScriptRuns, parting: Parting) -> str:
    if parting.kind == "buffer":
        return (
            "weights agree: look at what writes this buffer, from samples of one rank, or once a rank, as BatchNorm "
            "does in a forward pass of the same input on all ranks"
        )
    if _own_grad(runs, parting) is not None:
        return _OWN_GRAD
    events = [run.events[parting.event : parting.event + 1] for run in (runs.reference, *runs.divided)]
    alone, *ranks = (event.rates for found in events for event in found) if all(events) else ((),)
    other = next((rate for rate in ranks if not _alike(alone, rate)), None)
    if other is not None:
        return f"the learning rate is {_rates_of(alone)} on one device, and {_rates_of(other)} on a rank; {_DIVIDED}"
    return (
        "gradients before the update agree: look at the optimizer, its groups and learning rates, and at what else "
        "writes into weights (averages, clamps, noise, a layer that is made anew)"
    )


def _rates_of(rates: tuple[float, ...]) -> str:
    return " and ".join(f"{rate:.9g}" for rate in dict.fromkeys(rates))


def _alike(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    close = (math.isclose(x, y, rel_tol=_ALIKE) or math.isnan(x) for x, y in zip(a, b, strict=False))
    return len(a) == len(b) and all(close)


def _own_grad(runs: ScriptRuns, parting: Parting) -> Event | None:
    """Returns the first call of ``torch.autograd.grad`` since the previous update that asks for gradients of weights
    and whose value differs between ranks. Returns None if there is none.
    """
    found = None
    if parting.kind in ("course", "samples", "printed"):
        return None
    for number in reversed(range(parting.event)):
        event = runs.reference.events[number]
        first, *others = (run.events[number] for run in runs.divided)
        if event.what is What.GRAD and any(values_part(first, one) for one in others):
            found = event
        if event.is_update:
            break
    return found


def _since_last_step(record: Record, event: int) -> list[Event]:
    """Returns the backward passes and calls of ``torch.autograd.grad`` between the previous optimizer step and
    ``event``.
    """
    found: list[Event] = []
    for each in reversed(record.events[:event]):
        if each.what is What.STEP:
            break
        if each.what in (What.BACKWARD, What.GRAD):
            found.insert(0, each)
    return found


def _parted_ranks(runs: ScriptRuns, parting: Parting) -> bool:
    """Returns True if the ranks differ from each other."""
    first, *others = (run.events[parting.event] for run in runs.divided)
    if parting.kind in ("loss", "backward"):
        return any(values_part(first, other) for other in others)
    return any(gradients_part(first, other, name) for other in others for name in parting.names)
