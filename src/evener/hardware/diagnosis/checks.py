"""Checks of a survey that need more than an expression. Each returns text with the values that it found."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from evener.hardware.diagnosis.cuda import Code, code_for, least_driver, own_driver, version
from evener.hardware.survey.facts import Card, Survey

LEAST_NBYTES = 512 << 20
"""Minimum host memory of a rank, in bytes. A process that has imported torch uses half of it."""
LEAST_SHM_NBYTES = 1 << 30
"""Minimum size of ``/dev/shm`` in bytes, as NVIDIA recommends for containers. Docker's default is 64 MiB."""
_TENANTS_NBYTES, _TENANTS_PART = 256 << 20, 0.1
_ALIKE = 0.95
"""Cards with the same name count as equal if the smallest memory is at least this fraction of the largest. A driver or
a display reserves some memory."""
_SLOWER = 0.8
"""A card is reported below this fraction of the fastest one's speed. Cards of one name differ by a few percent."""
_LEAST_LINKS, _TIMES = 3, 3.0
"""Minimum number of links to compare, and the factor by which the slowest must be below the median. On a busy machine
one measurement may take twice as long as another."""
_OFF = ("", "0", "false", "no", "off")
_SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
    "HIP_LAUNCH_BLOCKING": "the host waits for every kernel",
    "AMD_SERIALIZE_KERNEL": "kernels wait for each other",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "memory is asked of the driver every time",
    "PYTORCH_NO_HIP_MEMORY_CACHING": "memory is asked of the driver every time",
    "NCCL_P2P_DISABLE": "cards exchange through the host's memory",
    "NCCL_SHM_DISABLE": "cards exchange through the network's sockets",
    "NCCL_IB_DISABLE": "machines exchange over TCP, although there may be InfiniBand",
}


def too_old(survey: Survey) -> str:
    """Returns the versions if NVIDIA's driver is too old for the CUDA version of torch; otherwise an empty string."""
    software = survey.software
    least, driver = least_driver(software.cuda or ""), software.nvidia_driver
    if least is None or driver is None or version(driver) >= version(least):
        return ""
    return (
        f"driver {driver} is older than {least}, the oldest for CUDA {software.cuda}, with which torch "
        f"{software.torch} was built"
    )


def behind(survey: Survey) -> bool:
    """Returns True if the driver is older than the CUDA version of torch.

    Compares the CUDA version that the driver reports; if there is none, the driver's version with NVIDIA's table.
    """
    software = survey.software
    if software.cuda is None or software.nvidia_driver is None:
        return False
    if software.driver_cuda is not None:
        return version(software.driver_cuda)[:2] < version(software.cuda)[:2]
    own = own_driver(software.cuda)
    return own is not None and version(software.nvidia_driver) < version(own)


def mismatch(survey: Survey) -> str:
    """Returns the messages of NVML and CUDA if kernel module and libraries of the driver have different versions;
    otherwise an empty string.
    """
    said = f"{survey.software.nvml} {survey.software.refusal}".strip()
    return f"NVIDIA's driver says: {said}" if "version mismatch" in said.lower() else ""


def of_nvidia(survey: Survey) -> list[Card]:
    """Returns the NVIDIA cards, whether torch sees them or not."""
    return [card for card in survey.cards if card.kind == "nvidia"]


def hidden(survey: Survey) -> str:
    """Returns the value of CUDA_VISIBLE_DEVICES if it hides cards that torch could use; otherwise an empty string."""
    value, cards = survey.variables.get("CUDA_VISIBLE_DEVICES"), of_nvidia(survey)
    if value is None or not survey.software.cuda or all(card.device for card in cards):
        return ""
    return f"with CUDA_VISIBLE_DEVICES={value!r} torch sees {len(survey.seen)} of {listed(cards)}"


def no_access(survey: Survey) -> str:
    """Returns torch's message if it sees no card and no other check explains why; otherwise an empty string."""
    software, cards = survey.software, of_nvidia(survey)
    explained = too_old(survey) or mismatch(survey) or hidden(survey) or not software.cuda
    if explained or survey.seen or not cards:
        return ""
    refusal = f": {software.refusal}" if software.refusal else ""
    return f"torch {software.torch} sees none of {listed(cards)}{refusal}"


def without_cuda(survey: Survey) -> str:
    """Returns the NVIDIA cards if torch was built without CUDA and sees no card; otherwise an empty string."""
    software, cards = survey.software, of_nvidia(survey)
    if software.cuda or survey.seen or not cards:
        return ""
    return f"torch {software.torch} was built without CUDA, and the machine has {listed(cards)}"


def listed(cards: Sequence[Card]) -> str:
    """Returns the number of cards and their different names."""
    names = ", ".join(dict.fromkeys(card.name for card in cards))
    return f"{len(cards)} card{'s' * (len(cards) != 1)} ({names})"


def running(survey: Survey, code: Code) -> list[Card]:
    """Returns the cards for which ``code`` is the best code that torch has.

    Looks at the cards that torch sees; if there are none, at those that it could see.
    """
    built = survey.software.cuda and "CUDA_VISIBLE_DEVICES" not in survey.variables
    cards = survey.seen or (of_nvidia(survey) if built else [])
    return [card for card in cards if _code(card, survey) == code]


