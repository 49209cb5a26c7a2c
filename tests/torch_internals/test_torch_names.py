"""Every private name that Evener borrows, exercised: where one goes, the failure says which file to repair.

Nothing of Evener is imported at the top, so that a name that is gone fails its own test alone.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import struct
import threading
import tomllib
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from tests.torch_internals.borrowing import ROOT, borrowed

BORROWED = ROOT / "src/evener/torch_internals"


FILES = sorted(path.stem for path in BORROWED.glob("*.py") if path.stem != "__init__")


def test_iterators_of_a_data_loader_have_one_class() -> None:
    with borrowed("modules") as names:
        iterator, data = iter(DataLoader(range(3))), range(3)  # type: ignore[arg-type]
        assert isinstance(iterator, names.LoaderIterator)
        assert names.dataset_of(iterator) == data
        assert "__next__" in vars(names.LoaderIterator)


def test_batch_norms_and_dropouts_have_one_class_each() -> None:
    with borrowed("modules") as names:
        for norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm1d):
            assert issubclass(norm, names.AnyBatchNorm)
        for dropout in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout):
            assert issubclass(dropout, names.AnyDropout)


def test_collating_can_be_extended() -> None:
    with borrowed("modules") as names:
        functions = {**names.default_collate_fn_map, str: lambda batch, collate_fn_map: "".join(batch)}
        assert names.collate(["a", "b"], collate_fn_map=functions) == "ab"
        assert torch.equal(
            names.collate([torch.ones(1), torch.zeros(1)], collate_fn_map=functions), torch.eye(2)[:, :1]
        )


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_names_of_wrapped_modules_hold_the_wrapper() -> None:
    with borrowed("modules") as names:
        linear = nn.Linear(1, 1)
        compiled: Any = torch.compile(linear)
        assert names.compiled_from(compiled) is linear
        assert names.compiled_from(linear) is None
        assert next(name for name, _ in compiled.named_parameters()) == f"{names.COMPILED}.weight"
        assert vars(checkpoint_wrapper(linear))["_modules"].keys() <= set(names.WRAPPERS)
        fsdp = importlib.import_module("torch.distributed.fsdp._common_utils")
        assert fsdp.FSDP_WRAPPED_MODULE in names.WRAPPERS


def test_parameters_and_buffers_are_replaced_in_place() -> None:
    with borrowed("modules") as names:
        norm = nn.BatchNorm1d(2)
        names.own_parameters(norm)["bias"] = nn.Parameter(torch.full((2,), 7.0))
        names.own_buffers(norm)["running_mean"] = torch.full((2,), 5.0)
        assert torch.allclose(norm.eval()(torch.full((1, 2), 5.0)), torch.full((1, 2), 7.0))
        assert names.own_parameters(nn.Linear(1, 1, bias=False))["bias"] is None
        assert names.own_modules(nn.Sequential(norm)) == {"0": norm}


def test_a_module_holds_its_parts_in_three_attributes() -> None:
    with borrowed("modules") as names:
        norm = nn.Sequential(nn.BatchNorm1d(2))
        found = [name for holder in names.HOLDERS for name in (*vars(norm)[holder], *vars(norm[0])[holder])]
        assert {"0", "weight", "bias", "running_mean"} < set(found)


def test_hooks_of_modules_are_known() -> None:
    with borrowed("modules") as names:
        linear = nn.Linear(1, 1)
        for register in (
            linear.register_forward_hook,
            linear.register_forward_pre_hook,
            linear.register_full_backward_hook,
            linear.register_full_backward_pre_hook,
            register_module_forward_hook,
        ):
            assert not names.has_hooks(linear)
            handle = register(lambda *_: None)  # type: ignore[operator]
            assert names.has_hooks(linear)
            handle.remove()


def test_those_who_hold_a_storage_are_counted() -> None:
    with borrowed("storages") as names:
        gradient, weight = torch.zeros(2), nn.Parameter(torch.zeros(2))
        place = names.address(gradient.untyped_storage())
        alone = names.use_count(place)
        weight.grad = gradient.detach()
        kept = {"before": weight.grad}
        weight.grad = None
        assert names.use_count(place) > alone
        kept.clear()
        assert names.use_count(place) == alone


def test_an_active_dispatch_mode_is_known() -> None:
    with borrowed("dispatch") as names:
        assert not names.mode_is_active()
        with names.DispatchMode():
            assert names.mode_is_active()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 warns even of tensors that say so
def test_values_of_a_sparse_tensor_are_read_as_they_are_stored() -> None:
    with borrowed("storages") as names:
        twice = torch.sparse_coo_tensor(
            torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=False
        )
        assert names.stored_values(twice).tolist() == [1, 2]


def test_states_of_a_metric_are_read_and_put_back() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    with borrowed("torchmetrics_states") as names:
        source = torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.SumMetric()])
        assert names.is_collection(source)
        names.keep_apart(source)
        mean = next(part for part in source.modules() if isinstance(part, torchmetrics.MeanMetric))
        assert names.has_states(mean)
        names.keep_to_rank(mean)
        mean.update(torch.tensor([1.0, 3.0]))
        assert names.updates(mean) == 1
        assert names.reductions(mean).keys() == names.states(mean).keys()
        assert float(mean.compute()) == 2
        names.set_states(
            mean, {name: 2 * value for name, value in names.states(mean).items()} | {"weight": 1}, 2
        )
        assert names.updates(mean) == 2
        assert float(mean.compute()) == 8


UNTRIED_ON_THE_NEWEST = {"cuda_graphs", "elastic"}


"""Files with a name that was borrowed since that was last at hand. All others were tried on it."""


def test_operators_are_seen_and_known_to_be_of_backward() -> None:
    with borrowed("dispatch") as names:
        seen: list[tuple[Any, bool]] = []

        class Watching(names.DispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                seen.append((function, names.in_backward()))
                return function(*args, **(kwargs or {}))

        with Watching():
            number = torch.ones(2, requires_grad=True).exp().sum()
            number.backward()
            number.item()
        assert (torch.ops.aten.exp.default, False) in seen
        assert (torch.ops.aten.mul.Tensor, True) in seen
        assert seen[-1] == (names.READS_NUMBER, False)
        makes = {function: names.makes_memory(function) for function, _ in seen}
        assert makes[torch.ops.aten.ones.default]
        assert makes[torch.ops.aten.sum.default]
        for given in (torch.ops.aten.view.default, torch.ops.aten.copy_.default, torch.ops.aten.add.out):
            assert not names.makes_memory(given)
        for grown in (torch.ops.aten.resize_.default, torch.ops.aten.add.out):
            assert names.may_resize(grown)
        assert not names.may_resize(torch.ops.aten.view.default)
        assert not names.may_resize(torch.ops.aten.copy_.default)


def test_a_storage_moves_to_a_file_and_its_views_with_it() -> None:
    with borrowed("storages") as names:
        tensor = torch.arange(5000.0)
        view, kept = tensor[7:9], names.StorageWeakRef(tensor.untyped_storage())
        descriptor, nbytes = names.shared_file(tensor.untyped_storage())
        assert names.shared_file(tensor.untyped_storage()) == (descriptor, nbytes)
        assert nbytes >= tensor.nbytes
        os.pwrite(descriptor, struct.pack("f", -1), 8 * 4)
        assert view.tolist() == [7, -1]
        assert not kept.expired()
        del tensor, view
        assert kept.expired()


def test_storages_have_an_address_and_say_when_they_are_resized() -> None:
    with borrowed("storages") as names:
        tensor, resized = torch.ones(4), []
        storage = tensor.untyped_storage()
        assert names.address(tensor.view(2, 2).untyped_storage()) == names.address(storage)
        assert names.address(torch.ones(4).untyped_storage()) != names.address(storage)
        with names.resizing_told(lambda which: resized.append(names.address(which))):
            storage.resize_(64)
        storage.resize_(8)
        assert resized == [names.address(storage)]
        sparse = torch.eye(2).to_sparse()
        assert [part.numel() for part in names.memory_of(sparse)] == [4, 2]
        with warnings.catch_warnings(action="ignore"):  # these are in beta state
            rows = torch.eye(2).to_sparse_csr()
        assert [part.numel() for part in names.memory_of(rows)] == [3, 2, 2]
        assert names.memory_of(tensor) == (tensor,)


def test_fake_tensors_have_no_memory_and_can_be_exchanged() -> None:
    with borrowed("dispatch") as names:
        mode = names.fake_mode()
        with mode, names.exchangeable():
            assert names.active_fake_mode() is mode
            layer = nn.Linear(3, 4)
            assert names.is_fake(layer.weight)
            assert layer.to(torch.float64).weight.dtype == torch.float64
            layer(torch.ones(2, 3).double()).sum().backward()
            assert layer.weight.grad is not None
            assert layer.weight.grad.dtype == torch.float64
            with names.without_fakes():
                assert float(torch.ones(2).sum()) == 2
            with pytest.raises(RuntimeError) as failed:
                float(layer.weight.sum())
            assert names.depends_on_numbers(failed.value)
            with pytest.raises(RuntimeError) as failed:
                layer.weight.nonzero()
            assert names.depends_on_numbers(failed.value)


def test_operators_are_seen_below_autograd() -> None:
    with borrowed("dispatch") as names:
        seen = []

        class Mode(names.DispatchMode):  # type: ignore[misc, name-defined]
            def __torch_dispatch__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                seen.append(function)
                return function(*args, **(kwargs or {}))

        with Mode():
            nn.Linear(2, 2)(torch.ones(3, 2)).tanh()
        assert {torch.ops.aten.addmm.default, torch.ops.aten.tanh.default} <= set(seen)


def test_what_an_operator_writes_into_is_known() -> None:
    with borrowed("dispatch") as names:
        a, b = torch.ones(2), torch.ones(2)
        assert names.written(torch.ops.aten.add_.Tensor, (a, b), {})[0] is a
        assert not names.written(torch.ops.aten.add.Tensor, (a, b), {})
        assert names.written(torch.ops.aten.add.out, (a, b), {"out": b})[0] is b


def test_a_profiler_is_seen_and_records_other_threads() -> None:
    with borrowed("profiling") as names:

        def work() -> None:
            with torch.profiler.record_function("in a thread"):
                torch.ones(3).sum()

        go, thread = threading.Event(), threading.Thread(target=lambda: (go.wait(), work()))
        thread.start()
        assert not names.is_profiling()
        with torch.profiler.profile(**names.all_threads()) as made:
            assert names.is_profiling()
            go.set()
            thread.join()
        assert not names.is_profiling()
        assert "in a thread" in {event.key for event in made.key_averages()}


@pytest.mark.parametrize("file", FILES)
def test_every_file_says_what_it_was_tested_with(file: str) -> None:
    """The oldest and the newest torch that may be installed are among them."""
    lines = re.findall(r"^Tested with (\w+) ([\d., ]+)\.$", (BORROWED / f"{file}.py").read_text(), re.M)
    assert lines, f"src/evener/torch_internals/{file}.py does not say which versions it was tested with"
    tested = [versions.split(", ") for package, versions in lines if package == "torch"]
    oldest, newest = allowed()
    assert all(versions[0] == oldest for versions in tested)
    assert all(versions[-1] == newest for versions in tested) != (file in UNTRIED_ON_THE_NEWEST)


def test_make_tests_the_oldest_and_the_newest() -> None:
    makefile = (ROOT / "Makefile").read_text()
    found = re.findall(r"^(?:OLDEST|NEWEST) := (2\.\d+)\.\d+$", makefile, re.M)
    assert tuple(found) == allowed()


def allowed() -> tuple[str, str]:
    """The oldest and the newest minor version of torch by pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (line,) = [line for line in project["dependencies"] if line.startswith("torch>")]
    bounds = re.fullmatch(r"torch>=(2\.\d+),<2\.(\d+)", line)
    assert bounds, f"{line} does not end with the newest version that was tested"
    return bounds[1], f"2.{int(bounds[2]) - 1}"


