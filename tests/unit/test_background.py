"""CUTLASS_W8A8_JIT=background: what serves a call, while which kernel is compiled, and what takes over when."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import cutlass_w8a8
from cutlass_w8a8 import acquire, background, calls, pipeline
from cutlass_w8a8.arch import SM80, SM90
from cutlass_w8a8.cache import users
from cutlass_w8a8.cache.location import Layout
from cutlass_w8a8.dispatch import configs_of, in_grid, problems
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.errors import ConfigError, LaunchError
from cutlass_w8a8.evt.epilogues import EpilogueSpec
from cutlass_w8a8.memo import Memo
from cutlass_w8a8.prepared import PreparedMM
from cutlass_w8a8.problem import Overlap
from cutlass_w8a8.request import Request
from cutlass_w8a8.runtime.loader import NotLoadedError
from cutlass_w8a8.spec import KernelSpec, QuantSpec
from cutlass_w8a8.support import Explanation, alternatives, choose
from cutlass_w8a8.worker import Outcome
from tests.unit.fake_gpu import WHERE, FakeGpu, on_gpu

N, K = 512, 1024
WEIGHT_TYPES = {DType.E4M3: torch.float8_e4m3fn, DType.INT8: torch.int8}


def request(m: int, n: int = N, k: int = K, operand: DType = DType.E4M3) -> Request:
    return Request(m, n, k, operand, DType.BF16, EpilogueSpec.of(), k, k, n, (m, n))


def best(m: int, n: int = N, k: int = K, **facts: Any) -> KernelSpec:
    """The kernel that dispatch wants for m rows."""
    return choose(request(m, n, k), SM90, None, sm_count=WHERE.sm_count, device=WHERE.name, **facts).spec


def operands(m: int, k: int = K) -> dict[str, torch.Tensor]:
    return {
        "a": on_gpu(torch.zeros(m, k).to(torch.float8_e4m3fn)),
        "b": on_gpu(torch.zeros(N, k).to(torch.float8_e4m3fn).t()),
        "scale_a": on_gpu(torch.ones(m, 1)),
        "scale_b": on_gpu(torch.ones(1, N)),
    }


def call(m: int, **options: Any) -> None:
    cutlass_w8a8.scaled_mm(**operands(m), **options)


SMALL, LARGE = 1, 4096


def test_shapes_of_these_tests_want_different_kernels() -> None:
    assert best(SMALL) != best(LARGE)


def test_only_the_first_kernel_of_a_kind_is_waited_for(gpu: FakeGpu) -> None:
    call(SMALL)
    assert gpu.blocking == [best(SMALL)] and gpu.ran == [best(SMALL).name] and not gpu.behind
    call(LARGE)
    call(LARGE)
    assert gpu.blocking == [best(SMALL)]
    assert gpu.ran == [best(SMALL).name] * 3
    assert gpu.behind.keys() == {best(LARGE)}
    gpu.finish(best(LARGE))
    call(LARGE)
    call(SMALL)
    assert gpu.ran[3:] == [best(LARGE).name, best(SMALL).name]
    assert gpu.blocking == [best(SMALL)]
    # Another kind, by its result's type, has nothing that could serve.
    call(SMALL, out_dtype=torch.float16)
    assert [spec.out for spec in gpu.blocking] == [DType.BF16, DType.FP16]


def test_exactly_the_waiting_signatures_are_resolved_anew(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[int] = []
    real = calls.resolve

    def resolve(a: torch.Tensor, *rest: Any) -> calls.Resolved:
        resolved.append(a.shape[0])
        return real(a, *rest)

    monkeypatch.setattr(calls, "resolve", resolve)
    sizes = (SMALL, LARGE, LARGE - 1, 96)
    assert best(LARGE) == best(LARGE - 1) != best(96) != best(SMALL)
    for _ in range(2):
        for m in sizes:
            call(m)
    assert resolved == [*sizes]
    gpu.finish(best(LARGE))
    for _ in range(2):
        for m in sizes:
            call(m)
    assert resolved == [*sizes, LARGE, LARGE - 1]
    assert gpu.behind.keys() == {best(96)}


def test_prepared_calls_take_over_too(gpu: FakeGpu) -> None:
    x = operands(LARGE)
    mm = cutlass_w8a8.prepare(x["b"], x["scale_b"], overlap="launch")
    call(SMALL)
    for _ in range(2):
        mm(x["a"], x["scale_a"])
    assert gpu.ran == [best(SMALL).name] * 3
    assert isinstance(mm, PreparedMM) and len(mm._kept) == len(mm._common) == 1
    gpu.finish(best(LARGE))
    assert not mm._kept and not mm._common
    mm(x["a"], x["scale_a"])
    assert gpu.ran[-1] == best(LARGE).name and len(mm._kept) == len(mm._common) == 1


def test_the_best_of_those_at_hand_serves(gpu: FakeGpu) -> None:
    """By the cost model, wherever they are: on disk or loaded."""
    facts: dict[str, Any] = {"sm_count": WHERE.sm_count, "device": WHERE.name}
    ranked = [each.spec for each in alternatives(request(LARGE), SM90, **facts)]
    assert ranked[0] == best(LARGE) and len(ranked) >= len(set(ranked)) > 10
    gpu.disk |= set(ranked[4:])
    call(LARGE)
    assert gpu.ran == [ranked[4].name] and gpu.loaded == [ranked[4]]
    assert gpu.blocking == [] and gpu.behind.keys() == {ranked[0]}


def test_a_kernel_on_disk_is_never_passed_over(gpu: FakeGpu) -> None:
    call(SMALL)
    gpu.disk.add(best(LARGE))
    call(LARGE)
    assert gpu.ran[-1] == best(LARGE).name and not gpu.behind


def test_what_the_driver_refuses_takes_nobodys_place(gpu: FakeGpu) -> None:
    ranked = [each.spec for each in alternatives(request(LARGE), SM90, sm_count=132, device=WHERE.name)]
    others = list(dict.fromkeys(ranked))
    gpu.disk |= {others[1], others[2]}
    gpu.unloadable.add(others[1])
    call(LARGE)
    assert gpu.ran == [others[2].name]


def test_alternatives_keep_the_rules() -> None:
    """Every one of them can compute the problem: K divided as it asks, blocks that a launch has, bits as asked."""
    facts: dict[str, Any] = {"sm_count": 132, "device": "NVIDIA H200"}
    for operand in (DType.E4M3, DType.INT8):
        every = [each.config for each in alternatives(request(64, operand=operand), SM90, **facts)]
        # That may include configurations which the fitting ones do not: meant for other M, or for a larger K.
        assert {config.compiled for config in every} == {
            config
            for config in configs_of(SM90, operand)
            if not K % config.k_multiple
            and not problems(KernelSpec(SM90, operand, DType.BF16, EpilogueSpec.of(), config))
        }
        assert every[0] == choose(request(64, operand=operand), SM90, None, **facts).config
    sliced = {each.config.slices for each in alternatives(request(64), SM90, **facts)}
    whole = {each.config.divides_k for each in alternatives(request(64), SM90, batch_invariant=True, **facts)}
    assert sliced > {1} and whole == {False}
    odd = {each.config.slices for each in alternatives(request(64, k=1040), SM90, **facts)}
    assert all(1040 % (16 * slices) == 0 for slices in odd)
    huge = {each.config for each in alternatives(request(1_100_000), SM90, **facts)}
    dropped = {each.config for each in alternatives(request(64), SM90, **facts)} - huge
    assert huge and all(in_grid(config, 1_100_000, N) for config in huge)
    assert any(not in_grid(config, 1_100_000, N) for config in dropped)
    for overlap in Overlap:
        first = next(iter(alternatives(request(256), SM90, overlap=overlap, **facts)))
        assert first == choose(request(256), SM90, None, overlap=overlap, **facts)
    portable = [each.config for each in alternatives(request(64, operand=DType.INT8), SM80)]
    assert {config.compiled for config in portable} == set(configs_of(SM80, DType.INT8))


def test_batch_invariant_calls_are_not_served_by_what_divides_k(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "device", lambda index: WHERE.__class__(0, (9, 0), 132, "NVIDIA H200"))
    facts: dict[str, Any] = {"sm_count": 132, "device": "NVIDIA H200"}
    sliced = next(each.spec for each in alternatives(request(LARGE), SM90, **facts) if each.config.divides_k)
    gpu.disk.add(sliced)
    call(LARGE)
    assert gpu.ran == [sliced.name]
    call(LARGE, batch_invariant=True)
    assert len(gpu.blocking) == 1 and not gpu.blocking[0].config.divides_k  # type: ignore[attr-defined]


def test_a_given_config_is_waited_for(gpu: FakeGpu) -> None:
    call(SMALL)
    config = best(LARGE).config.name
    call(SMALL, config=config)
    assert gpu.blocking == [best(SMALL), best(LARGE)] and gpu.ran[-1] == best(LARGE).name and not gpu.behind


@pytest.mark.parametrize("policy", ["block", "on"])
def test_other_policies_have_no_stand_ins(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_JIT", policy)
    call(SMALL)
    call(LARGE)
    assert gpu.blocking == [best(SMALL), best(LARGE)] and not gpu.behind


def test_a_failed_kernel_leaves_the_one_that_serves(gpu: FakeGpu) -> None:
    call(SMALL)
    call(LARGE)
    gpu.finish(best(LARGE), error="no memory")
    call(LARGE)
    call(LARGE - 1)
    calls.forget()
    call(LARGE)
    assert gpu.ran == [best(SMALL).name] * 5 and not gpu.behind and gpu.blocking == [best(SMALL)]


def test_what_cutlass_refuses_takes_nobodys_place(gpu: FakeGpu) -> None:
    """Then the caller waits for the kernel that dispatch wants, and does not see an error about another."""
    gpu.disk.add(best(SMALL))
    gpu.refused.add(best(SMALL))
    call(LARGE)
    assert gpu.blocking == [best(LARGE)] and gpu.ran == [best(LARGE).name]
    gpu.refused.add(best(LARGE))
    calls.forget()
    with pytest.raises(ConfigError, match="cannot run m=4096"):
        call(LARGE)


def test_threads_wait_for_one_first_kernel(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads with different shapes of a kind that has no kernel yet: one is compiled, and serves them all."""
    inside = threading.Event()
    real = gpu.build

    def build(spec: Any, **options: Any) -> Any:
        inside.wait(10)
        time.sleep(0.1)
        return real(spec, **options)

    monkeypatch.setattr(pipeline, "build", build)
    threads = [threading.Thread(target=call, args=(m,)) for m in (SMALL, 96, LARGE)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    inside.set()
    for thread in threads:
        thread.join(20)
    assert len(gpu.blocking) == 1 and set(gpu.ran) == {gpu.blocking[0].name} and len(gpu.ran) == 3
    assert gpu.behind.keys() == {best(SMALL), best(96), best(LARGE)} - set(gpu.blocking)


# CUDA graphs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["block", "background", "off"])
def test_nothing_is_compiled_or_loaded_during_capture(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setenv("CUTLASS_W8A8_JIT", policy)
    gpu.capturing = True
    gpu.disk.add(best(LARGE))
    for m in (SMALL, LARGE):
        with pytest.raises(NotLoadedError, match=r"graph is being captured.*make the same call once.*8a8\.warmup"):
            call(m)
    x = operands(LARGE)
    with pytest.raises(LaunchError, match=r"cutlass_w8a8\.warmup"):
        cutlass_w8a8.prepare(x["b"], x["scale_b"], overlap="launch")(x["a"], x["scale_a"])
    with pytest.raises(LaunchError, match=r"quantize_bf16_int8 is not loaded.*cutlass_w8a8\.warmup"):
        cutlass_w8a8.quantize_per_token(on_gpu(torch.zeros(4, 64, dtype=torch.bfloat16)), torch.int8)
    assert not gpu.blocking and not gpu.loaded and not gpu.behind and not gpu.ran


def test_loaded_kernels_serve_new_shapes_during_capture(gpu: FakeGpu) -> None:
    call(SMALL)
    cutlass_w8a8.quantize_per_token(on_gpu(torch.zeros(4, 64, dtype=torch.bfloat16)), torch.int8)
    gpu.capturing = True
    assert best(SMALL) == best(SMALL, n=N)
    loaded = list(gpu.loaded)
    call(SMALL, out=on_gpu(torch.empty(SMALL, N, dtype=torch.bfloat16)))
    cutlass_w8a8.quantize_per_token(on_gpu(torch.zeros(99, 4096, dtype=torch.bfloat16)), torch.int8)
    assert gpu.loaded == loaded and len(gpu.ran) == 4


def test_capture_right_after_the_better_kernel_came(gpu: FakeGpu) -> None:
    """It cannot be loaded then: what has served goes on, and gives way at the next call outside of a capture."""
    x = operands(LARGE)
    mm = cutlass_w8a8.prepare(x["b"], x["scale_b"], overlap="launch")
    call(SMALL)
    call(LARGE)
    mm(x["a"], x["scale_a"])
    gpu.finish(best(LARGE))
    gpu.capturing = True
    for _ in range(2):
        call(LARGE)
        mm(x["a"], x["scale_a"])
    assert gpu.ran == [best(SMALL).name] * 7
    gpu.capturing = False
    call(LARGE)
    mm(x["a"], x["scale_a"])
    assert gpu.ran[7:] == [best(LARGE).name] * 2
    gpu.capturing = True
    call(LARGE)
    assert gpu.ran[-1] == best(LARGE).name


def test_what_serves_is_not_evicted(fake_tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked for without leave to compile, a kernel is listed as used all the same; `find` alone lists nothing."""
    monkeypatch.setattr(acquire, "_loaded", {})
    monkeypatch.setattr(acquire, "load", lambda path, where, symbol: path)
    monkeypatch.setattr(acquire, "refuse_capture", lambda name, where: None)
    spec = QuantSpec(SM90, DType.BF16, DType.INT8)
    pipeline.build(spec)
    users.leave()
    layout = Layout(tmp_path / "cache")
    found = pipeline.find(spec)
    assert found is not None and users.in_use(layout) == set()
    assert acquire.entry_points(spec, WHERE, ("a",), compiling=False) == {"a": found.library}
    assert users.in_use(layout) == {found.directory.name}
    with pytest.raises(LookupError):
        acquire.entry_points(QuantSpec(SM80, DType.BF16, DType.INT8), WHERE, compiling=False)
    assert len(fake_tools.calls) == 1


# The queue ----------------------------------------------------------------------------------------------------------


class Bench:
    """A queue whose compilers do as told.

    Attributes:
        started: kernels that a compiler has begun with.
        most: compilers that ever ran at a time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
        self.started: list[Any] = []
        self.errors: dict[Any, str] = {}
        self.release = threading.Event()
        self.most = self._now = 0
        self.lock = threading.Lock()
        bench = self

        class Worker:
            def __init__(self, nice: int) -> None:
                assert nice > 0

            def build(self, spec: Any) -> Outcome:
                with bench.lock:
                    bench.started.append(spec)
                    bench._now += 1
                    bench.most = max(bench.most, bench._now)
                bench.release.wait(20)
                with bench.lock:
                    bench._now -= 1
                if bench.errors.get(spec) == "raise":
                    raise RuntimeError("a defect")
                return Outcome(spec, error=bench.errors.get(spec, ""))

            def close(self) -> None:
                pass

        monkeypatch.setattr(background, "Worker", Worker)
        monkeypatch.setattr(background, "default_jobs", lambda: jobs)
        monkeypatch.setattr(background, "_queue", background._Queue())


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.005)


SPECS = [KernelSpec(SM90, DType.E4M3, DType.BF16, EpilogueSpec.of(), c) for c in configs_of(SM90, DType.E4M3)][:6]


def test_each_once_and_so_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, jobs=2)
    first = [background.compile_behind(spec) for spec in SPECS]
    assert [background.compile_behind(spec) for spec in SPECS] == first
    wait_for(lambda: len(bench.started) == 2)
    bench.release.set()
    wait_for(lambda: not background._queue.running)
    assert sorted(bench.started, key=SPECS.index) == SPECS and bench.most == 2
    # Idle, it has no threads; and goes on when there is more to do.
    wait_for(lambda: not any(thread.name == "cutlass_w8a8 compiler" for thread in threading.enumerate()))
    again = background.compile_behind(SPECS[0])
    assert again is not None and again is not first[0]
    wait_for(lambda: not background._queue.running)


@pytest.mark.parametrize("how", ["log in /cache/failed/kernel", "raise"])
def test_failures_are_told_once_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    bench = Bench(monkeypatch, jobs=1)
    bench.errors[SPECS[0]] = how
    compilation = background.compile_behind(SPECS[0])
    memo: Memo[str, int] = Memo()
    assert compilation is not None
    compilation.keep(memo, "x", 1)
    with caplog.at_level(logging.WARNING, "cutlass_w8a8"):
        bench.release.set()
        wait_for(lambda: caplog.records)
    assert background.compile_behind(SPECS[0]) is None and bench.started == [SPECS[0]]
    assert len(caplog.records) == 1
    assert SPECS[0].name in caplog.text and ("a defect" if how == "raise" else how) in caplog.text
    assert memo == {"x": 1} and not memo.superseded
    # And what else waits is compiled all the same.
    other = background.compile_behind(SPECS[1])
    assert other is not None
    wait_for(lambda: not background._queue.running)
    compilation.keep(memo, "y", 2)
    assert memo == {"x": 1, "y": 2}


def test_what_is_kept_too_late_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may be there before the call that waits for it is remembered."""
    compilation = background.Compilation(SPECS[0])
    memo: Memo[str, int] = Memo()
    compilation.keep(memo, "early", 1)
    memo.keep("other", 3)
    compilation.end(succeeded=True)
    compilation.keep(memo, "late", 2)
    assert memo == {"other": 3} and memo.superseded == {"early": 1}
    memo.keep("early", 4)
    assert memo.superseded == {}


def test_a_forked_child_waits_for_nothing_that_runs_in_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, jobs=1)
    compilation = background.compile_behind(SPECS[0])
    background.compile_behind(SPECS[1])
    memo: Memo[str, int] = Memo()
    assert compilation is not None
    compilation.keep(memo, "x", 1)
    wait_for(lambda: bench.started)
    # Held by other threads of the parent at that moment, they would be held for ever in the child.
    with background._queue.lock, compilation._lock:
        child = os.fork()
        if not child:
            try:
                right = not memo and memo.superseded == {"x": 1} and not background._queue.running
                fresh = background.compile_behind(SPECS[0])
                right = right and fresh is not None and fresh is not compilation
                memo.keep("y", 2)
                bench.release.set()
                deadline = time.monotonic() + 10
                while background._queue.running and time.monotonic() < deadline:
                    time.sleep(0.01)
                os._exit(0 if right and not background._queue.running else 1)
            except BaseException:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memo == {"x": 1}
    bench.release.set()
    wait_for(lambda: not background._queue.running)
    assert not memo


def test_memos_are_bounded() -> None:
    memo: Memo[int, int] = Memo(3)
    for number in range(5):
        memo.keep(number, number)
    assert list(memo) == [2, 3, 4]
    for number in range(5):
        memo.supersede(number)
    assert not memo and list(memo.superseded) == [2, 3, 4]
    memo.forget()
    assert not memo.superseded


def test_explanations_name_what_acquire_serves(gpu: FakeGpu) -> None:
    chosen = Explanation(best(LARGE), best(LARGE).config)
    gpu.disk.add(best(SMALL))
    other = Explanation(best(SMALL), best(SMALL).config)
    served = acquire.gemm(chosen, WHERE, lambda: [chosen, other])
    assert (served.spec, served.config) == (other.spec, other.config)
    assert served.awaits is gpu.behind[best(LARGE)]
    quantised = acquire.entry_points(QuantSpec(SM90, DType.BF16, DType.INT8), WHERE, ("a", "b"))
    assert quantised.keys() == {"a", "b"}
