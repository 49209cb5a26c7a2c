"""Which tests `make check` runs."""

from __future__ import annotations

from pathlib import Path

from tests.changed import select_tests


def test_a_file_of_a_room_is_tested_by_the_tests_of_the_room() -> None:
    assert select_tests(["src/evener/strategies/pipeline/schedule.py"]) == [
        "tests/strategies/pipeline",
        "tests/test_house.py",
    ]


def test_a_loose_file_is_tested_by_the_test_of_its_name() -> None:
    assert select_tests(["src/evener/files.py"]) == ["tests/test_files.py", "tests/test_house.py"]


def test_a_test_is_run_itself_and_a_helper_of_tests_with_its_directory() -> None:
    assert select_tests(["tests/data/test_batch.py", "tests/strategies/wide.py", "docs/data.md"]) == [
        "tests/data/test_batch.py",
        "tests/strategies",
        "tests/test_house.py",
    ]


def test_a_test_that_is_gone_is_not_run() -> None:
    assert select_tests(["tests/data/test_no_more.py"]) == ["tests/test_house.py"]


def test_what_has_no_test_of_its_own_is_left_to_those_of_its_room(tmp_path: Path) -> None:
    (tmp_path / "tests/core").mkdir(parents=True)
    (tmp_path / "tests/core/test_text.py").touch()
    assert select_tests(["src/evener/core/deep/new.py"], tmp_path) == ["tests/core", "tests/test_house.py"]