def test_what_was_compiled_is_counted() -> None:
    with borrowed("compiling") as names:
        before = names.compiled_so_far()
        doubled = torch.compile(lambda x: x * 2 + 1, backend="eager")
        for size in (3, 5, 7):
            x = torch.ones(size)
            names.with_any_size(x)
            doubled(x)
        assert names.compiled_so_far().graphs - before.graphs == 1
        broken_in_two = torch.compile(_prints, backend="eager")
        broken_in_two(torch.ones(3))
        assert names.compiled_so_far().breaks > before.breaks


@pytest.mark.parametrize("name", ["inductor", "eager"])
def test_backends_have_functions(name: str) -> None:
    with borrowed("compiling") as names:
        made = names.backend_called(name, None, fallback_random=True)
        assert made == names.backend_called(name, None, fallback_random=True)
        assert names.name_of(made) == name
        assert names.without_cuda_graphs(made) is None
        if name == "inductor":
            assert made.config["fallback_random"] is True
            assert names.backend_called(name, "reduce-overhead").config["triton.cudagraphs"] is True
        else:
            seen = torch.compile(lambda x: x * 2, backend=lambda graph, examples: made(graph, examples))
            assert seen(torch.ones(3)).tolist() == [2, 2, 2]


def test_backends_are_asked_through_another() -> None:
    asked: list[str] = []
    with borrowed("compiling") as names:

        def around(backend: Any, graph: Any, examples: Any) -> Any:
            asked.append(names.name_of(backend))
            return backend(graph, examples)

        with names.asked_through(around):
            assert torch.compile(lambda x: x * 3, backend="eager")(torch.ones(3)).tolist() == [3, 3, 3]
        assert asked == ["eager"]
        assert torch.compile(lambda x: x * 4, backend="eager")(torch.ones(3)).tolist() == [4, 4, 4]
        assert asked == ["eager"]


