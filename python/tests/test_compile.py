"""torch.compile and torch.export: one graph, few compilations, the same results; models through files."""

from __future__ import annotations

import copy
import io
import random
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from helpers import Arguments, draw
from layer import Layer
from torch import Tensor

from flash_qla import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    gated_delta_rule_commit,
    gated_delta_rule_decode,
    gated_delta_rule_mixed,
)

# torch's remarks about itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd:UserWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

N, HK, HV, K, V = 3, 2, 4, 16, 8


def pool_of(slots: int) -> Tensor:
    return torch.randn(slots, HV, K, V)


class Counting:
    """A backend that counts what it is asked to compile; the graphs run as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_compiler(request: pytest.FixtureRequest) -> None:
    if "compile" in request.node.name:
        torch._dynamo.reset()
        torch.use_deterministic_algorithms(False)


def block(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None) -> Any:
    """What a model does around the rule."""
    q, k = torch.nn.functional.silu(q), torch.nn.functional.silu(k)
    o, final_state = chunk_gated_delta_rule(
        q, k, v, g, beta, cu_seqlens=cu_seqlens, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return o * torch.sigmoid(v), final_state


def ragged(T: int, lengths: list[int] | None = None, **options: Any) -> list[Any]:
    arguments = draw(T=T, lengths=lengths, Hk=HK, Hv=HV, K=K, V=V, h0=False, **options)
    return [arguments[name] for name in ("q", "k", "v", "g", "beta")] + [arguments.get("cu_seqlens")]


def test_compile_50_ragged_shapes() -> None:
    """Lengths and the number of sequences change with every call; the first compiles, the second makes them dynamic."""
    counting = Counting()
    compiled = torch.compile(block, fullgraph=True, backend=counting)
    rng = random.Random(7)
    for step in range(50):
        lengths = [rng.randint(0, 40) for _ in range(2 + step % 5)]
        inputs = ragged(max(sum(lengths), 2), lengths)
        got, want = compiled(*inputs), block(*inputs)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert counting.graphs <= 2


def test_compile_50_ragged_shapes_with_gradients() -> None:
    from torch._dynamo.backends.common import aot_autograd

    forward, backward = Counting(), Counting()
    compiled = torch.compile(block, fullgraph=True, backend=aot_autograd(fw_compiler=forward, bw_compiler=backward))
    rng = random.Random(1)
    for step in range(50):
        B, T = rng.randint(2, 5), rng.randint(2, 70)
        inputs = [x.requires_grad_() if isinstance(x, Tensor) else x for x in ragged(T, B=B, seed=step)]
        results = []
        for function in (compiled, block):
            o, final_state = function(*inputs)
            results.append(torch.autograd.grad(o.sum() + final_state.square().sum(), inputs[:5]))
        for got, want in zip(*results):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert forward.graphs <= 2 and backward.graphs <= 2


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_compile_every_option(function: Any) -> None:
    """The whole signature in one graph."""
    options = {"gate": "raw", "beta": "negative", "l2norm": True, "state_v_first": True, "dtype": torch.bfloat16}
    for case in (options, {**options, "lengths": [3, 30]}, {"gate": "none", "beta": "none"}, {"h0": False}):
        arguments = draw(Hk=HK, Hv=HV, K=K, V=V, **case)
        compiled = torch.compile(lambda **x: function(**x), fullgraph=True, backend="aot_eager")
        for got, want in zip(compiled(**arguments), function(**arguments)):
            assert got.dtype == want.dtype and torch.equal(got, want)


def test_compile_with_inductor() -> None:
    """The default backend, which lowers operators that it does not know to calls of themselves.

    NOTE: nothing else in the graph. A single fused kernel would cost the test half a minute of C++ compilation.
    """

    def model(qkv: Tensor, g: Tensor, beta: Tensor) -> Any:
        q, k, v = qkv.split([HK * K, HK * K, HV * V], -1)
        q, k, v = q.unflatten(-1, (HK, K)), k.unflatten(-1, (HK, K)), v.unflatten(-1, (HV, V))
        return chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)

    arguments = draw(B=2, T=70, Hk=HK, Hv=HV, K=K, V=V, h0=False)
    qkv = torch.cat([arguments[name].flatten(2) for name in ("q", "k", "v")], -1)
    got = torch.compile(model, fullgraph=True)(qkv, arguments["g"], arguments["beta"])
    want = model(qkv, arguments["g"], arguments["beta"])
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_compile_in_place() -> None:
    """Pools are updated in place inside a graph, in the order of the program."""

    def two_steps(x: Arguments, pool: Tensor, slots: Tensor) -> Any:
        before = pool.sum()
        first = gated_delta_rule_decode(**x, state=pool, state_indices=slots)
        middle = pool.sum()
        second = gated_delta_rule_decode(**x, state=pool, state_indices=slots)
        return before, first, middle, second, pool * 2

    arguments = draw(B=N, T=1, Hk=HK, Hv=HV, K=K, V=V, h0=False)
    del arguments["output_final_state"]
    slots, pool = torch.tensor([4, -1, 0], dtype=torch.int32), pool_of(5)
    eager, compiled = pool.clone(), pool.clone()
    want = two_steps(arguments, eager, slots)
    got = torch.compile(two_steps, fullgraph=True, backend="aot_eager")(arguments, compiled, slots)
    assert torch.equal(eager, compiled) and not torch.equal(eager, pool)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_compile_serving() -> None:
    """Mixed batches and commit in one graph."""
    arguments = draw(lengths=[1, 1, 30], Hk=HK, Hv=HV, K=K, V=V, h0=False)
    del arguments["output_final_state"]

    def step(pool: Tensor, buffer: Tensor, accepted: Tensor) -> Tensor:
        checkpoints = torch.zeros(3, HV, K, V)
        o = gated_delta_rule_mixed(**arguments, state=pool, decode_rows=2, checkpoints=checkpoints)
        gated_delta_rule_commit(pool, None, buffer, accepted)
        return o.sum() + checkpoints.sum()

    pool, buffer, accepted = pool_of(3), torch.randn(3, 2, HV, K, V), torch.tensor([2, 0, 1])
    eager, compiled = pool.clone(), pool.clone()
    want = step(eager, buffer, accepted)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled, buffer, accepted)
    assert torch.equal(got, want) and torch.equal(eager, compiled)


def test_compile_refuses_what_eager_refuses() -> None:
    inputs = ragged(5)
    inputs[3] = inputs[3][..., :2].contiguous()
    with pytest.raises(Exception, match=r"g has shape \[1,5,2\]"):
        torch.compile(block, fullgraph=True, backend="aot_eager")(*inputs)


# ------------------------------------------------------------------------------------------------- saved and loaded


def test_export_saved_and_loaded() -> None:
    """torch.export with a dynamic length, through a file."""
    layer = Layer()
    program = torch.export.export(
        layer, (torch.randn(2, 9, 24),), dynamic_shapes=({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    )
    assert any("flash_qla.forward" in str(node.target) for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for shape in ((2, 9, 24), (3, 70, 24)):
        x = torch.randn(shape)
        torch.testing.assert_close(loaded(x), layer(x))


def test_export_loaded_in_another_process(tmp_path: Any) -> None:
    """A process that loads the program has to import flash_qla and nothing else."""
    layer = Layer()
    x = torch.randn(2, 9, 24)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "layer.pt2")
    torch.save((x, layer(x).detach()), tmp_path / "values.pt")
    code = """
        import sys, torch, flash_qla.torch_ops
        x, want = torch.load(sys.argv[1] + "/values.pt")
        got = torch.export.load(sys.argv[1] + "/layer.pt2").module()(x)
        torch.testing.assert_close(got, want)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], check=True, timeout=120)


def test_compiled_module_saved_and_loaded() -> None:
    """The state of a compiled module goes into a plain one and back."""
    torch._dynamo.reset()
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 9, 24)
    compiled(x).sum().backward()
    file = io.BytesIO()
    torch.save(compiled.state_dict(), file)
    file.seek(0)
    other = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(x), compiled(x))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), layer(x))


def test_deepcopy() -> None:
    layer = Layer()
    x = torch.randn(2, 9, 24)
    layer(x).sum().backward()
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    twin.zero_grad()
    twin(x).sum().backward()
    assert torch.equal(twin.A_log.grad, layer.A_log.grad)
