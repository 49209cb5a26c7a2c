"""The trials of the conformance test of a strategy: what is promised, and how each promise is tried."""

from __future__ import annotations

from evener.tools.conformance.harness import (
    StrategyTrial,
    by_hand,
    close,
    evaluate,
    fail,
    from_one,
    into_one,
    predict,
    train,
)

SUMS = "gradients are sums over all samples, whatever the shares: weights are those of one device"
TRIALS: tuple[StrategyTrial, ...] = (
    StrategyTrial("plain", SUMS, train, settings={"balance": "uneven"}),
    StrategyTrial("idle", "a rank without samples counts for nothing", train, settings={"balance": "idle"}),
    StrategyTrial("tiny", "a batch may have fewer samples than there are ranks", train, "tiny"),
    StrategyTrial(
        "batch_norm",
        "BatchNorm normalizes by the samples of all ranks",
        train,
        "batch_norm",
        {"balance": "uneven"},
    ),
    StrategyTrial(
        "batch_norm",
        "BatchNorm normalizes by the samples of all ranks where one has few or none",
        train,
        "batch_norm_of_few",
    ),
    StrategyTrial(
        "tokens",
        "a mean over tokens is that of all ranks and micro-batches",
        train,
        "tokens",
        {"balance": "uneven", "micro_batch": 4},
    ),
    StrategyTrial(
        "accumulation",
        "gradients of micro-batches add up, also where a rank has more of them than another",
        train,
        "tied",
        {"balance": "uneven", "micro_batch": 4},
    ),
    StrategyTrial("tied", "a weight under two names is one weight", train, "tied"),
    StrategyTrial(
        "clip",
        "gradients are clipped by the norm of the sum over all ranks",
        train,
        settings={"clip_norm": 0.05, "balance": "uneven"},
    ),
    StrategyTrial(
        "unused",
        "a parameter has a gradient if any rank's samples gave it one, and else none",
        train,
        "unused",
        {"balance": "uneven"},
    ),
    StrategyTrial(
        "unused",
        "a parameter has a gradient if any micro-batch of any rank gave it one, and else none",
        train,
        "unused",
        {"micro_batch": 3},
    ),
    StrategyTrial("penalty", "a penalty counts once, and not once for each rank", train, "penalty"),
    StrategyTrial("dropout", "a sample's dropout is the same wherever it is computed", train, "dropout"),
    StrategyTrial(
        "several", "inputs and outputs may be several, and None", train, "several", {"balance": "uneven"}
    ),
    StrategyTrial("sparse", "sparse gradients are summed too", train, "sparse", {"balance": "uneven"}),
    StrategyTrial(
        "buffers",
        "buffers that a forward pass writes are the same on all ranks",
        train,
        "buffers",
        has_reference=False,
    ),
    StrategyTrial(
        "by_hand",
        "a loop of the user's own takes the same steps",
        by_hand,
        "unused",
        {"balance": "uneven", "clip_norm": 0.5},
    ),
    StrategyTrial(
        "evaluation", "an evaluation counts each sample once", evaluate, settings={"balance": "uneven"}
    ),
    StrategyTrial("prediction", "predictions come in the order of the samples", predict),
    StrategyTrial(
        "checkpoint",
        "one device goes on from a checkpoint of the ranks",
        into_one,
        "batch_norm",
        {"balance": "uneven"},
    ),
    StrategyTrial("checkpoint", "the ranks go on from a checkpoint of one device", from_one, "batch_norm"),
    StrategyTrial(
        "matrices",
        "an optimizer that looks at whole weights updates each as one device does",
        train,
        "matrices",
        {"balance": "uneven", "clip_norm": 0.5},
    ),
    StrategyTrial("matrices", "one device goes on with the state of such an optimizer", into_one, "matrices"),
    StrategyTrial(
        "matrices",
        "the ranks go on with the state that such an optimizer had on one device",
        from_one,
        "matrices",
    ),
    StrategyTrial(
        "average",
        "an average of the weights is that of one device, and so is its evaluation",
        evaluate,
        "averaged",
        {"balance": "uneven"},
    ),
    StrategyTrial("average", "one device goes on with an average that ranks began", into_one, "averaged"),
    StrategyTrial("average", "the ranks go on with an average that one device began", from_one, "averaged"),
    StrategyTrial(
        "error", "an error names the rank whose loss is not a number", fail, "broken", {"what": "loss"}, False
    ),
    StrategyTrial(
        "error",
        "an error names the rank whose gradient is not a number",
        fail,
        "broken",
        {"what": "gradient"},
        False,
    ),
    StrategyTrial(
        "close", "close() gives everything back, and may be called twice", close, has_reference=False
    ),
)
"""All trials in the order in which they run: promises that others depend on come first."""

NAMES = tuple(dict.fromkeys(trial.name for trial in TRIALS))
