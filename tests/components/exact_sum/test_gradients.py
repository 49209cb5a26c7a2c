"""Sums of blocks in random orders and groupings: one result to the bit, and none of float32's errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from evener.components.exact_sum import grid, workspace
from evener.components.exact_sum.gradients import ExactGradients
from evener.errors import ConfigurationError

CPU = torch.device("cpu")
Blocks = Sequence[dict[str, Tensor]]


def rank_of(blocks: Blocks, unit: int) -> ExactGradients:
    own = ExactGradients({name: torch.empty_like(tensor) for name, tensor in blocks[0].items()}, CPU)
    own.load_state_dict({"units": dict.fromkeys(blocks[0], unit)})
    return own


def summed(
    blocks: Blocks, division: Sequence[Sequence[int]], unit: int
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The sum of the blocks over ranks that each have some of them, and the next units. Ranks with an odd number of
    blocks give the last one with the message."""
    names, ranks, flats = list(blocks[0]), [rank_of(blocks, unit) for _ in division], list[Tensor]()
    for own, places in zip(ranks, division, strict=True):
        late = len(places) % 2
        for place in places[: len(places) - late]:
            own.add(blocks[place])
        flats.append(own.packed(names, blocks[places[-1]] if late else None))
    flat = torch.stack(flats).sum(0)
    found = {name: torch.empty_like(tensor) for name, tensor in blocks[0].items()}
    limbs: list[list[Tensor]] = []
    for own in ranks:
        limbs.append([])
        own.unpack(flat, found)
        own.finish(limbs[-1].append)
    counts = dict(zip(names, flat[-len(names) :].tolist(), strict=True))
    more = [name for name, count in counts.items() if grid.is_unusual(count)]
    for name, digits in zip(more, zip(*limbs, strict=True), strict=True):
        least = unit if grid.is_wide(counts[name]) else grid.unit_below(unit)
        found[name].copy_(grid.folded(torch.stack(digits).sum(0), least))
    ranks[0].commit()
    return found, ranks[0].state_dict()["units"]


def divisions(count: int, number: int, seed: int) -> list[list[list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(number):
        ranks: list[list[int]] = [[] for _ in range(int(torch.randint(1, 6, (), generator=generator)))]
        for place in torch.randperm(count, generator=generator).tolist():
            ranks[int(torch.randint(len(ranks), (), generator=generator))].append(place)
        made.append(ranks)
    return made


def wild(number: int, scale: float, seed: int) -> Blocks:
    """Gradients over ten orders of magnitude, denormal ones among them, that cancel in part."""
    generator = torch.Generator().manual_seed(seed)
    drawn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    blocks = []
    for block in range(number):
        wide = drawn(40) * 10.0 ** (2 * drawn(40)) * scale
        blocks.append(
            {"wide": wide, "odd": drawn(3, 5) * scale, "none": torch.zeros(2), "tiny": drawn(4) * 1e-42}
        )
        if block % 2:
            blocks[-1]["odd"] = -blocks[-2]["odd"] * (1 + 1e-6)
    return blocks


@pytest.mark.parametrize("unit", [-56, -100, -200, -20])
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e12, 1e30])
def test_divisions_and_orders_give_one_sum(scale: float, unit: int) -> None:
    blocks = wild(9, scale, seed=1)
    first, units = summed(blocks, [list(range(9))], unit)
    for division in divisions(9, 25, seed=2):
        found, then = summed(blocks, division, unit)
        assert then == units
        for name, total in found.items():
            assert torch.equal(total, first[name]), name
            assert not (total.signbit() & (total == 0)).any(), "a zero has one sign"


