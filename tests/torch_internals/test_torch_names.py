"""Every private name that Evener borrows, exercised: where one goes, the failure says which file to repair.

Nothing of Evener is imported at the top, so that a name that is gone fails its own test alone.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import pickle
import re
import struct
import subprocess
import sys
import threading
import tomllib
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import profile
from torch.utils.data import DataLoader

from evener.distributed.loopback import OneMachine

ROOT = Path(__file__).parents[2]
BORROWED = ROOT / "src/evener/torch_internals"
FILES = sorted(path.stem for path in BORROWED.glob("*.py") if path.stem != "__init__")


@contextmanager
def borrowed(file: str, package: str = "torch_internals") -> Iterator[Any]:
    """The module; whatever fails in the block is told as the loss of its names."""
    path = f"src/evener/{package.replace('.', '/')}/{file}.py"
    try:
        yield importlib.import_module(f"evener.{package}.{file}")
    except Exception as error:
        pytest.fail(
            f"torch {torch.__version__} no longer has what {path} borrows, or it means something else: "
            f"{type(error).__name__}: {error}; see there for what it is used for"
        )


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = dist.group.WORLD
    assert found is not None
    yield found
    dist.destroy_process_group()


def test_the_largest_of_many_tensors_are_known() -> None:
    with borrowed("optimizers") as norms:
        numbers = [torch.tensor([1.0, -3.0]), torch.tensor([[float("nan"), 1.0]]), torch.tensor(2.0)]
        found = norms.largest(numbers)
        assert found[0] == 3
        assert found[1].isnan()
        assert found[2] == 2


def test_many_tensors_are_changed_in_one_call() -> None:
    with borrowed("foreach") as many:
        found, narrow = [torch.ones(2, dtype=torch.float64), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
        many.add_each(found, [2.0, 3.0])
        many.add_each(found, [each.clone() for each in found])
        many.subtract_each(found, [1.0, 2.0])
        many.copy_each(narrow, found)
        assert [each.tolist() for each in narrow] == [[5.0, 5.0], [4.0, 4.0, 4.0]]
        for function in (many.add_each, many.subtract_each, many.copy_each):
            function([], [])
        turned = torch.arange(6.0).view(2, 3).t()
        check = many.FiniteCheck()
        assert check.all_finite(
            [turned, torch.tensor(7.0), torch.ones(2, dtype=torch.float64), torch.ones(0)]
        )
        assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]
        for bad in (math.nan, math.inf, -math.inf):
            assert not check.all_finite([turned, torch.tensor([1.0, bad])])


def test_hooks_on_accumulated_gradients_are_known() -> None:
    with borrowed("autograd") as names:
        weight = torch.ones(2, requires_grad=True)
        assert not names.has_accumulation_hooks(weight)
        weight.register_post_accumulate_grad_hook(lambda _: None)
        assert names.has_accumulation_hooks(weight)


def test_hooks_on_gradients_are_taken_off_and_given_back() -> None:
    with borrowed("autograd") as names:
        weight, told = torch.ones(2, requires_grad=True), []
        assert names.hooks_of(weight) is None
        first = weight.register_hook(lambda gradient: gradient.clamp(max=0.5))
        weight.register_post_accumulate_grad_hook(lambda each: told.append(each.grad.tolist()))
        hooks = names.hooks_of(weight)
        names.give_hooks(weight, (None, {}))
        (3 * weight).sum().backward()
        assert (weight.grad.tolist(), told) == ([3.0, 3.0], [])
        names.give_hooks(weight, hooks)
        weight.grad = None
        (3 * weight).sum().backward()
        assert told == [[0.5, 0.5]]
        first.remove()
        (3 * weight).sum().backward()
        assert told[1:] == [[3.5, 3.5]]


def test_hooks_on_an_optimizer_are_known() -> None:
    with borrowed("optimizers") as names:
        for register in ("register_step_pre_hook", "register_step_post_hook"):
            optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)])
            assert not names.has_step_hooks(optimizer)
            getattr(optimizer, register)(lambda *_: None)
            assert names.has_step_hooks(optimizer)
            assert not names.has_step_hooks(names.without_hooks(optimizer))


def test_a_step_without_hooks_is_the_same() -> None:
    with borrowed("optimizers") as names:
        weight, calls = torch.ones(2, requires_grad=True), []
        optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        of_all = register_optimizer_step_pre_hook(lambda *_: calls.append("of all"))
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        weight.grad = torch.ones(2)
        names.step_without_hooks(optimizer)
        assert weight.tolist() == [0.5, 0.5]
        assert weight in optimizer.state
        assert not calls
        optimizer.step()
        of_all.remove()
        assert calls == ["of all", "before", "after"]


@pytest.mark.parametrize("has_scheduler", [False, True])
def test_a_step_without_a_range_is_the_same(has_scheduler: bool) -> None:
    with borrowed("optimizers") as names:
        weight = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.5)
        if has_scheduler:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        weight.grad = torch.ones(2)
        step = names.own_step(optimizer)
        assert isinstance(step, partial), "the range is left out"
        step()
        assert weight.tolist() == [0.5, 0.5]
        if has_scheduler:
            with warnings.catch_warnings(action="error"):  # PyTorch's scheduler warns if no step came before
                scheduler.step()
        with profile(acc_events=True) as recorded:
            names.own_step(optimizer)()
        assert "Optimizer.step#SGD.step" in {event.key for event in recorded.key_averages()}


def test_no_hook_of_a_step_is_left_out() -> None:
    with borrowed("optimizers") as names:
        weight, calls = torch.ones(2, requires_grad=True), []
        weight.grad = torch.ones(2)
        for register in ("register_step_pre_hook", "register_step_post_hook"):
            optimizer = torch.optim.SGD([weight])
            getattr(optimizer, register)(lambda *_: calls.append("its own"))
            names.own_step(optimizer)()
        for register_of_all in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            of_all = register_of_all(lambda *_: calls.append("of all"))
            names.own_step(torch.optim.SGD([weight]))()
            of_all.remove()
        assert calls == ["its own"] * 2 + ["of all"] * 2


def test_a_step_that_somebody_has_replaced_is_taken() -> None:
    with borrowed("optimizers") as names:
        weight, calls = torch.ones(2, requires_grad=True), []
        optimizer: Any = torch.optim.SGD([weight])
        before = optimizer.step

        def step(self: Any) -> None:
            calls.append("mine")
            before()

        optimizer.step = MethodType(step, optimizer)
        names.own_step(optimizer)()
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps it
        names.own_step(optimizer)()
        assert calls == ["mine"] * 2


def test_state_in_codes_is_known() -> None:
    with warnings.catch_warnings(action="ignore"):
        optim = pytest.importorskip("torchao.optim")
    with borrowed("quantized_state") as names:
        weight = nn.Parameter(torch.zeros(64, 64))
        optimizer = optim.AdamW8bit([weight], bf16_stochastic_round=True)
        state = names.new_state(optimizer, weight, True)
        assert names.is_quantized(state)
        assert names.makes_quantized(optimizer)
        assert names.rounds_by_chance(optimizer)
        assert not names.makes_quantized(torch.optim.AdamW([weight]))
        assert names.codes_of(state).keys() == {"codes", "scale"}
        assert names.block_size(state) == 256
        assert -1 < names.lowest_code(state) < -0.9
        assert not names.is_quantized(weight)


@pytest.mark.usefixtures("group")
def test_the_default_store_is_that_of_the_group() -> None:
    with borrowed("process_groups") as names:
        names.default_store().set("key", "value")
        assert names.default_store().get("key") == b"value"


def test_a_view_is_known() -> None:
    with borrowed("autograd") as names:
        weight = torch.ones(2, 3, requires_grad=True)
        assert names.is_view((weight * 2).T)
        assert not names.is_view(weight * 2)
        assert not names.is_view((weight * 2).T.clone())
        assert names.base_of(weight.T[0]) is weight
        assert names.base_of(weight) is None


@pytest.mark.usefixtures("group")
def test_a_group_is_made_under_a_given_name() -> None:
    with borrowed("process_groups") as names:
        import torch.testing._internal.distributed.fake_pg  # as parts of torch do; it registers a backend

        made = names.named_group("a_name_of_our_own", [0], "cpu:gloo,cuda:gloo", timedelta(seconds=10))
        assert dist.get_backend(made) == "gloo"
        assert made.group_name == "a_name_of_our_own"
        assert dist.get_process_group_ranks(made) == [0]
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=made)
        before = names.groups_open()
        dist.destroy_process_group(made)
        assert names.groups_open() == before - 1


@pytest.mark.usefixtures("group")
def test_ddp_logs_its_buckets() -> None:
    with borrowed("ddp") as names:
        logged = names.logged(DistributedDataParallel(nn.Linear(3, 2)))
        assert [int(size) for size in logged["bucket_sizes"].split(",")] == [32]


@pytest.mark.usefixtures("group")
def test_ddp_broadcasts_buffers_through_one_method(monkeypatch: pytest.MonkeyPatch) -> None:
    with borrowed("ddp") as names:
        told: list[int] = []
        original = getattr(DistributedDataParallel, names.BROADCAST_BUFFERS)

        def counted(model: Any, tensors: Any, *rest: Any) -> Any:
            told.append(len(tensors))
            return original(model, tensors, *rest)

        monkeypatch.setattr(DistributedDataParallel, names.BROADCAST_BUFFERS, counted)
        DistributedDataParallel(nn.BatchNorm1d(3))(torch.ones(2, 3))
        assert told == [3]
        DistributedDataParallel(nn.BatchNorm1d(3), **names.no_buffer_broadcast())(torch.ones(2, 3))
        assert told == [3]


@pytest.mark.usefixtures("group")
def test_ddp_leaves_parameters_alone() -> None:
    with borrowed("ddp") as names:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        names.leave_out(model, ["1.weight", "1.bias"])
        assert names.logged(DistributedDataParallel(model))["num_parameter_tensors"] == 2


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


def test_backward_comes_in_two_parts() -> None:
    with borrowed("autograd") as names:
        layer, given = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
        layer(given).sin().sum().backward()
        expected, weights = given.grad, [p.grad for p in layer.parameters()]
        given.grad = layer.weight.grad = layer.bias.grad = None
        outputs = layer(given).sin()
        groups = names.backward_of_inputs(
            [outputs], [torch.ones_like(outputs)], [given], list(layer.parameters())
        )
        torch.testing.assert_close(given.grad, expected)
        assert layer.weight.grad is None
        names.backward_of_weights(groups, list(layer.parameters()))
        torch.testing.assert_close([p.grad for p in layer.parameters()], weights)


def two_parts(names: Any, whole: bool) -> list[Any]:
    """Gradients of weights that are added, and of those used in two places, over two micro-batches of one sample."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(1, 3)) for _ in range(4)]
    first, second, twice, scale = weights
    for _ in range(2):
        given, bias = torch.randn(1, 3, requires_grad=True), 2 * twice
        alone = torch.tanh(scale * scale.exp() + bias)  # meets the input later
        output = ((given.clone() + first + second).square() * torch.tanh(alone + given + bias)).sum()
        if whole:
            output.backward()
        else:
            names.backward_of_weights(names.backward_of_inputs([output], None, [given], weights), weights)
    return [weight.grad for weight in weights]


