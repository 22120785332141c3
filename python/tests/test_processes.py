"""Several threads at once, forks and fresh processes."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
import time
from typing import Any

import pytest
import torch
from helpers import draw, gradients, native_calls
from torch import Tensor

from flash_qla import (
    PlanOptions,
    _modes,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    info,
    plan,
)

# torch's remarks about itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


def test_threads() -> None:
    """Eight threads with shapes of their own, forward and backward, give the bits of one thread."""
    instances = [draw(T=10 + 13 * i, K=8 * (i + 1), dtype=torch.bfloat16, gate="raw", seed=i) for i in range(8)]
    want = [gradients(chunk_gated_delta_rule, x) for x in instances]
    faults: list[str] = []
    start = threading.Barrier(len(instances))

    def work(index: int) -> None:
        try:
            start.wait()
            for i in range(20):
                which = (index + i) % len(instances)
                got = gradients(chunk_gated_delta_rule, instances[which])
                same = torch.equal(got[0], want[which][0]) and torch.equal(got[1], want[which][1])
                if not same or any(not torch.equal(got[2][name], x) for name, x in want[which][2].items()):
                    faults.append(f"thread {index}: instance {which} differs")
        except BaseException as error:
            faults.append(f"thread {index}: {error!r}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(instances))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads) and not faults, faults


def test_threads_share_the_kept_plans() -> None:
    """More different problems than are kept, asked for by several threads at once."""
    arguments = draw(T=3, K=4, V=4)
    want, _ = chunk_gated_delta_rule(**arguments)
    faults: list[str] = []

    def work(index: int) -> None:
        try:
            for i in range(150):
                made = plan(tokens=1 + (37 * i + index) % 400, heads_k=1, heads_v=2, dim_k=8, dim_v=8)
                if made.forward_workspace_bytes < 0 or not torch.equal(chunk_gated_delta_rule(**arguments)[0], want):
                    faults.append(f"thread {index}: step {i}")
        except BaseException as error:
            faults.append(f"thread {index}: {error!r}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads) and not faults, faults
    assert int(info()["plans kept"]) <= 256


def test_the_interpreter_lock_is_released() -> None:
    """Another Python thread runs while a call computes."""
    arguments = draw(T=4000, Hk=4, Hv=8, K=64, V=64)
    stop, moments = threading.Event(), []

    def look_at_the_clock() -> None:
        while not stop.is_set():
            moments.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=look_at_the_clock)
    thread.start()
    try:
        for _ in range(20):
            begin = time.perf_counter()
            chunk_gated_delta_rule(**arguments)
            quarter = (time.perf_counter() - begin) / 4
            # The middle half of the call: the interpreter has nothing to do there but to wait for the native code.
            if any(begin + quarter < moment < begin + 3 * quarter for moment in moments):
                return
    finally:
        stop.set()
        thread.join(timeout=60)
    raise AssertionError("no other thread ran during 20 calls")


def test_threads_of_torch() -> None:
    """torch.set_num_threads holds here too; where bits are promised for any number of threads, they are kept."""
    arguments = draw(T=200)
    arguments["options"] = PlanOptions(deterministic=True)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(gradients(chunk_gated_delta_rule, arguments))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert torch.equal(result[0], results[0][0])
        assert all(torch.equal(result[2][name], x) for name, x in results[0][2].items())


def test_what_reaches_the_native_call() -> None:
    """Threads, splits and promises, forward and backward."""

    def settings(**keywords: Any) -> list[tuple[Any, ...]]:
        with native_calls() as calls:
            gradients(lambda **x: chunk_gated_delta_rule(**x, **keywords), draw(T=5))
        assert len(calls) == 2
        return [(*arguments[-2:], modes_of(arguments)) for arguments in calls]

    def modes_of(arguments: tuple[Any, ...]) -> int:
        # The modes are followed by the scale, the only float.
        scale = next(i for i, x in enumerate(arguments) if isinstance(x, float))
        return arguments[scale - 1] & (_modes.DETERMINISTIC | _modes.BATCH_INVARIANT)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert settings() == [(3, 0, 0)] * 2
        assert settings(options=PlanOptions(threads=2)) == [(2, 0, 0)] * 2
    finally:
        torch.set_num_threads(before)
    assert settings(options=PlanOptions(threads=1, context_split=5)) == [(1, 5, 0)] * 2
    assert settings(options=PlanOptions(threads=1, context_split=5), auto_cp=False) == [(1, 1, 0)] * 2
    assert settings(options=PlanOptions(threads=1, deterministic=True)) == [(1, 0, _modes.DETERMINISTIC)] * 2
    assert settings(options=PlanOptions(threads=1, batch_invariant=True)) == [(1, 0, _modes.BATCH_INVARIANT)] * 2


def answer(seed: int) -> list[Tensor]:
    """Forward and backward, without the autograd engine, which torch does not let a fork use."""
    arguments = draw(seed=seed, T=130)
    tensors = [arguments[name] for name in ("q", "k", "v", "g", "beta")]
    gamma, A, o, _, final_state, _ = chunk_gated_delta_rule_fwd(*tensors)
    d_q, d_k, *_ = chunk_gated_delta_rule_bwd(*tensors[:3], gamma, tensors[4], A, o)
    return [o, final_state, d_q, d_k]


def child(queue: Any, seed: int) -> None:
    torch.set_num_threads(1)  # torch's own operators wait for ever in a fork of a process that had more
    try:
        queue.put([x.numpy() for x in answer(seed)])
    except BaseException as error:
        queue.put(repr(error))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes(method: str) -> None:
    """A child made after the parent has computed computes the same bits, and the parent still works afterwards."""
    want = answer(3)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=child, args=(queue, 3), daemon=True)
    process.start()
    try:
        got = queue.get(timeout=60)
        process.join(timeout=30)
    finally:
        process.kill()
    assert not isinstance(got, str), got
    assert len(got) == len(want) and all(torch.equal(torch.from_numpy(a), b) for a, b in zip(got, want))
    assert all(torch.equal(a, b) for a, b in zip(answer(3), want))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_after_several_threads() -> None:
    """GNU OpenMP's threads do not survive a fork: the child computes with one instead of waiting for the others.

    On numpy arrays, because torch's own operators would wait.
    """
    arguments = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in draw(T=300, Hk=4, Hv=8).items()}
    arguments["options"] = PlanOptions(threads=2)
    want, _ = chunk_gated_delta_rule(**arguments)
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        answer = b"failed"
        try:
            got, _ = chunk_gated_delta_rule(**arguments)
            answer = b"right" if abs(got - want).max() < 1e-5 else b"wrong"
        finally:
            os.write(writing, answer)
            os._exit(0)
    try:
        ready, _, _ = select.select([reading], [], [], 60)
        assert ready and os.read(reading, 10) == b"right"
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(reading)
        os.close(writing)
    again, _ = chunk_gated_delta_rule(**arguments)
    assert (again == want).all()


def test_data_loader_workers() -> None:
    """The usual reason for forks."""
    before = chunk_gated_delta_rule(**draw(seed=0))[1]
    loader = torch.utils.data.DataLoader(Samples(), batch_size=None, num_workers=2)
    states = list(loader)
    assert torch.equal(states[0], before) and len(states) == 4


class Samples(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return chunk_gated_delta_rule(**draw(seed=index))[1]
