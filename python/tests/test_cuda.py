"""CUDA tensors: results against the oracle, streams, graphs, threads, processes, refusals. Skipped without a GPU.

The case tables run on the GPU in C++ (`flashqla check --device cuda`); here a sample of each goes through torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_cases
import torch
from helpers import Arguments, assert_close, draw, gradients, head_axis, native_calls, oracle, oracle_gradients, weights
from pools import HV, NAN, K, V, inputs, pool_of
from torch import Tensor

import flash_qla
from flash_qla import (
    PlanOptions,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    fused_recurrent_gated_delta_rule,
    gated_delta_rule_commit,
    gated_delta_rule_decode,
    gated_delta_rule_mixed,
    gated_delta_rule_verify,
    testing,
)


def why_not() -> str:
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    built = flash_qla.info()["cuda in this package"]
    return "" if built.startswith("yes") else f"CUDA in this package: {built}"


def has_backward() -> bool:
    try:
        flash_qla.plan(tokens=64, heads_k=1, heads_v=1, dim_k=64, dim_v=64, device="cuda", backward=True)
    except NotImplementedError:
        return False
    return True


def close(
    name: str, got: Tensor, want: Tensor, dtype: torch.dtype, k: int, backward: bool = False, times: float = 1
) -> None:
    """Each head by the GPU's tolerance of `flashqla check` (cli/cases/tolerance.cpp), `times` that where `want` is no
    exact value either. dtype and k: of q; backward: the gradient of the tensor with this name."""
    heads = want.shape[head_axis(name, want)]
    line = f"{'bwd' if backward else 'fwd'}:t64,hk1,hv{heads},k{k},v64,{NAMES[dtype]},gate=log"
    output = f"d_{name}" if backward else name
    allowed = testing.tolerance(line, output, NAMES[got.dtype], max(want.numel() // heads, 1), "cuda")
    assert_close(name, got.cpu(), want.cpu(), times * allowed.per_head, allowed.floor)


REASON = why_not()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    # torch's remarks about itself.
    pytest.mark.filterwarnings("ignore:Deterministic behavior was enabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
BACKWARD = not REASON and has_backward()


NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def on_gpu(arguments: Arguments, device: str = "cuda") -> Arguments:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}


def on_cpu(arguments: Arguments) -> Arguments:
    return {name: x.cpu() if isinstance(x, Tensor) else x for name, x in arguments.items()}


def rows(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cuda")


# ------------------------------------------------------------------------------------------ against the oracle


@pytest.mark.parametrize("line", [line for line in test_cases.SELECTED[::3] if "backend=" not in line])
def test_line(line: str) -> None:
    if line.startswith("bwd") and not BACKWARD:
        pytest.skip("no backward pass on CUDA in this package")
    test_cases.check_line(line, "cuda")


@pytest.mark.parametrize("line", [line for line in test_cases.SELECTED_POOL if "backend=" not in line])
def test_line_on_a_pool(line: str) -> None:
    test_cases.check_line_on_a_pool(line, "cuda")


@pytest.mark.parametrize("line", [line for line in test_cases.SELECTED_DECODE[::2] if "backend=" not in line])
def test_decode_line(line: str) -> None:
    test_cases.check_decode_line(line, "cuda")


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_forward(function: Any, dtype: torch.dtype, packed: bool) -> None:
    """Both functions, raw gates and all flags; empty sequences and a tail of unused tokens when packed."""
    arguments = draw(
        B=2,
        T=140,
        lengths=[70, 0, 1, 65] if packed else None,
        index_dtype=torch.int32,
        dtype=dtype,
        gate="raw",
        beta="negative",
        l2norm=True,
        state_v_first=packed,
    )
    o, final_state = function(**on_gpu(arguments))
    assert o.device == final_state.device == torch.device("cuda", 0)
    assert o.dtype == dtype and final_state.dtype == torch.float32
    want = oracle(arguments)
    close("o", o, want[0], dtype, k=32)
    close("final_state", final_state, want[1], dtype, k=32)
    if packed:
        assert not o[:, 136:].any()


def test_views_of_one_tensor() -> None:
    """q, k and v as slices of a projection are read in place; another last stride is copied."""
    arguments = draw(T=30, h0=False)
    q, k, v = (arguments[name] for name in "qkv")
    packed = torch.cat([x.flatten(2) for x in (q, k, v)], -1).cuda()
    parts = packed.split([q[0, 0].numel(), k[0, 0].numel(), v[0, 0].numel()], -1)
    views = {name: part.view(x.shape) for name, part, x in zip("qkv", parts, (q, k, v))}
    on = on_gpu(arguments)
    want, _ = chunk_gated_delta_rule(**on)
    with native_calls() as calls:
        got, _ = chunk_gated_delta_rule(**{**on, **views})
    assert torch.equal(got, want) and len(calls) == 1
    turned = on["k"].transpose(2, 3).contiguous().transpose(2, 3)
    got, _ = chunk_gated_delta_rule(**{**on, "k": turned})
    assert torch.equal(got, want)


def test_the_two_passes() -> None:
    """gamma, A and the chunk states of the TileLang package's contract."""
    arguments = draw(T=150, lengths=[70, 0, 63])
    names = ("q", "k", "v", "g", "beta")
    options = {"initial_state": arguments["initial_state"], "cu_seqlens": arguments["cu_seqlens"], "output_h": True}
    want = chunk_gated_delta_rule_fwd(*(arguments[name] for name in names), **options)
    got = chunk_gated_delta_rule_fwd(*(arguments[name].cuda() for name in names), **on_gpu(options))
    for a, b in zip(got[:5], want[:5]):
        assert a.is_cuda and a.dtype == b.dtype and a.shape == b.shape
        assert float((a.cpu() - b).norm()) <= 3e-4 * float(b.norm())
    if not BACKWARD:
        return
    d_o, d_state = weights(want[2], want[4])
    results = []
    for x, (gamma, A) in ((arguments, want[:2]), (on_gpu(arguments), got[:2])):
        d_o, d_state = d_o.to(x["q"].device), d_state.to(x["q"].device)
        options = {"initial_state": x["initial_state"], "cu_seqlens": x["cu_seqlens"]}
        results.append(chunk_gated_delta_rule_bwd(x["q"], x["k"], x["v"], gamma, x["beta"], A, d_o, d_state, **options))
    for name, b, a in zip(("q", "k", "v", "beta", "g", "initial_state"), *results):
        assert a.is_cuda
        close(name, a, b, torch.float32, k=32, backward=True)


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [None, [70, 0, 30]], ids=["fixed", "packed"])
@pytest.mark.parametrize("size", [32, 128])
def test_gradients(function: Any, dtype: torch.dtype, lengths: list[int] | None, size: int) -> None:
    """Of everything that can have one, through o and the final state; without a backward pass a sentence."""
    sizes = {"B": 2, "T": 150, "K": size, "V": size, "dtype": dtype, "lengths": lengths}
    arguments = draw(**sizes, gate="raw", beta="logit", l2norm=True, state_v_first=lengths is not None)
    on = on_gpu(arguments)
    if BACKWARD:
        got, want = gradients(function, on), oracle_gradients(arguments)
        assert set(got[2]) == set(want[2]) and len(want[2]) == 8
        for name, x in want[2].items():
            assert got[2][name].is_cuda
            close(name, got[2][name], x, dtype, size, backward=True)
        return
    q = on["q"].requires_grad_()
    o, _ = chunk_gated_delta_rule(**on)
    assert o.requires_grad and o.is_cuda
    with pytest.raises(NotImplementedError, match="no backward pass yet"):
        torch.autograd.grad(o.sum(), q)
    x = [on[name].detach() for name in ("q", "k", "v", "g", "beta")]
    with pytest.raises(NotImplementedError, match="no backward pass yet"):
        chunk_gated_delta_rule_bwd(*x, None, torch.ones_like(x[2]))