def test_both_parts_of_backward_give_weights_their_own_gradients() -> None:
    with borrowed("autograd") as names:
        torch.testing.assert_close(two_parts(names, whole=False), two_parts(names, whole=True))


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


def test_what_is_to_run_after_backward_runs_then() -> None:
    with borrowed("autograd") as names:
        leaf, told = torch.ones(1, requires_grad=True), []
        total = leaf.sum()
        total.register_hook(lambda _: names.after_backward(lambda: told.append(leaf.grad is not None)))
        total.backward()
        assert told == [True]

        def fail() -> None:
            raise ValueError("told")

        total = leaf.sum()
        total.register_hook(lambda _: names.after_backward(fail))
        with pytest.raises(ValueError, match="told"):
            total.backward()


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


def test_a_write_in_place_is_counted() -> None:
    with borrowed("autograd") as names:
        tensor = torch.zeros(2)
        before = names.version(tensor)
        tensor.add_(1)
        assert names.version(tensor) > before


def test_backward_runs_within_a_context() -> None:
    with borrowed("autograd") as names:
        leaf, entered = torch.ones(2, requires_grad=True), []

        @contextmanager
        def around() -> Iterator[None]:
            entered.append("in")
            yield
            entered.append("out")

        leaf.register_hook(lambda gradient: entered.append("engine"))
        names.run_backward(around(), (3 * leaf).sum(), None, None, False, None)
        names.run_backward(around(), [2 * leaf], [torch.ones(2)], None, False, [leaf])
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [5, 5]
        (found,) = names.run_grad(around(), (3 * leaf).sum(), leaf, None, None, False, False)
        assert found.tolist() == [3, 3]
        ends = [torch.autograd.graph.get_gradient_edge(x) for x in (2 * leaf, leaf)]
        assert names.run_grad(around(), ends[:1], ends[1:], [torch.ones(2)], None, False, False)[0].sum() == 4
        assert entered == ["in", "engine", "out"] * 4


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 warns even of tensors that say so
def test_values_of_a_sparse_tensor_are_read_as_they_are_stored() -> None:
    with borrowed("storages") as names:
        twice = torch.sparse_coo_tensor(
            torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=False
        )
        assert names.stored_values(twice).tolist() == [1, 2]


