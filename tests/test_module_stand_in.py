"""The Python around ModelNew's fused operators, without a GPU: in their place stand the same by PyTorch's ops."""

import contextlib
import types

import pytest
import torch
from conftest import ROOT, check_gradients, check_match, make_input, make_pair

SIZES = 5, 7, 3  # input, hidden, output
NAMESPACE = "stand_in"


def forward_keeping(x, weight1, bias1, weight2, bias2, tf32, split=None):
    h = torch.sigmoid(x @ weight1.t() + bias1)
    y = h @ weight2.t() + bias2
    return torch.logsumexp(y, 1), h, y, torch.full_like(y[:, 0], 0.25)


def forward(*arguments):
    return forward_keeping(*arguments)[0]


def gradients(grad, x, weight1, weight2, out, h, y, slope, tf32, need_x, need_first, need_second, split=None):
    dy = grad[:, None] * (y - out[:, None]).exp()
    dz = (dy @ weight2) * h * (1 - h)
    return dz @ weight1, dz.t() @ x, dz.sum(0), dy.t() @ h, dy.sum(0)


@pytest.fixture(scope="module")
def operators():
    library = torch.library.Library(NAMESPACE, "DEF")
    for function in forward, forward_keeping, gradients:
        count, results = (8, 5) if function is gradients else (5, 4 if function is forward_keeping else 1)
        arguments = [f"Tensor t{i}" for i in range(count)] + [f"bool b{i}" for i in range(4 if count == 8 else 1)]
        name = f"{function.__name__}({', '.join(arguments)}, bool? split=None)"
        library.define(f"{name} -> ({', '.join(['Tensor'] * results)})")
        library.impl(function.__name__, function, "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{function.__name__}", function, lib=library)
    yield getattr(torch.ops, NAMESPACE)
    library._destroy()


@pytest.fixture
def pair(operators):
    """The reference and, with the same parameters, a ModelNew that takes the CPU for a GPU."""
    text = (ROOT / "model_new.py").read_text()
    assert text.count("not t.is_cuda or ") == 1
    module = types.ModuleType("model_new_on_the_cpu")
    exec(compile(text.replace("not t.is_cuda or ", ""), "model_new_on_the_cpu.py", "exec"), vars(module))
    module.extension = lambda index: operators
    reference, _ = make_pair(*SIZES, device="cpu")
    new = module.ModelNew(*SIZES)
    new.load_state_dict(reference.state_dict())
    return reference, new


def test_the_graph_is_the_fused_function_s(pair):
    reference, new = pair
    x = make_input(6, 5, "cpu", requires_grad=True)
    assert type(new(x).grad_fn).__name__ == "_FusedBackward"
    check_gradients(new, reference, x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_without_a_break(pair, backend):
    reference, new = pair
    x = make_input(6, 5, "cpu", requires_grad=True)
    torch.compiler.reset()
    new.compile(backend=backend, fullgraph=True)
    check_gradients(new, reference, x)
    for off in torch.no_grad, torch.inference_mode:
        with off():
            check_match(new(x), reference(x))


@pytest.mark.parametrize("modes", [[torch.no_grad], [torch.inference_mode], [torch.inference_mode, torch.enable_grad]])
def test_no_graph_where_gradients_are_off(pair, modes):
    reference, new = pair
    x = make_input(6, 5, "cpu", requires_grad=True)
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        out, expected = new(x), reference(x)
    check_match(out, expected)
    assert out.grad_fn is None and not out.requires_grad and out.is_inference() == expected.is_inference()


def test_gradients_of_gradients(pair):
    reference, new = pair
    x = make_input(6, 5, "cpu", requires_grad=True)

    def penalty(module):
        first = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [x, *module.parameters()])

    for actual, expected in zip(penalty(new), penalty(reference), strict=True):
        torch.testing.assert_close(actual, expected)


def test_transforms_take_the_reference_s_way(pair):
    reference, new = pair
    x = make_input(6, 5, "cpu")
    loss = lambda module: lambda x: module(x).square().sum()
    for transform in torch.func.grad, torch.func.jacrev, torch.func.hessian:
        torch.testing.assert_close(transform(loss(new))(x), transform(loss(reference))(x))
