from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch
from platformdirs import user_cache_path

from tests.ranks import Modules, RankPool

if TYPE_CHECKING:
    from tests.warm import Warm

_MODULES = Modules()


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def ranks(rank_pools: dict[int, RankPool]) -> Callable[[int], RankPool]:
    """``ranks(3).run(function, *args)`` calls the function on three ranks that stay up between tests."""
    return lambda world_size: rank_pools.setdefault(world_size, RankPool(world_size))


@pytest.fixture
def warm(ranks: Callable[[int], RankPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Warm:
    """Runs what a test launches on ranks that are up: a launch of two takes ten seconds.

    The test moves to a directory of its own, since ranks forget the modules of the directory they were launched from.
    """
    from tests.warm import Warm

    monkeypatch.chdir(tmp_path)
    return Warm(tmp_path, ranks, monkeypatch)


@pytest.fixture(scope="session")
def cache_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache directory of the tests' own. Measured collectives in it are this user's, for they take long."""
    home, own = tmp_path_factory.mktemp("cache"), user_cache_path("evener") / "collectives"
    own.mkdir(parents=True, exist_ok=True)
    (home / "evener").mkdir()
    (home / "evener" / "collectives").symlink_to(own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        yield home


@pytest.fixture(autouse=True)
def no_kept_plans(cache_of_tests: Path) -> Iterator[None]:
    """Runs of a test find no plan of this user or of another test."""
    yield
    shutil.rmtree(cache_of_tests / "evener" / "plans", ignore_errors=True)


def pytest_configure() -> None:
    gc.disable()  # until all tests are collected: it would look at PyTorch again and again, and find nothing
    hypothesis.settings.register_profile("untimed", deadline=None)  # other programs may run meanwhile
    hypothesis.settings.load_profile("untimed")
    torch.set_num_threads(1)
    # A busy machine is slow, and tests read all words.
    os.environ.setdefault("EVENER__FIRST_WORD_SECONDS", "inf")
    # A shell starts what it leaves in the background so that it ignores these, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if placed := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{placed[0]} has another name in every process: use ids=tests.ids.placeless")
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    _MODULES.set_apart()
    gc.enable()


def pytest_runtest_teardown() -> None:
    _MODULES.set_apart()