def _code(card: Card, survey: Survey) -> Code:
    """Returns the best code that torch has for a card.

    Code for an AMD architecture runs on no other, unless HSA_OVERRIDE_GFX_VERSION is set.
    """
    architectures = survey.software.architectures
    if not architectures or not card.architecture or card.kind not in ("nvidia", "amd"):
        return "binary"
    if card.kind == "nvidia":
        return code_for(card.architecture, architectures)
    known = card.architecture in architectures or "HSA_OVERRIDE_GFX_VERSION" in survey.variables
    return "binary" if known else "none"


def mixed(survey: Survey) -> str:
    """Returns the different cards if the ranks' cards are unequal but get equal shares; otherwise an empty string."""
    cards = () if survey.plan.balanced else survey.used
    sizes = [card.memory_nbytes for card in cards if card.memory_nbytes]
    if len({card.name for card in cards}) < 2 and (not sizes or min(sizes) >= _ALIKE * max(sizes)):
        return ""
    kinds = dict.fromkeys((card.name, card.memory_nbytes) for card in cards)
    kinds_text = [f"{name} ({f'{size / 2**30:.0f} GiB' if size else 'size unknown'})" for name, size in kinds]
    return f"the {len(cards)} cards are not alike: {', '.join(kinds_text)}"


def tenants(card: Card) -> str:
    """Returns the other processes that use much of a card's memory, and how much; empty if they use little."""
    nbytes = sum(tenant.nbytes for tenant in card.tenants)
    if nbytes <= min(_TENANTS_NBYTES, _TENANTS_PART * (card.memory_nbytes or _TENANTS_NBYTES * 10)):
        return ""
    pids = ", ".join(str(tenant.pid) for tenant in card.tenants)
    return f"{nbytes / 2**30:.1f} GiB belong to processes {pids}"


def braked(survey: Survey) -> Iterator[str]:
    """Yields the cards that have lowered their clocks, with the reason and the temperature."""
    for card in survey.seen:
        if card.brakes:
            heat = f" at {card.temperature} °C" if card.temperature is not None else ""
            yield f"{card} has lowered its clocks because of {' and '.join(card.brakes)}{heat}"


def narrow(card: Card) -> bool:
    """Returns True if the card uses fewer PCIe lanes than card and slot support."""
    return bool(card.pcie_width and card.pcie_widest and card.pcie_width < card.pcie_widest)


def held_back(card: Card) -> bool:
    """Returns True if the card's power limit is below its default."""
    limit, usual = card.power_limit_watts, card.power_default_watts
    return bool(limit and usual and limit < usual)


def threads(survey: Survey) -> str:
    """Returns the number of ranks, threads and cores if there are more threads than cores, else an empty string."""
    plan, cores = survey.plan, survey.host.usable_cores
    if plan.ranks * plan.threads <= cores:
        return ""
    counts = {"rank": plan.ranks, "thread": plan.threads, "usable core": cores}
    ranks, threads, usable = [f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items()]
    return f"{ranks} of {threads} on {usable}"


def slow_variables(survey: Survey) -> Iterator[str]:
    """Yields environment variables that slow training down."""
    if survey.variables.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield "TORCH_DISTRIBUTED_DEBUG=DETAIL: collectives are compared among the ranks before they run"
    for name, effect in _SLOWING.items() if survey.trains_on_cards else ():
        if survey.variables.get(name, "").lower() not in _OFF:
            yield f"{name}={survey.variables[name]}: {effect}"


def uneven_cards(survey: Survey) -> Iterator[str]:
    """Yields, for each card name, the slowest card if it is much slower than the fastest.

    Compares them in the data type in which the difference is largest.
    """
    names = {card.device: card.name for card in survey.seen}
    for name in dict.fromkeys(names.values()):
        rates: dict[str, list[tuple[float, str]]] = {}
        for speed in survey.speeds:
            for dtype, rate in speed.products.items() if names.get(speed.device) == name else ():
                rates.setdefault(dtype, []).append((rate, speed.device))
        ends = [(min(each), max(each), dtype) for dtype, each in rates.items()]
        if not ends:
            continue
        (slow, device), (fast, other), dtype = min(ends, key=lambda end: end[0][0] / end[1][0])
        if slow < _SLOWER * fast:
            yield f"{device} has {slow / fast:.0%} of the speed of {other} in {dtype} ({name})"


def uneven_links(survey: Survey) -> str:
    """Returns the slowest link if it is far slower than the median; otherwise an empty string."""
    rates = [(link.bytes_per_second / 1e9, link.a, link.b) for link in survey.links]
    slow, a, b = min(rates, default=(0.0, 0, 0))
    usual = statistics.median(rate for rate, _, _ in rates) if len(rates) >= _LEAST_LINKS else 0.0
    return f"ranks {a} and {b} have {slow:.2f} GB/s, {usual:.2f} are usual" if slow * _TIMES < usual else ""