def test_a_hundred_thousand_orders_and_groupings_give_one_sum() -> None:
    """The grid alone, for which many orders can be added up at once."""
    generator = torch.Generator().manual_seed(3)
    drawn = lambda: torch.randn(64, 7, generator=generator, dtype=torch.float64)  # noqa: E731
    terms = drawn() * 10.0 ** drawn()
    rounded = terms.clone()
    grid.round_each([rounded], [-40])
    first, differ = rounded.sum(0).expand(1000, 7), 0
    for _ in range(100):
        order = torch.rand(1000, 64, generator=generator).argsort(1)
        borders = torch.randint(1, 63, (2,), generator=generator).sort().values.tolist()
        parts = [
            part.cumsum(1)[:, -1] for part in torch.tensor_split(rounded[order], borders, 1) if part.shape[1]
        ]
        assert torch.equal(sum(parts[::-1], start=torch.zeros(1000, 7, dtype=torch.float64)), first)
        differ += int((terms[order].cumsum(1)[:, -1] != terms.sum(0)).any(1).sum())
    assert differ > 90_000, "a trial that can fail"


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("looks", [False, True])
def test_a_sum_is_that_of_blocks_that_are_rounded_one_by_one(
    number: int, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is left in it for the next block, and however many tensors are rounded together."""
    monkeypatch.setattr(workspace, "_AT_ONCE", 16)
    unit, shapes = -45, {"a": (3, 5), "b": (2, 3, 2, 2), "c": (7,), "d": ()}
    blocks = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(number)]
    blocks[0]["b"] = blocks[0]["b"].to(memory_format=torch.channels_last)
    own, expected = (
        rank_of(blocks, unit),
        {name: torch.zeros(shape).double() for name, shape in shapes.items()},
    )
    for block in blocks:
        own.add(block)
        rounded = {name: gradient.double() for name, gradient in block.items()}
        grid.round_each(list(rounded.values()), [unit] * len(rounded))
        for name, total in expected.items():
            total += rounded[name]
            assert not looks or torch.equal(own.local(name), total)
    flat = own.packed(list(shapes))
    assert flat[:-4].tolist() == torch.cat([total.reshape(-1) for total in expected.values()]).tolist()
    for name, total in own.of_one_rank().items():
        assert torch.equal(total, expected[name])


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("unit", "scale"), [(-45, 1.0), (-45, 1e7), (-45, 1e-9), (-45, math.inf), (-80, 1.0)]
)
def test_sums_take_the_place_of_the_last_block(number: int, unit: int, scale: float) -> None:
    """The same bits as if it was added, on one rank and with a message, whatever its size is to the others'."""
    shapes = {"a": (3, 5), "b": (2, 3, 2, 2), "none": (0,), "late": (4,), "early": (7,)}
    blocks = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(number)]
    blocks[-1]["a"] *= scale
    blocks[-1]["b"] = blocks[-1]["b"].to(memory_format=torch.channels_last)
    del blocks[-1]["early"]
    for block in blocks[:-1]:
        del block["late"]

    def begun(some: Blocks) -> ExactGradients:
        own = ExactGradients({name: torch.empty(shape) for name, shape in shapes.items()}, CPU)
        own.load_state_dict({"units": dict.fromkeys(shapes, unit)})
        for block in some:
            own.add(block)
        return own

    whole, alone, sent = begun(blocks), begun(blocks[:-1]), begun(blocks[:-1])
    expected = {name: total.float() for name, total in whole.of_one_rank().items()}
    lasts = [{name: gradient.clone() for name, gradient in blocks[-1].items()} for _ in range(2)]
    found = [alone.of_one_rank(lasts[0])]
    sent.unpack(sent.packed(list(lasts[1]), lasts[1]), lasts[1])
    sent.unpack(sent.packed(["early"]), early := {"early": torch.empty(7)})
    found.append(sent.finish(lambda limbs: None))
    for last, more in zip(lasts, found, strict=True):
        for name, total in expected.items():
            value = more[name].float() if name in more else (last | early)[name]
            torch.testing.assert_close(value, total, rtol=0, atol=0, equal_nan=True)
    for own in (whole, alone, sent):
        own.commit()
    assert whole.state_dict() == alone.state_dict() == sent.state_dict()
    assert alone.given == sent.given == set(), "nothing is left"


@pytest.mark.parametrize("unit", [-46, -56])
def test_the_error_is_at_most_that_of_float32(unit: int) -> None:
    for seed in range(20):
        blocks = wild(16, 1.0, seed)
        found, _ = summed(blocks, [list(range(5)), list(range(5, 16))], unit)
        for name in ("wide", "odd"):
            exact = torch.stack([block[name].double() for block in blocks]).sum(0)
            plain = blocks[0][name].clone()
            for block in blocks[1:]:
                plain += block[name]
            errors = [(each.double() - exact).norm() for each in (found[name], plain)]
            assert errors[0] <= errors[1] + 1e-30