def test_the_agent_tells_of_its_workers(tmp_path: Path) -> None:
    """Of which one ends with status 3."""
    with borrowed("elastic") as names:
        parameters = RendezvousParameters(
            "c10d", "localhost:0", "test", 1, 1, is_host=True, read_timeout=30, join_timeout=30
        )
        handler = get_rendezvous_handler(parameters)
        spec = WorkerSpec(
            "test", 1, handler, entrypoint=sys.executable, args=("-c", "exit(3)"), max_restarts=0
        )
        contexts: list[Any] = []
        agent = type("Told", (names.ElasticAgent,), {"started": lambda _, context: contexts.append(context)})(
            spec, DefaultLogsSpecs(log_dir=str(tmp_path))
        )
        result = agent.run()
        assert result.failures[0].exitcode == 3
        assert agent.context is contexts[0]
        assert names.failed(contexts[0]) == {0}
        handler.shutdown()


def test_the_agent_changes_the_number_of_its_workers_while_one_stays(tmp_path: Path) -> None:
    """Of two workers the first one ends; the other one becomes rank 0 of three."""
    with borrowed("elastic") as names:
        tells = "open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}-{os.environ[\"WORLD_SIZE\"]}', 'w')"
        ends = "os.environ['RANK'] == '0' and os.environ['WORLD_SIZE'] == '2'"
        args = ("-c", f"import os, sys, time\n{tells}\n({ends}) or time.sleep(1.5)", str(tmp_path))
        spec = WorkerSpec("test", 2, OneMachine(10), entrypoint=sys.executable, args=args, max_restarts=0)
        kept: list[dict[int, int]] = []

        def look(agent: Any) -> None:
            running = names.running(agent.context)
            if not kept and running.keys() == {1}:
                kept.append(running)
                agent.renumber([1], 3)
                kept.append(agent.context.pids())

        agent = type("Changes", (names.ElasticAgent,), {"follow_changes": look})(
            spec, DefaultLogsSpecs(log_dir=str(tmp_path / "logs"))
        )
        result = agent.run()
        assert not result.is_failed()
        assert sorted(result.return_values) == [0, 1, 2]
        assert kept[1][0] == kept[0][1]
        told = {path.name for path in tmp_path.iterdir() if path.is_file()}
        assert told == {"0-2", "1-2", "1-3", "2-3"}


