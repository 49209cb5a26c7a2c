"""What is said of a failure is where the runs part first, and the cause only as far as it can be told."""

from __future__ import annotations

import pytest

from tests.tools.verify.runs import compared, run, scaled, vector

PENALTY = {"fc.weight": vector(0.5, -0.25), "key": vector(0.125)}


def test_replicas_that_differ() -> None:
    assert "the replicas differ" in compared(scaled(0.5), run(digest="other")).hint


def test_statistics_of_each_rank() -> None:
    hint = compared(scaled(0.5), batch_norm="local").hint
    assert "batch_norm=local has BatchNorm normalize by each rank's own samples" in hint


def test_dropouts_of_torch() -> None:
    assert "2 modules with dropout of torch.nn" in compared(scaled(0.5), reference=run(drawing_apart=2)).hint


def test_runs_of_different_length() -> None:
    assert compared(run(losses=[1.0])).hint == "one device took 2 steps, the divided run 1"


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1 / 2, "0.5 times those of one device; averaged over 2 ranks instead of summed?"),
        (2.0, "2 times those of one device; counted 2 times?"),
        (1.25, "1.25 times those of one device"),
    ],
)
def test_gradients_that_are_all_off_by_one_factor(factor: float, words: str) -> None:
    found = compared(scaled(factor), run()).hint
    assert found.startswith(
        "the loss of step 0 agrees, but not its gradients, so look at how they are exchanged"
    )
    assert found.endswith(f"all of them are {words}")
    assert "in step 1" not in found


def test_gradients_that_are_wrong_from_a_later_step_on() -> None:
    assert compared(scaled(2.0, steps=[1])).hint.startswith(
        "the loss of step 1 agrees, but not its gradients"
    )


def test_the_factor_is_that_of_the_gradients_without_the_penalty() -> None:
    reference = run(penalty=PENALTY)
    gradients = [
        {name: (value - PENALTY[name]) / 2 + PENALTY[name] for name, value in run().gradients[0].items()},
        run().gradients[1],
    ]
    assert "all of them are 0.5 times" in compared(run(gradients=gradients), run(), reference=reference).hint


def test_a_penalty_that_counts_once_a_rank() -> None:
    first = {name: value + 2 * PENALTY[name] for name, value in run().gradients[0].items()}
    divided = run(gradients=[first, run().gradients[1]])
    found = compared(divided, divided, divided, reference=run(penalty=PENALTY)).hint
    assert "they differ by 2 times the gradient of the task's penalty" in found
    assert "each of the 3 ranks" in found
    assert "penalty" not in compared(divided).hint


def test_one_wrong_gradient_is_named() -> None:
    wrong = [sketches | {"fc.weight": sketches["fc.weight"].flip(0)} for sketches in run().gradients]
    assert compared(run(gradients=wrong)).hint.endswith("the largest differences are in fc.weight")


def test_an_absent_gradient_is_named() -> None:
    without = [{"key": sketches["key"]} for sketches in run().gradients]
    assert compared(run(gradients=without)).hint.endswith("fc.weight got none")
    reference = run(gradients=without)
    found = compared(run(), reference=reference, disturbed=(reference,)).hint
    assert found.endswith("fc.weight got one, but not on one device")


def test_a_forward_pass_that_differs_names_what_can_be_to_blame() -> None:
    other = run(losses=[1.5, 0.75])
    assert "in step 0 the loss is 1.5, on one device 1, before any gradient" in compared(other).hint
    assert "a loss that compares samples" in compared(other).hint
    assert "look at the loss's `count`" in compared(other, own_loss=True).hint
    assert "depends on the order of a batch's samples" in compared(other, reordered=False, own_loss=True).hint


def test_a_wrong_statistic_is_named_before_the_loss() -> None:
    other = run(losses=[1.1, 0.6], buffers={"mean": vector(0.6)})
    assert "the first buffer to differ is mean" in compared(other, own_loss=True).hint


def test_a_wrong_update_is_told_by_the_next_loss() -> None:
    found = compared(run(losses=[1.0, 0.6]), own_loss=True).hint
    assert "look at the update of step 0" in found
    assert "count" not in found


def test_what_differs_at_the_end_alone() -> None:
    weights = run().weights
    last = compared(run(weights=weights | {"fc.weight": vector(1.0, 2.5)})).hint
    assert "the weights of fc.weight at the end: look at the update" in last
    buffers = compared(run(weights=weights | {"mean": vector(2.0)})).hint
    assert "not the buffers mean" in buffers


def test_codes_of_other_blocks() -> None:
    """Where the first step agrees: codes are made in its update."""
    weights = {name: value + 0.1 for name, value in run().weights.items()}
    losses = [run().losses[0], run().losses[1] + 0.1]
    words = "ranks that hold pieces of a weight have other rows than one device"
    assert words in compared(run(other_blocks=True, losses=losses, weights=weights)).hint
    assert words not in compared(run(losses=losses, weights=weights)).hint
    assert words not in compared(scaled(0.5, other_blocks=True)).hint