def _prints(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


def test_workers_of_a_data_loader_are_processes_whose_deaths_a_handler_raises() -> None:
    with borrowed("data_workers") as names:
        data: Any = range(8)
        iterator = iter(DataLoader(data, num_workers=1, multiprocessing_context="fork"))
        names.end_by_kill(iterator)
        (worker,) = names.worker_processes(iterator)
        assert names.worker_processes(iter([])) == names.lost_workers(iterator) == []
        taken = signal.getsignal(signal.SIGCHLD)
        set_by_torch, signal_handling._SIGCHLD_handler_set = signal_handling._SIGCHLD_handler_set, False
        try:
            signal_handling._set_SIGCHLD_handler()
            assert names.is_torchs_handler(signal.getsignal(signal.SIGCHLD))
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            assert not names.is_torchs_handler(signal.SIG_DFL)
            worker.terminate()
            worker.join()
        finally:
            signal.signal(signal.SIGCHLD, taken)
            signal_handling._SIGCHLD_handler_set = set_by_torch
        assert worker.exitcode == -signal.SIGKILL
        assert names.lost_workers(iterator) == names.ended_workers(iterator) == [worker]


def test_what_a_worker_cannot_send_is_sent_as_its_error_and_kept_workers_are_known() -> None:
    with borrowed("data_workers") as names:
        data: Any = [lambda: None]
        kind: Any = {
            "num_workers": 1,
            "multiprocessing_context": "fork",
            "batch_size": None,
            "collate_fn": list.copy,
        }
        loader = DataLoader(
            [data], worker_init_fn=lambda _: names.tell_what_cannot_be_sent(), persistent_workers=True, **kind
        )
        assert names.kept_iterator(loader) is None
        iterator = iter(loader)
        assert names.kept_iterator(loader) is iterator
        with pytest.raises(RuntimeError, match="while a DataLoader worker sent a batch"):
            next(iterator)