def test_the_agent_meets_again_when_a_machine_of_the_round_is_silent(tmp_path: Path) -> None:
    class Silent(OneMachine):
        def next_rendezvous(self) -> Any:
            info = super().next_rendezvous()
            info._world_size = 2 if self._rounds == 1 else 1
            return info

    with borrowed("elastic") as names:
        for again in (True, False):
            spec = WorkerSpec(
                "test", 1, Silent(0.5), entrypoint=sys.executable, args=("-c", "pass"), max_restarts=0
            )
            agent = type("Meets", (names.ElasticAgent,), {"meets_again": lambda _, again=again: again})(
                spec, DefaultLogsSpecs(log_dir=str(tmp_path / str(again)))
            )
            if again:
                assert not agent.run().is_failed()
            else:
                with pytest.raises(dist.DistError):
                    agent.run()


def test_the_agent_starts_one_worker_in_place_of_another(tmp_path: Path) -> None:
    """That ends with status 1 the first time; the other one is left as it is."""
    with borrowed("elastic") as names:
        parameters = RendezvousParameters(
            "c10d", "localhost:0", "test", 1, 1, is_host=True, read_timeout=30, join_timeout=30
        )
        handler = get_rendezvous_handler(parameters)
        fails = "os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
        args = ("-c", f"import os, time\nassert not ({fails})\ntime.sleep(1)")
        spec = WorkerSpec("test", 2, handler, entrypoint=sys.executable, args=args, max_restarts=2)
        contexts: list[Any] = []
        seen: list[tuple[set[int], dict[int, int]]] = []

        def replaces(agent: Any, failures: dict[int, Any]) -> bool:
            seen.append((set(failures), names.running(agent.context)))
            return True

        acts = {"started": lambda _, context: contexts.append(context), "replaces": replaces}
        agent = type("Replaces", (names.ElasticAgent,), acts)(spec, DefaultLogsSpecs(log_dir=str(tmp_path)))
        result = agent.run()
        assert not result.is_failed()
        assert agent.restarts_done == 1
        assert agent.is_alone
        (failed, running), *rest = seen
        assert (failed, set(running), rest) == ({1}, {0}, [])
        assert len(contexts) == 1
        handler.shutdown()


