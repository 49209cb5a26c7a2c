"""Surveys and measures this machine for ``evener devices``, and for the line about it at the start of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from evener.collectives.tuning.measure import measure_links
from evener.core.config.run_config import RunConfig
from evener.distributed.environment import check_processes, default_processes, kind_taken
from evener.distributed.launch.launch import is_launched, launch
from evener.distributed.session import Session, threads_per_rank
from evener.errors import ConfigurationError, EvenerError, InterruptedRunError
from evener.hardware.diagnosis.diagnose import worst
from evener.hardware.diagnosis.findings import LEVELS, Finding
from evener.hardware.speed import first_line, measure
from evener.hardware.survey.facts import MeasuredLink, Plan, Speed, Survey
from evener.hardware.survey.host import cores_allowed
from evener.hardware.survey.nvml import ask_brakes, find_nvml
from evener.hardware.survey.reading import glance, read_survey
from evener.training.factory import balance_of
from evener.version import evener_version

SEE = "`evener devices` tells more"
_ALL_PAIRS = 8
"""The largest number of ranks for which every pair is measured. With more ranks, only neighbours on a ring are."""
_LEAST_BETA = 1e-14
"""The least seconds per byte, used if a large message took no longer than a small one."""


def survey_devices(
    processes: int | None = None,
    device: str | None = None,
    *,
    measured: bool = True,
    timeout_seconds: float = 300.0,
) -> Survey:
    """Surveys the devices of this machine, and measures their speed and the links between ranks.

    Args:
        processes: Ranks to start for measuring the links; by default as many as a run would have.
        device: ``cpu`` or ``cuda``; by default cuda if there is any.
        measured: If False, measures nothing. Measuring takes one or two seconds for each device, and a few to start
            the ranks.
        timeout_seconds: The longest wait of a rank for others.

    Raises:
        ConfigurationError: If there cannot be so many ranks, or a launcher started this process as a rank.
    """
    if is_launched():
        raise ConfigurationError(
            "`evener devices` starts its ranks itself: run it by itself on each machine, without torchrun or srun"
        )
    kind = kind_taken(device)
    ranks = processes if processes is not None else default_processes(kind)
    check_processes(ranks, kind)
    survey = read_survey(Plan(ranks, _threads(ranks), kind), evener_version())
    if not measured:
        return survey
    # Links are measured first: a card in exclusive mode would refuse the ranks once this process has used it.
    return with_speeds(with_links(survey, timeout_seconds) if ranks > 1 else survey)


def _threads(ranks: int) -> int:
    """Returns the threads of each rank in a session: by ``OMP_NUM_THREADS`` if set, else an equal part of the cores."""
    return torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else threads_per_rank(ranks)


def with_speeds(survey: Survey) -> Survey:
    """Returns the survey with the speed of the CPU and of every card that torch sees.

    Asks each card for reasons that slow it down (throttling) right after measuring it, because an idle card has none.
    """
    nvml, braked, speeds = find_nvml(), dict[str, tuple[str, ...]](), list[Speed]()
    for name in ("cpu", *(card.device for card in survey.seen if card.device)):
        speeds.append(measure(torch.device(name)))
        if nvml is not None and name != "cpu":
            braked |= {uuid: why for uuid, why in ask_brakes(nvml).items() if why}
    cards = tuple(replace(card, brakes=braked.get(card.uuid, card.brakes)) for card in survey.cards)
    return replace(survey, speeds=tuple(speeds), cards=cards)


def with_links(survey: Survey, timeout_seconds: float) -> Survey:
    """Returns the survey with the links between ranks. If they cannot be measured, ``links_error`` says why."""
    plan = survey.plan
    try:
        links = launch(
            _links_on_rank,
            plan.device,
            timeout_seconds,
            processes=plan.ranks,
            timeout_seconds=timeout_seconds,
            device=plan.device,
        )[0]
    except InterruptedRunError:
        raise
    except EvenerError as error:
        return replace(survey, links_error=first_line(error))
    return replace(survey, links=tuple(links))


def _links_on_rank(device: str, timeout_seconds: float) -> list[MeasuredLink]:
    with Session(device=device, timeout_seconds=timeout_seconds) as session:
        assert session.world is not None
        pairs = pairs_of(session.world_size)
        found = measure_links(pairs, session.world)
        return [
            MeasuredLink(a, b, link.alpha_seconds, 1 / max(link.beta_seconds_per_byte, _LEAST_BETA))
            for (a, b), link in zip(pairs, found, strict=True)
        ]


def pairs_of(ranks: int) -> list[tuple[int, int]]:
    """Returns the pairs of ranks to measure: all pairs of few ranks, else the neighbours on a ring."""
    if ranks <= _ALL_PAIRS:
        return [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]
    return [(rank, (rank + 1) % ranks) for rank in range(ranks)]


def head_line(session: Session, config: RunConfig) -> str:
    """Returns the worst finding about the machines of a run, with its remedy; empty if there is none.

    All ranks must call this together. One rank of each host surveys its host, without measuring, in some milliseconds.
    """
    environment = session.environment
    cores = cores_of(environment.host, session.control.gather_objects((environment.host, cores_allowed())))
    mine = _glanced(session, config, len(cores)) if environment.local_rank == 0 else None
    if session.world_size == environment.local_world_size:
        return mine.message if mine else ""
    return worst_of_hosts(session.control.gather_objects((environment.host, mine)))


def cores_of(host: str, allowed: Sequence[tuple[str, frozenset[int]]]) -> frozenset[int]:
    """Returns the cores of all ranks of a host together. SLURM may give each rank different cores."""
    return frozenset[int]().union(*(cores for name, cores in allowed if name == host))


def worst_of_hosts(found: Sequence[tuple[str, Finding | None]]) -> str:
    """Returns the worst finding with the first host that has it, and the number of other hosts that have it too."""
    order = list(LEVELS)
    each = [(host, finding) for host, finding in found if finding is not None]
    if not each:
        return ""
    host, worst_one = min(each, key=lambda pair: order.index(pair[1].level))
    others = {name for name, finding in each if finding.name == worst_one.name} - {host}
    return f"host {host}{f' and {len(others)} more' if others else ''}: {worst_one.message}"


def _glanced(session: Session, config: RunConfig, cores: int) -> Finding | None:
    plan = Plan(
        ranks=session.environment.local_world_size,
        threads=torch.get_num_threads(),
        device=session.device.type,
        workers=config.workers,
        balanced=balance_of(config, session.mesh.data.degree, unlike=True) != "equal"
        or config.devices is not None,
    )
    try:
        survey = glance(plan, evener_version(), accelerators=config.device != "cpu")
        return worst(replace(survey, host=replace(survey.host, allowed_cores=cores)))
    except (RuntimeError, OSError, ValueError) as error:  # a failed survey must not stop a run
        return Finding("note", "unknown", f"this machine could not be surveyed: {first_line(error)}", SEE)
