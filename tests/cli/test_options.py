from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from typing import Any

import pytest

from evener.cli.main import main
from evener.cli.options import add_config_options, add_rendezvous_options, config_of
from evener.cli.parsing import Parser
from evener.core.config.strategy_names import NAMES, SYNONYMS, called_here


def parsed(*arguments: str) -> argparse.Namespace:
    parser = Parser()
    add_config_options(parser)
    return parser.parse_args(arguments)


def test_what_balances_and_emulates_comes_from_the_command_line() -> None:
    config = config_of(
        parsed(
            *("--balance", "auto", "--max-shares", "64,-", "--share-multiple-of", "8", "--throttle", "1,0.5"),
            *("--throttle-at", "100:1:1", "--throttle-at", "200:0:0.5"),
        )
    )
    assert (config.balance, config.max_shares, config.share_multiple_of, config.throttle) == (
        "auto",
        "64,-",
        8,
        "1,0.5",
    )
    assert config.throttle_at == ("100:1:1", "200:0:0.5")


def test_nothing_is_emulated_unless_asked_for() -> None:
    config = config_of(parsed())
    assert (config.throttle, config.throttle_at, config.max_shares, config.share_multiple_of) == (
        None,
        (),
        None,
        1,
    )


def test_the_help_says_that_it_is_an_emulation() -> None:
    parser = Parser()
    add_config_options(parser, "throttle", "throttle_at")
    assert parser.format_help().count("EMULATE") == 2


def test_the_help_names_each_of_torchruns_options_once() -> None:
    parser = Parser(usage="")
    add_rendezvous_options(parser)
    assert parser.format_help().count("--nnodes") == 1
    assert parser.parse_args(["--rdzv_backend", "c10d"]) == parser.parse_args(["--rdzv-backend", "c10d"])


@pytest.mark.parametrize("option", ["--run-dir", "--resume", "--weights", "--json", "--data-dir"])
def test_a_path_that_is_empty_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", option, ""])
    assert ended.value.code == 2
    assert f"{option}: the path is empty" in capsys.readouterr().err


def test_an_all_reduce_that_there_is_not_is_refused_for_one_process_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option, words in (
        ("--allreduce", "no all-reduce is called 'nope'"),
        ("--compress", "no compression 'nope'"),
    ):
        assert main(["train", "digits", "--processes", "1", "--device", "cpu", option, "nope"]) == 2
        assert words in capsys.readouterr().err


REFUSED = {
    ("--strategy", "fsdp"): "'fsdp': it is called sharded here",
    ("--strategy", "ddp,TP"): "'TP': it is called tensor here",
    ("--allreduce", "nccl"): "'nccl': it is called native here",
    ("--balance", "dynamic"): "'dynamic': it is called auto here",
    ("--balance", "fast"): "no balancer is called 'fast'; known are equal, auto, weights such as 3,1",
    ("--strategy", "pipelin"): "Did you mean pipeline?",
    ("--strategy", "DDP"): "'DDP': it is called ddp here",
    ("--mesh", "dp=2,tensor=2"): "no axis 'dp': it is called data here; there are pipeline, data",
    ("--mesh", "data=2,rows=2"): "no axis 'rows'; there are pipeline, data",
    ("--device", "gpu"): "no device is called 'gpu': it is called cuda here",
}
REFUSALS = """
import contextlib, io, json, sys
from evener.cli.main import main

found = []
for option in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(["train", "digits", *option])
    found.append((status, said.getvalue(), "torch" in sys.modules))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def refusals() -> dict[tuple[str, ...], list[Any]]:
    """What a process says to each option in which nothing has imported torch yet: status, words, and if it has then."""
    command = [sys.executable, "-c", REFUSALS, json.dumps([*REFUSED])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return dict(zip(REFUSED, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("option", "words"), REFUSED.items())
def test_names_are_checked_before_torch_is_there(
    refusals: dict[tuple[str, ...], list[Any]], option: tuple[str, ...], words: str
) -> None:
    status, said, has_torch = refusals[option]
    assert (status, has_torch) == (2, False), said
    assert words in said


@pytest.mark.parametrize("kind", SYNONYMS)
def test_other_words_of_the_field_lead_to_names_that_there_are(kind: str) -> None:
    for words in SYNONYMS[kind].values():
        assert words in NAMES[kind] or {"ddp", "data_parallel"} <= {*re.findall(r"\w+", words)}
    assert not SYNONYMS[kind].keys() & {*NAMES[kind]}


@pytest.mark.parametrize(
    ("kind", "other", "here"),
    [
        ("strategy", "DDP", "ddp"),
        ("strategy", "tensor-parallel", "tensor"),
        ("strategy", "Tensor Parallel", "tensor"),
        ("strategy", "horovod", "ddp"),
        ("strategy", "DataParallel", "data_parallel"),
        ("strategy", "data-parallel", "data_parallel"),
        ("all-reduce", "shared_memory", "shared-memory"),
        ("all-reduce", "NCCL", "native"),
        ("task", "MNIST", "mnist"),
        ("axis", "TP", "tensor"),
        ("axis", "pp", "pipeline"),
        ("axis", "fsdp", "shard"),
        ("device", "gpu", "cuda"),
        ("device", "tpu", ""),
        ("strategy", "magic", ""),
    ],
)
def test_a_name_is_found_however_it_is_spelt(kind: str, other: str, here: str) -> None:
    assert called_here(other, kind) == here


def test_dp_may_be_two_things() -> None:
    assert {"ddp", "data_parallel"} <= {*re.findall(r"\w+", called_here("dp", "strategy"))}