@pytest.mark.parametrize("scale", [1e-11, 1e-16, 1e-25, 1e-36])
def test_gradients_far_below_the_unit_lose_nothing(scale: float) -> None:
    """As in a first step, or in the one after gradients that were much larger."""
    blocks = [{"a": scale * each["wide"].clamp(-1e3, 1e3)} for each in wild(7, 1.0, seed=4)]
    exact = torch.stack([block["a"].double() for block in blocks]).sum(0)
    own = rank_of(blocks, grid.FIRST_UNIT)
    for block in blocks:
        own.add(block)
    first = own.of_one_rank()["a"].float()
    plain = sum((block["a"] for block in blocks[1:]), start=blocks[0]["a"])
    assert (first.double() - exact).norm() <= (plain.double() - exact).norm()
    for division in divisions(7, 25, seed=6):
        assert torch.equal(summed(blocks, division, grid.FIRST_UNIT)[0]["a"], first)


def test_one_large_block_among_small_ones() -> None:
    small = {"a": torch.tensor([3e-20, 1e-30])}
    blocks = [small, {"a": torch.tensor([1.0, 0.0])}, small, {"a": torch.zeros(2)}]
    first, _ = summed(blocks, [[0, 1, 2, 3]], grid.FIRST_UNIT)
    assert first["a"].tolist() == [1.0, 0.0], "far below what float32 adds to 1"
    for division in divisions(4, 25, seed=7):
        assert torch.equal(summed(blocks, division, grid.FIRST_UNIT)[0]["a"], first["a"])


def test_units_follow_the_gradients() -> None:
    units = {"a": grid.FIRST_UNIT}
    own = ExactGradients({"a": torch.empty(3)}, CPU)
    for step in range(6):
        own.forget()
        for _ in range(4):
            own.add({"a": torch.tensor([1e-5, -3e-5, 0.0])})
        own.of_one_rank()
        assert own.state_dict()["units"] == units, "until the update begins"
        own.commit()
        units = own.state_dict()["units"]
        assert step == 0 or math.ldexp(1.0, units["a"] + 46) < 1.2e-4 <= math.ldexp(1.0, units["a"] + 48)
    own.add({"a": torch.zeros(3)})
    own.of_one_rank()
    own.commit()
    assert own.state_dict()["units"] == units, "zeros say nothing of the size"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [1.0, 1e25])
def test_what_is_not_finite_stays_so(bad: float, size: float) -> None:
    blocks = [{"a": torch.full((3,), size)} for _ in range(4)]
    blocks[2]["a"][1] = bad
    for division in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[3], [2], [1, 0]]):
        found, units = summed(blocks, division, -40)
        assert not found["a"][1].isfinite()
        assert math.isnan(bad) or size > 1 or found["a"][1] == bad
        assert units == {"a": -40}, "a step that is left out changes nothing"


def test_infinities_of_both_signs_are_no_number() -> None:
    found, _ = summed([{"a": torch.tensor([math.inf])}, {"a": torch.tensor([-math.inf])}], [[0], [1]], -40)
    assert found["a"].isnan().all()


def test_a_gradient_that_is_missing_is_zero() -> None:
    blocks = wild(3, 1.0, seed=5)
    zeros = [*blocks, {name: torch.zeros_like(tensor) for name, tensor in blocks[0].items()}]
    with_zeros, _ = summed(zeros, [[0, 3], [1], [2], []], -50)
    without, _ = summed(blocks, [[0], [], [1, 2]], -50)
    assert all(torch.equal(with_zeros[name], total) for name, total in without.items())


def test_float64_and_half_precision() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        blocks = [{"a": torch.randn(11).to(dtype) * 100} for _ in range(6)]
        one, _ = summed(blocks, [[0, 1, 2, 3, 4, 5]], -56)
        two, _ = summed(blocks, [[5, 0], [4, 2, 3], [1]], -56)
        assert torch.equal(one["a"], two["a"])
        torch.testing.assert_close(
            one["a"].double(), sum(b["a"].double() for b in blocks), rtol=1e-2, atol=1e-2
        )


def test_gradients_are_not_changed_by_being_added() -> None:
    gradient = torch.tensor([0.1, 0.2], dtype=torch.float64)
    own = ExactGradients({"a": gradient}, CPU)
    own.add({"a": gradient})
    assert gradient.tolist() == [0.1, 0.2]


def test_a_device_that_does_not_round_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    grid.check_rounding(CPU)
    monkeypatch.setattr(grid, "round_each", lambda values, units: None)
    with pytest.raises(ConfigurationError, match="fast-math"):
        ExactGradients({}, CPU)