# ---------------------------------------------------------------------------------------------------- serving


@pytest.mark.parametrize("pad_slots", ["negative", "non_positive"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_decode_on_a_pool(pad_slots: str, index_dtype: torch.dtype) -> None:
    """As on the CPU; garbage and canaries around what is used stay as they are."""
    slots = [3, -1, 5, -1, 2, 7, 0, -1]
    x, pool = inputs(8, 3, dtype=torch.bfloat16), pool_of(9)
    whole = torch.full((11, 3 + HV * K * V + 5), 7.0, device="cuda")
    inside = whole[1:10, 3 : 3 + HV * K * V].view(9, HV, K, V)
    inside.copy_(pool)
    inside[[1, 4, 6, 8]] = NAN
    live = [n for n, slot in enumerate(slots) if slot >= 0 and not (slot == 0 and pad_slots == "non_positive")]
    out = torch.full((8, 3, 2 * HV, V), 7.0, device="cuda", dtype=torch.bfloat16)[:, :, ::2]
    indices = torch.tensor(slots, dtype=index_dtype)
    version = inside._version
    o = gated_delta_rule_decode(**on_gpu(x), state=inside, state_indices=indices.cuda(), pad_slots=pad_slots, out=out)
    assert o is out and inside._version > version
    want = gated_delta_rule_decode(**x, state=pool, state_indices=indices, pad_slots=pad_slots)
    close("o", o, want, torch.bfloat16, K, times=2)
    used = [slots[n] for n in live]
    close("state", inside[used], pool[used], torch.bfloat16, K, times=2)
    assert bool(inside[[1, 4, 6, 8]].isnan().all())
    inside[:] = 7.0
    assert bool((whole == 7.0).all())


def test_verification_and_commit() -> None:
    """A tree of draft tokens into a buffer, then the accepted ones into the pool; the CPU's results."""
    x, pool = inputs(3, 4), pool_of(6)
    results = []
    for device in ("cpu", "cuda"):
        state, buffer = pool.to(device, copy=True), torch.full((4, 5, HV, K, V), NAN, device=device)
        slots = torch.tensor([4, 0, -1], device=device)
        places = torch.tensor([2, 0, 1], device=device, dtype=torch.int32)
        o = gated_delta_rule_verify(
            **on_gpu(x, device),
            state=state,
            state_indices=slots,
            intermediate_states=buffer,
            intermediate_indices=places,
            parent_tokens=torch.tensor([[-1, 0, 0, 2]] * 3, device=device),
        )
        assert torch.equal(state.cpu(), pool)
        gated_delta_rule_commit(state, slots, buffer, torch.tensor([3, 0, 2], device=device), places)
        results.append((o.cpu(), state.cpu(), buffer.cpu()))
    for got, want in zip(results[1], results[0]):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("decode_rows", [0, 3])
def test_mixed(decode_rows: int) -> None:
    lengths, slots = [1, 3, 1, 70, 0, 129, 64, 5], torch.tensor([4, 0, 7, 2, 9, 1, -1, 3])
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    x = inputs(1, int(offsets[-1]) + 3, dtype=torch.bfloat16)
    results = []
    for device in ("cpu", "cuda"):
        state, checkpoints = pool_of(10).to(device), torch.full((6, HV, K, V), NAN, device=device)
        o = gated_delta_rule_mixed(
            **on_gpu(x, device),
            cu_seqlens=offsets.to(device),
            state=state,
            state_indices=slots.to(device),
            decode_rows=decode_rows,
            checkpoints=checkpoints,
            checkpoint_every=64,
        )
        results.append((o, state, checkpoints))
    for name, got, want in zip(("o", "state", "state"), results[1], results[0]):
        assert got.is_cuda
        close(name, got.nan_to_num(5), want.nan_to_num(5), torch.bfloat16, K, times=2)
    assert torch.equal(results[1][1][[5, 6, 8, 9]].cpu(), pool_of(10)[[5, 6, 8, 9]])


# ----------------------------------------------------------------------------------------- streams and threads


def busy(milliseconds: float = 50) -> None:
    """Keeps the current stream at work for about so long."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


@contextlib.contextmanager
def on_a_busy_stream() -> Iterator[None]:
    """A stream of its own with work before what is called, which must not wait for the GPU. Afterwards all is done."""
    torch.cuda.synchronize()
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            busy()
            yield
            done.record()
        assert not done.query(), "the call waited for the GPU"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()


@pytest.mark.parametrize("state", [False, True])
def test_calls_do_not_wait_and_follow_the_current_stream(state: bool) -> None:
    """On a stream that is busy before the inputs exist: another stream would read what was there before."""
    x, pool = on_gpu(inputs(2, 1)), pool_of(4).cuda()
    late = {name: value.clone() for name, value in x.items()}
    want_pool = pool.clone()

    def call(x: Arguments, pool: Tensor) -> Tensor:
        if state:
            return gated_delta_rule_decode(**x, state=pool)
        return chunk_gated_delta_rule(**x)[0]

    want = call(x, want_pool)
    for value in late.values():
        value.fill_(NAN)
    with on_a_busy_stream():
        for name, value in late.items():
            value.copy_(x[name])
        got = call(late, pool)
    assert torch.equal(got, want)
    assert not state or torch.equal(pool, want_pool)


def test_gradients_do_not_wait_and_follow_their_stream() -> None:
    """The gradients run where the forward pass did, behind what is queued there."""
    if not BACKWARD:
        pytest.skip("no backward pass on CUDA in this package")
    names = ("q", "k", "v", "g", "beta")
    x = on_gpu(draw(T=100, dtype=torch.bfloat16, h0=False))
    tensors = [x[name].requires_grad_() for name in names]
    d_o = torch.randn_like(x["v"])
    want = torch.autograd.grad(chunk_gated_delta_rule(*tensors)[0], tensors, d_o)
    late = [torch.full_like(value, NAN) for value in tensors]
    late_d_o = torch.full_like(d_o, NAN)
    with on_a_busy_stream():
        late_d_o.copy_(d_o)
        for value, source in zip(late, tensors):
            value.copy_(source.detach())
        leaves_ = [value.requires_grad_() for value in late]
        got = torch.autograd.grad(chunk_gated_delta_rule(*leaves_)[0], leaves_, late_d_o)
    for a, b in zip(got, want):
        assert torch.equal(a, b)


def test_threads_with_streams_of_their_own() -> None:
    instances = [on_gpu(draw(T=10 + 13 * i, K=16 * (i + 1), dtype=torch.bfloat16, seed=i)) for i in range(4)]
    want = [chunk_gated_delta_rule(**x) for x in instances]
    torch.cuda.synchronize()
    faults: list[str] = []
    start = threading.Barrier(len(instances))

    def work(index: int) -> None:
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(50):
                    which = (index + i) % len(instances)
                    got = chunk_gated_delta_rule(**instances[which])
                    if not all(torch.equal(a, b) for a, b in zip(got, want[which])):
                        faults.append(f"thread {index}: instance {which} differs")
        except BaseException as error:
            faults.append(f"thread {index}: {error!r}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(instances))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads) and not faults, faults


def test_memory_comes_back() -> None:
    """Workspaces are torch's, and nothing is kept."""
    x = on_gpu(draw(T=200, lengths=[100, 60], dtype=torch.bfloat16))
    chunk_gated_delta_rule(**x)
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        chunk_gated_delta_rule(**x)
    assert torch.cuda.memory_allocated() == before
    bytes_of_plan = flash_qla.plan(
        tokens=200, sequences=2, heads_k=2, heads_v=4, dim_k=32, dim_v=16, device="cuda"
    ).forward_workspace_bytes
    torch.cuda.reset_peak_memory_stats()
    o, final_state = chunk_gated_delta_rule(**x)
    outputs = sum(-(-t.numel() * t.element_size() // 512) * 512 for t in (o, final_state))
    assert torch.cuda.max_memory_allocated() >= before + outputs + bytes_of_plan


# ------------------------------------------------------------------------------------------------------ graphs


def test_graph_of_a_decode_step() -> None:
    """Captured once with padding rows; replayed with other inputs, slots and row lengths."""
    x, pool = on_gpu(inputs(1, 12)), pool_of(9).cuda()
    slots, offsets = torch.full((6,), -1, device="cuda"), torch.zeros(7, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    before = pool.clone()
    with torch.cuda.graph(graph):
        o = gated_delta_rule_decode(**x, state=pool, state_indices=slots, cu_seqlens=offsets)
    for seed, lengths, where in ((1, [2, 1, 0, 4], [3, 8, 5, 0]), (2, [1, 1, 1, 1, 1, 5], [1, 0, -1, 3, 2, 7])):
        fresh = inputs(1, 12, seed=seed)
        for name, value in x.items():
            value.copy_(fresh[name])
        padding = 6 - len(lengths)
        slots.copy_(torch.tensor(where + [-1] * padding))
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        offsets.copy_(torch.tensor(ends + [ends[-1]] * padding))
        o.fill_(NAN)
        graph.replay()
        want_pool = before.clone()
        want = gated_delta_rule_decode(**x, state=want_pool, state_indices=slots, cu_seqlens=offsets)
        assert torch.equal(o, want) and torch.equal(pool, want_pool)
        before = pool.clone()


def test_graph_of_packed_sequences() -> None:
    """The chunk function and a mixed batch in one graph; other lengths in the replays, more and less than before."""
    x, pool = on_gpu(inputs(1, 200, dtype=torch.bfloat16)), pool_of(5).cuda()
    offsets, slots = rows(0, 50, 100, 150), rows(0, 1, 2)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        o, final_state = chunk_gated_delta_rule(**x, cu_seqlens=offsets, output_final_state=True)
        mixed = gated_delta_rule_mixed(**x, cu_seqlens=offsets, state=pool, state_indices=slots)
    for lengths, where in (([200, 0, 0], [4, 3, 2]), ([1, 64, 65], [2, -1, 0]), ([0, 0, 0], [1, 2, 3])):
        offsets.copy_(torch.tensor([0, *lengths]).cumsum(0))
        slots.copy_(torch.tensor(where))
        start = pool.clone()
        o.fill_(NAN), final_state.fill_(NAN), mixed.fill_(NAN)
        graph.replay()
        want = chunk_gated_delta_rule(**x, cu_seqlens=offsets, output_final_state=True)
        want_mixed = gated_delta_rule_mixed(**x, cu_seqlens=offsets, state=start, state_indices=slots)
        assert torch.equal(o, want[0]) and torch.equal(final_state, want[1])
        assert torch.equal(mixed, want_mixed) and torch.equal(pool, start)
        want_o, _ = oracle({**on_cpu(x), "cu_seqlens": offsets.cpu(), "output_final_state": True})
        close("o", o, want_o, torch.bfloat16, K)


def test_graph_of_a_training_step() -> None:
    """Forward and backward pass in one graph, packed; other lengths in the replays."""
    if not BACKWARD:
        pytest.skip("no backward pass on CUDA in this package")
    x = on_gpu(draw(T=200, lengths=[50, 50, 50], dtype=torch.bfloat16, h0=False, index_dtype=torch.int32))
    names, offsets = ("q", "k", "v", "g", "beta"), x["cu_seqlens"]
    d_o = torch.randn_like(x["v"])

    def step() -> tuple[Tensor, ...]:
        tensors = [x[name].detach().requires_grad_() for name in names]
        o, _ = chunk_gated_delta_rule(*tensors, cu_seqlens=offsets)
        return torch.autograd.grad(o, tensors, d_o)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # torch's engine makes its threads
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = step()
    for lengths in ([200, 0, 0], [1, 64, 65], [0, 0, 0]):
        offsets.copy_(torch.tensor([0, *lengths]).cumsum(0))
        for value in got:
            value.fill_(NAN)
        graph.replay()
        for a, b in zip(got, step()):
            assert torch.equal(a, b)


def script(code: str, timeout: float = 100) -> str:
    """Runs code in a fresh process."""
    here = os.path.dirname(__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH", ""))))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_capture_is_the_first_call() -> None:
    """Nothing has to be warmed up: plan, module and kernels are loaded while the stream is being captured."""
    printed = script(
        """
        import torch
        from pools import inputs, pool_of
        from flash_qla import gated_delta_rule_decode
        x, pool = {name: value.cuda() for name, value in inputs(3, 1).items()}, pool_of(4).cuda()
        start = pool.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = gated_delta_rule_decode(**x, state=pool)
        graph.replay()
        want = gated_delta_rule_decode(**x, state=start)
        print(torch.equal(o, want), torch.equal(pool, start))
        """
    )
    assert printed.split() == ["True", "True"]


def test_first_call(tmp_path: Path) -> None:
    """The first call of a process, torch at work on the GPU and the modules imported, takes less than a tenth of a
    second: the driver loads code, and nothing is compiled."""
    bench, lines = Path(__file__).parents[2] / "bench" / "python_overhead.py", tmp_path / "first.jsonl"
    command = [sys.executable, str(bench), "--device", "cuda", "--first", "1", "--json", str(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(rows) == 3 and all(row["done_ms"] < 100 for row in rows), rows


# ----------------------------------------------------------------------------------------------------- compile


def test_compile() -> None:
    """One graph, without a break; results and gradients as in eager mode."""
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)
    x = on_gpu(draw(T=70, lengths=[30, 0, 33], gate="raw", beta="logit", l2norm=True, dtype=torch.bfloat16))
    compiled = torch.compile(lambda **x: chunk_gated_delta_rule(**x), fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(**x), chunk_gated_delta_rule(**x)):
        assert torch.equal(got, want)
    if BACKWARD:
        for got, want in zip(gradients(compiled, x)[2].values(), gradients(chunk_gated_delta_rule, x)[2].values()):
            assert torch.equal(got, want)
    step, pool = on_gpu(inputs(2, 1)), pool_of(4).cuda()
    start = pool.clone()
    decode = torch.compile(lambda pool, **x: gated_delta_rule_decode(**x, state=pool), fullgraph=True)
    for _ in range(2):
        assert torch.equal(decode(pool, **step), gated_delta_rule_decode(**step, state=start))
        assert torch.equal(pool, start)


def test_compile_into_graphs() -> None:
    """Inductor's own CUDA graphs around the operator."""
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)
    names = ("q", "k", "v", "g", "beta")
    compiled = torch.compile(lambda *x: chunk_gated_delta_rule(*x)[0] * 2, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        x = on_gpu(draw(T=40, h0=False, seed=seed))
        tensors = [x[name] for name in names]
        assert torch.equal(compiled(*tensors), chunk_gated_delta_rule(*tensors)[0] * 2)


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ["k", "g", "cu_seqlens", "initial_state"])
def test_one_tensor_on_another_device(name: str) -> None:
    """Nothing is moved in silence: the sentence names argument and devices."""
    x = on_gpu(draw(T=20, lengths=[5, 15]))
    with pytest.raises(ValueError, match=f"{name} is on cpu; it must be on cuda:0 like q"):
        chunk_gated_delta_rule(**{**x, name: x[name].cpu()})
    with pytest.raises(ValueError, match=f"{name} is on cuda:0; it must be on cpu like q"):
        chunk_gated_delta_rule(**{**on_cpu(x), name: x[name]})


@pytest.mark.parametrize("gradients_on", [False, True])
def test_a_pool_on_another_device(gradients_on: bool) -> None:
    x, pool = inputs(2, 1), pool_of(4)
    with torch.set_grad_enabled(gradients_on):
        for wrong in ({"state": pool}, {"state": pool.cuda(), "state_indices": torch.tensor([0, 1])}):
            with pytest.raises(ValueError, match="is on cpu:0; this plan runs on cuda:0"):
                gated_delta_rule_decode(**on_gpu(x), **wrong)
        with pytest.raises(ValueError, match="state is on cuda:0; this plan runs on cpu"):
            gated_delta_rule_decode(**x, state=pool.cuda())
        with pytest.raises(ValueError, match="o is on cpu:0; this plan runs on cuda:0"):
            gated_delta_rule_decode(**on_gpu(x), state=pool.cuda(), out=torch.empty_like(x["v"]))


def test_other_refusals() -> None:
    x = on_gpu(draw(T=5))
    with pytest.raises(NotImplementedError, match="cpu: runs on cpu, the plan is for cuda:0"):
        chunk_gated_delta_rule(**x, options=PlanOptions(backend="cpu"))
    with pytest.raises(ValueError, match="on the CPU"):
        testing.oracle(**x)
    numpy = {name: value.cpu().numpy() if isinstance(value, Tensor) else value for name, value in x.items()}
    with pytest.raises(TypeError, match="must be a torch tensor"):
        chunk_gated_delta_rule(**{**x, "g": numpy["g"]})
    wide = torch.zeros(1, 5, 1, 300, device="cuda")
    with pytest.raises(AssertionError, match="K is 300"):
        chunk_gated_delta_rule(wide, wide, wide, x["g"][..., :1], x["beta"][..., :1])


def test_malformed_indices() -> None:
    """Slots and offsets that no caller should have do not lead out of the tensors, and the next call works."""
    x, pool = on_gpu(inputs(1, 12)), pool_of(3).cuda()
    slots, offsets = rows(1, 99, -5), rows(0, 9, 4, 1000)
    gated_delta_rule_decode(**x, state=pool, state_indices=slots, cu_seqlens=offsets)
    chunk_gated_delta_rule(**x, cu_seqlens=offsets)
    torch.cuda.synchronize()
    assert torch.equal(pool[[0, 2]].cpu(), pool_of(3)[[0, 2]])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_the_second_gpu() -> None:
    """While the first one is current."""
    arguments = draw(T=70, dtype=torch.bfloat16)
    first = chunk_gated_delta_rule(**on_gpu(arguments, "cuda:0"))
    second = chunk_gated_delta_rule(**on_gpu(arguments, "cuda:1"))
    for a, b in zip(first, second):
        assert b.device.index == 1 and torch.equal(a.cpu(), b.cpu())
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="k is on cuda:1; it must be on cuda:0 like q"):
        chunk_gated_delta_rule(**{**on_gpu(arguments, "cuda:0"), "k": arguments["k"].to("cuda:1")})


# ------------------------------------------------------------------------------------------- processes, plans


def test_forks() -> None:
    """Calls on the CPU leave CUDA alone, so that a fork may use it; a fork of a process that has used CUDA still
    computes on the CPU, and gets an exception, not a hang, for the GPU."""
    printed = script(
        """
        import os, torch
        from helpers import draw
        from flash_qla import chunk_gated_delta_rule, gated_delta_rule_decode, plan
        from pools import inputs, pool_of

        def in_a_fork(work):
            reading, writing = os.pipe()
            if (child := os.fork()) == 0:
                try:
                    answer = work()
                except RuntimeError:
                    answer = "RuntimeError"
                os.write(writing, answer.encode())
                os._exit(0)
            os.waitpid(child, 0)
            return os.read(reading, 1000).decode()

        torch.set_num_threads(1)
        x = draw(T=20)
        want = chunk_gated_delta_rule(**x)[0]
        plan(tokens=20, heads_k=1, heads_v=1, dim_k=16, dim_v=16)
        gpu = lambda: {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in x.items()}
        close = lambda got: "close" if torch.allclose(got.cpu(), want, atol=1e-4) else "wrong"
        print(in_a_fork(lambda: close(chunk_gated_delta_rule(**gpu())[0])))
        on, step = gpu(), {name: t.cuda() for name, t in inputs(2, 1).items()}
        pool, out = pool_of(4).cuda(), torch.empty_like(step["v"])
        print(close(chunk_gated_delta_rule(**on)[0]))
        gated_delta_rule_decode(**step, state=pool, out=out)
        print(in_a_fork(lambda: close(chunk_gated_delta_rule(**x)[0])))
        print(in_a_fork(lambda: close(chunk_gated_delta_rule(**on)[0])))
        print(in_a_fork(lambda: close(gated_delta_rule_decode(**step, state=pool, out=out))))
        print(close(chunk_gated_delta_rule(**on)[0]))
        """
    )
    assert printed.split() == ["close", "close", "close", "RuntimeError", "RuntimeError", "close"]


def test_plan_and_info() -> None:
    made = flash_qla.plan(tokens=4096, heads_k=16, heads_v=32, dim_k=128, dim_v=128, device="cuda")
    assert made.forward_backend.startswith("cuda") and "cuda" in made.explain()
    info = flash_qla.info()
    assert any(name.startswith("backend cuda") for name in info) and torch.cuda.get_device_name(0) in info["gpus"]
    with pytest.raises((ValueError, NotImplementedError), match="there is no cuda:99"):
        flash_qla.plan(tokens=1, heads_k=1, heads_v=1, dim_k=8, dim_v=8, device="cuda", device_index=99)
