"""``evener devices``: a survey of the machine, and a diagnosis of its problems."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING

from evener.cli import options
from evener.cli.parsing import CommandHelp, Parser, path
from evener.core.config.process_range import one_number
from evener.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from evener.hardware.diagnosis.findings import Finding
    from evener.hardware.survey.facts import Card, Host, Software, Speed, Survey

_WIDTH = 100


HELP = CommandHelp(
    "devices",
    "survey this machine, and say what is wrong or slow",
    "Survey this machine: its devices and what they do, the links between ranks, the versions, and "
    "what is wrong or slow, with its remedy. Exit status 1 if a device cannot train.",
    usage="[OPTIONS]",
    examples=(
        "evener devices",
        "evener devices --no-measure --save machine.json",
        "evener devices --from machine.json",
    ),
)


def fill(parser: Parser) -> None:
    """Adds the command's options."""
    options.add_config_options(parser, "processes", "device", "timeout_seconds")
    parser.option(
        "output",
        "--measure",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="devices, and links between ranks",
    )
    parser.option(
        "output",
        "--save",
        type=path,
        metavar="FILE",
        help="write the survey to this file",
        replaces=("cards",),
    )
    parser.option(
        "output",
        "--from",
        dest="source",
        type=path,
        metavar="FILE",
        help="a survey that was saved, of another machine",
    )
    options.add_json_option(parser, "survey and findings", "findings")


def execute(arguments: argparse.Namespace) -> int:
    """Surveys this machine or reads a saved survey, and prints it. Returns exit status 1 if something is wrong."""
    config = options.config_of(arguments)
    from evener.core.records import as_json
    from evener.files import write_json
    from evener.hardware.diagnosis.diagnose import diagnose
    from evener.hardware.survey import files
    from evener.training.survey import survey_devices

    if arguments.source is not None:
        _refuse(arguments)
        survey = files.load(arguments.source)
    else:
        survey = survey_devices(
            one_number(config.processes),
            config.device,
            measured=arguments.measure,
            timeout_seconds=config.timeout_seconds,
        )
    findings = diagnose(survey)
    print(text(survey, findings), flush=True)
    if arguments.save is not None:
        files.save(survey, arguments.save)
    if arguments.json is not None:
        found = [as_json(each) for each in findings]
        write_json(arguments.json, {"survey": files.as_json(survey), "findings": found}, follow=True)
    return 1 if any(finding.level == "wrong" for finding in findings) else 0


def _refuse(arguments: argparse.Namespace) -> None:
    """Raises ConfigurationError for options that concern this machine, which do not apply to a saved survey."""
    asked = {
        "--save": arguments.save,
        **options.said(arguments, "processes", "device", "timeout_seconds"),
        "--no-measure": None if arguments.measure else True,
    }
    given = [name for name, value in asked.items() if value is not None]
    if given:
        raise ConfigurationError(
            f"{' and '.join(given)} and --from do not go together: a survey is read as it is"
        )


def text(survey: Survey, findings: Sequence[Finding]) -> str:
    """Formats a survey and its findings for people."""
    lines = [
        *_host(survey.host),
        *_software(survey.software),
        *(f"{name:<9} {value}" for name, value in survey.variables.items()),
        *(_card(number, card) for number, card in enumerate(survey.cards)),
        *(line for speed in survey.speeds for line in _speed(speed)),
        *(
            f"ranks {link.a}-{link.b}: {link.latency_seconds * 1e6:.0f} us, {link.bytes_per_second / 1e9:.2f} GB/s"
            for link in survey.links
        ),
        "",
        *(line for finding in findings for line in _finding(finding)),
        *([] if findings else ["nothing found wrong"]),
    ]
    return "\n".join(lines)


def _host(host: Host) -> Iterator[str]:
    yield f"host      {host.name}, {host.system}, {host.machine}"
    quota = f", time of {host.cpu_quota:g}" if host.cpu_quota is not None else ""
    vectors = f", {host.vectors}" if host.vectors else ""
    yield f"CPU       {host.processor}: {host.cores} cores, {host.allowed_cores} usable{quota}{vectors}"
    limit = f", {_gib(host.memory_limit_nbytes)} for the container" if host.memory_limit_nbytes else ""
    shm = f"; /dev/shm {_gib(host.shm_nbytes)}" if host.shm_nbytes is not None else ""
    yield f"memory    {_gib(host.memory_nbytes)}, {_gib(host.available_nbytes)} free{limit}{shm}"


def _software(software: Software) -> Iterator[str]:
    yield f"versions  evener {software.evener}, Python {software.python}, torch {software.torch}"
    builds = {"CUDA": software.cuda, "ROCm": software.hip, "XPU": software.xpu}
    built = [f"{name} {version}" for name, version in builds.items() if version]
    built += [f"{each.name} {each.loaded or 'not usable'}" for each in software.libraries]
    yield f"built for {', '.join(built) or 'CPUs alone'}"
    knows = f" (CUDA {software.driver_cuda})" if software.driver_cuda else ""
    if software.nvidia_driver:
        yield f"driver    NVIDIA {software.nvidia_driver}{knows}"


def _card(number: int, card: Card) -> str:
    details = [
        card.device or "not seen by torch",
        card.architecture,
        _gib(card.memory_nbytes) if card.memory_nbytes else "",
        f"{_gib(card.free_nbytes)} free" if card.free_nbytes is not None else "",
        card.pci,
        f"PCIe {card.pcie_generation} x{card.pcie_width}" if card.pcie_width else "",
        f"{card.temperature} °C" if card.temperature is not None else "",
    ]
    return f"card {number}    {card.name}: {', '.join(filter(None, details))}"


def _speed(speed: Speed) -> Iterator[str]:
    products = [f"{dtype} {flops / 1e12:.3g}" for dtype, flops in speed.products.items()]
    if products:
        yield f"{speed.device:<9} matrix product in TFLOP/s: {', '.join(products)}"
    copies = {"within": speed.copy, "from host": speed.from_host, "to host": speed.to_host}
    rates = [f"{name} {rate / 1e9:.3g}" for name, rate in copies.items() if rate is not None]
    if rates:
        yield f"{speed.device:<9} memory copy in GB/s: {', '.join(rates)}"


def _finding(finding: Finding) -> Iterator[str]:
    yield from textwrap.wrap(f"{finding.level}: {finding.seen}", _WIDTH, subsequent_indent="  ")
    yield from textwrap.wrap(finding.remedy, _WIDTH, initial_indent="  -> ", subsequent_indent="     ")


def _gib(nbytes: int) -> str:
    """Formats a size in GiB; below one GiB in MiB, the usual unit of small limits."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.0f} MiB"
