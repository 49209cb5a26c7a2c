from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from evener.errors import ConfigurationError
from evener.hardware.survey.facts import FORMAT, MeasuredLink, Speed, Survey, Tenant
from evener.hardware.survey.files import as_json, from_json, load, save
from tests.hardware.survey import machines


def full() -> Survey:
    """With something in every list."""
    return dataclasses.replace(
        machines.h100_node(),
        host=machines.host(cpu_quota=1.5, memory_limit_nbytes=1 << 30),
        cards=(machines.card(tenants=(Tenant(7, 100),), brakes=("heat",)), machines.card(1)),
        variables={"NCCL_DEBUG": "INFO"},
        speeds=(Speed("cuda:0", {"float32": 1e13}, copy=1e12, from_host=None),),
        links=(MeasuredLink(0, 1, 1e-6, 2e10),),
    )


@pytest.mark.parametrize("survey", [full(), machines.on_cpu(), machines.k80()], ids=["full", "cpu", "k80"])
def test_a_survey_comes_back_as_it_was(survey: Survey, tmp_path: Path) -> None:
    save(survey, tmp_path / "survey.json")
    assert load(tmp_path / "survey.json") == survey


def test_a_number_that_is_whole_may_be_a_float() -> None:
    value = json.loads(json.dumps(as_json(full())))
    value["host"]["cpu_quota"] = 2
    assert from_json(value).host.cpu_quota == 2.0


def test_what_an_older_version_did_not_know_is_open() -> None:
    value = as_json(machines.on_cpu())
    del value["links_error"], value["host"]["cpu_quota"]
    assert from_json(json.loads(json.dumps(value))) == machines.on_cpu()


def changed(**changes: Any) -> Any:
    """The full survey with what stands at ``a__0__b`` replaced, or left out where it is None."""
    value = json.loads(json.dumps(as_json(full())))
    for place, new in changes.items():
        *way, last = place.split("__")
        inner = value
        for step in way:
            inner = inner[int(step) if step.isdecimal() else step]
        if new is None:
            del inner[last]
        else:
            inner[last] = new
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "it has no format"),
        ({"ranks": 4}, f"it has no format, which would be '{FORMAT}'"),
        (changed(format="evener-survey-9"), "its format is 'evener-survey-9'"),
        (changed(host=None), "host is missing"),
        (changed(host=4), "host is 4, not an object"),
        (changed(cards={}), "cards is {}, not a list"),
        (changed(cards__1__memory_nbytes="24G"), r"cards\[1\].memory_nbytes is '24G', not a whole number"),
        (changed(cards__0__mig=1), r"cards\[0\].mig is 1, not true or false"),
        (changed(host__cores=True), "host.cores is True, not a whole number"),
        (changed(host__cpu_quota=float("inf")), "host.cpu_quota is inf, not a number"),
        (changed(host__cpus=2), "nothing is called host.cpus"),
        (
            changed(speeds__0__products={"float32": "fast"}),
            r"speeds\[0\].products.float32 is 'fast', not a number",
        ),
        (changed(paths=[]), "nothing is called paths"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_survey_is_named_by_its_place(value: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "survey.json").write_text(json.dumps(value))
    with pytest.raises(ConfigurationError, match=f"survey.json is no survey: {words}"):
        load(tmp_path / "survey.json")


def test_files_that_are_not_there_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no file .*absent\.json"):
        load(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_bytes(b"\xff{")
    with pytest.raises(ConfigurationError, match=r"broken\.json is no survey"):
        load(tmp_path / "broken.json")