ENDING = """
import atexit, os, threading, time
from evener.torch_internals import interpreter
atexit.register(print, "exit function", flush=True)
threading.Thread(target=lambda: (time.sleep(0.2), print("thread", flush=True))).start()
interpreter.join_threads()
interpreter.run_exit_functions()
os._exit(0)
"""


def test_an_interpreter_is_started_and_ended_as_python_does() -> None:
    with borrowed("interpreter") as names:
        command = [sys.executable, *names.flags(), "-W", "error", "-X", "utf8", "-c", ENDING]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == "thread\nexit function\n"
        flags = "from evener.torch_internals.interpreter import flags; print(*flags())"
        command = [sys.executable, "-W", "error", "-X", "utf8", "-c", flags]
        assert "-Werror" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_ask_an_object_for_its_pieces(tmp_path: Path) -> None:
    """``__create_write_items__`` and ``__create_chunk_list__``, and the planners that look an object up."""
    with borrowed("dcp_planner", "checkpoint") as names:
        slices = importlib.import_module("evener.components.sharded_tensor.shard_spec")
        pieces = (range(0, 1), range(1, 4))
        for index in (0, 1):
            own = torch.arange(4.0)[pieces[index].start : pieces[index].stop]
            state = {"model/a": names.ShardPiece(own, slices.ShardSpec("tensor", 0, pieces, index))}
            writer = checkpoint.FileSystemWriter(tmp_path / str(index))
            checkpoint.save(state, storage_writer=writer, planner=names.PieceSaver(), no_dist=True)
            metadata = checkpoint.FileSystemReader(tmp_path / str(index)).read_metadata()
            entry: Any = metadata.state_dict_metadata["model/a"]
            assert entry.size == torch.Size([4])
            assert [tuple(chunk.offsets) for chunk in entry.chunks] == [(pieces[index].start,)]
        whole = {"model/a": torch.arange(4.0)}
        writer = checkpoint.FileSystemWriter(tmp_path / "whole")
        checkpoint.save(whole, storage_writer=writer, planner=names.PieceSaver(), no_dist=True)
        room = names.ShardPiece(torch.zeros(3), slices.ShardSpec("tensor", 0, pieces, 1))
        reader = checkpoint.FileSystemReader(tmp_path / "whole")
        checkpoint.load({"model/a": room}, storage_reader=reader, planner=names.PieceLoader(), no_dist=True)
        assert room.held.tolist() == [1, 2, 3]


def test_machines_that_came_to_a_rendezvous_are_counted() -> None:
    parameters = RendezvousParameters("c10d", "localhost:0", "names", 1, 1, local_addr="127.0.0.1")
    handler = get_rendezvous_handler(parameters)
    with borrowed("elastic") as module:
        assert module.participants(None) is None
        assert module.participants(handler) == 0
        handler.next_rendezvous()
        assert module.participants(handler) == 1
    handler.shutdown()


