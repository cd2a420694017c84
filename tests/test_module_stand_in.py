"""The Python around ModelNew's fused operators, without a GPU: in their place stand the same by PyTorch's ops."""

import collections
import functools
import itertools
import re
import types

import pytest
import torch
from conftest import ROOT, NoGradient, check_gradients, check_no_graph, make_input, make_pair

SIZES = 5, 7, 3  # input, hidden, output
PARAMETERS = "linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"


def forward_keeping(x, weight1, bias1, weight2, bias2, tf32, split=None):
    h = torch.sigmoid(x @ weight1.t() + bias1)
    y = h @ weight2.t() + bias2
    return torch.logsumexp(y, 1), h, y, torch.full_like(y[:, 0], 0.25)


def forward(*arguments):
    return forward_keeping(*arguments)[0]


def gradients(grad, x, weight1, weight2, out, h, y, slope, tf32, need_x, need_first, need_second, split=None):
    dy = grad[:, None] * (y - out[:, None]).exp()
    dz = (dy @ weight2) * h * (1 - h)
    found = dz @ weight1, dz.t() @ x, dz.sum(0), dy.t() @ h, dy.sum(0)
    needs = need_x, need_first, need_first, need_second, need_second
    return tuple(g if needed else x.new_empty(0) for g, needed in zip(found, needs, strict=True))


@pytest.fixture(scope="module")
def module():
    """``model_new`` that takes the CPU for a GPU; the operators have its schemas and count their ``calls``."""
    text = (ROOT / "model_new.py").read_text()
    assert text.count("not t.is_cuda or ") == 1
    module = types.ModuleType("model_new_on_the_cpu")
    exec(compile(text.replace("not t.is_cuda or ", ""), "model_new_on_the_cpu.py", "exec"), vars(module))
    module.calls = collections.Counter()

    def counted(function, *arguments, **options):
        module.calls[function.__name__] += 1
        return function(*arguments, **options)

    library = torch.library.Library("stand_in", "DEF")
    for pieces in re.findall(r'm\.def\(((?:\s*"[^"]*")+)\);', module.CPP_SOURCE):
        library.define("".join(re.findall(r'"([^"]*)"', pieces)))
    for function in forward, forward_keeping, gradients:
        library.impl(function.__name__, functools.partial(counted, function), "CPU")
        torch.library.register_fake(f"stand_in::{function.__name__}", function, lib=library)
    module.extension = lambda index: torch.ops.stand_in
    yield module
    library._destroy()


@pytest.fixture
def pair(module):
    reference, _ = make_pair(*SIZES, device="cpu")
    new = module.ModelNew(*SIZES)
    new.load_state_dict(reference.state_dict())
    module.calls.clear()
    return reference, new


@pytest.fixture(params=[None, "eager", "aot_eager"], ids=["eagerly", "compiled", "compiled_by_aot"])
def either(request, pair):
    """The two modules, ours maybe compiled, which must not break the graph."""
    if request.param:
        torch.compiler.reset()
        pair[1].compile(backend=request.param, fullgraph=True)
    return pair


@pytest.mark.parametrize("frozen", [f for n in range(4) for f in itertools.combinations(PARAMETERS, n)], ids=str)
@pytest.mark.parametrize("of_x", [True, False], ids=["x", "no_x"])
def test_training_takes_the_fused_operators(module, pair, frozen, of_x):
    reference, new = pair
    for name in frozen:
        for each in pair:
            each.get_parameter(name).requires_grad_(False)
    check_gradients(new, reference, make_input(6, 5, "cpu", requires_grad=of_x))
    assert module.calls == {"forward_keeping": 1, "gradients": 1}


def test_training_again_and_again(module, either):
    reference, new = either
    for _ in range(3):
        check_gradients(new, reference, make_input(6, 5, "cpu", requires_grad=True))
    assert module.calls == {"forward_keeping": 3, "gradients": 3}


def test_no_graph_where_gradients_are_off(module, either, gradients_off):
    reference, new = either
    x = make_input(6, 5, "cpu", requires_grad=True)
    with gradients_off():
        check_no_graph(new(x), reference(x))
    assert module.calls.total() == module.calls["forward"] == 1


def test_no_gradient_stays_none(module, pair):
    _, new = pair
    x = make_input(6, 5, "cpu", requires_grad=True)
    NoGradient.apply(new(x)).sum().backward()
    assert all(t.grad is None for t in (x, *new.parameters())) and module.calls == {"forward_keeping": 1}


def test_gradients_of_gradients(module, pair):
    reference, new = pair
    x = make_input(6, 5, "cpu", requires_grad=True)

    def penalty(module):
        first = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [x, *module.parameters()])

    for actual, expected in zip(penalty(new), penalty(reference), strict=True):
        torch.testing.assert_close(actual, expected)
    # The first gradients are PyTorch's. The penalty depends on `out`, too, and comes back through it as any loss does.
    assert module.calls == {"forward_keeping": 1, "gradients": 1}


@pytest.mark.parametrize("transform", ["grad", "jacrev", "jacfwd", "hessian"])
def test_transforms_take_pytorch_s_ops(module, pair, transform):
    x = make_input(6, 5, "cpu")
    transformed = [getattr(torch.func, transform)(lambda x, each=each: each(x).square().sum()) for each in pair]
    torch.testing.assert_close(*(function(x) for function in transformed))
    assert not module.calls