def test_a_rendezvous_agrees_on_a_state_of_these_fields() -> None:
    with borrowed("elastic") as names:
        names_of_fields = {"round", "complete", "deadline", "closed"}
        names_of_fields |= {"participants", "wait_list", "redundancy_list", "last_heartbeats"}
        assert vars(names.RendezvousState()).keys() == names_of_fields
        node = names.NodeDesc("host", 1, 2)
        assert (node.addr, node.pid, node.local_id) == ("host", 1, 2)


def test_a_store_can_be_cloned() -> None:
    """Documented, but torch's types do not know it."""
    with borrowed("watchdog", "distributed.watchdog"):
        store: Any = dist.HashStore()
        dist.PrefixStore("a", store.clone()).set("key", "value")
        assert store.get("a/key") == b"value"


UNTRIED_ON_THE_NEWEST = {"elastic"}
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


def test_a_group_has_nobody_at_the_other_end() -> None:
    with borrowed("process_groups") as names:
        names.open_fake_group(3, 100)
        try:
            assert (dist.get_rank(), dist.get_world_size()) == (3, 100)
            assert dist.get_backend() == names.FAKE_BACKEND
            dist.all_reduce(torch.ones(2))
        finally:
            dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_ddp_can_be_kept_from_making_its_buckets_anew() -> None:
    with borrowed("ddp") as names:
        model = DistributedDataParallel(nn.Linear(2, 2))
        with names.buckets_kept():
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
        assert not model._get_ddp_logging_data().get("has_rebuilt_buckets")  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("group")
def test_a_process_group_is_freed_after_the_reducer_of_its_model() -> None:
    with borrowed("ddp") as names:
        freed: list[str] = []
        whole = dist.new_group([0])
        with names.groups_freed_last():
            model = DistributedDataParallel(nn.Linear(2, 2), process_group=whole)
        for thing, name in ((model.reducer, "reducer"), (model.logger, "logger"), (whole, "group")):
            weakref.finalize(thing, freed.append, name)
        model(torch.ones(1, 2)).sum().backward()
        dist.destroy_process_group(whole)
        del thing, whole, model
        gc.collect()
        assert sorted(freed[:2]) == ["logger", "reducer"]
        assert freed[2:] == ["group"]


@pytest.mark.usefixtures("group")
def test_a_model_that_holds_its_process_group_can_be_pickled() -> None:
    with borrowed("ddp") as names:
        with names.groups_freed_last():
            model = DistributedDataParallel(nn.Linear(2, 2))
            saved = pickle.dumps(model)
            again = pickle.loads(saved)
        assert b"evener." not in saved, "it can be loaded without Evener"
        again(torch.ones(1, 2)).sum().backward()
        for each in (model, again):
            names_of = list(vars(each))
            (held,) = (name for name, value in vars(each).items() if getattr(value, "group", None))
            assert names_of.index(held) > max(map(names_of.index, ("reducer", "logger")))


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


class Triples(torch.autograd.Function):
    """Whose backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


class TriplesToo(Triples):
    pass


class TriplesApart(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.factor = output.shape[0] + 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.factor


bound_before: Any = Triples.apply


@pytest.mark.parametrize(
    ("call", "function"),
    [
        pytest.param(lambda x: Triples.apply(x), Triples, id="by its class"),
        pytest.param(bound_before, Triples, id="bound before"),
        pytest.param(lambda x: TriplesToo.apply(x), TriplesToo, id="inherited"),
        pytest.param(lambda x: TriplesApart.apply(x), TriplesApart, id="with a context set up apart"),
    ],
)
def test_calls_of_an_autograd_function_are_seen(call: Any, function: Any) -> None:
    x, seen = torch.ones(2, requires_grad=True), []
    with borrowed("autograd") as names:
        with names.applied(lambda function, args: seen.append((function, len(args)))):
            call(x).sum().backward()
        with names.applied(lambda function, args: 7):
            assert call(x) == 7
    assert seen == [(function, 1)]
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]
    call(x).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]


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
