"""ModelNew as a drop-in for the reference: what holds on the CPU and, in both forms of the fused operators, on a GPU.

In order: shapes and layouts, errors, gradients, transforms and compilers, the module as an nn.Module, numbers.
"""

import copy
import io
import itertools
import math
import pickle
import subprocess
import sys
import weakref
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from conftest import (
    ROOT,
    NoGradient,
    check_close_to_largest,
    check_gradients,
    check_match,
    check_no_graph,
    check_same_outcome,
    examples,
    gradients,
    make_input,
    make_pair,
    outcome,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode

from model_new import ModelNew
from reference import Model

SIZES = 33, 65, 17  # input, hidden, output
INF, NAN = math.inf, math.nan


def check_usable(device):
    """Asserts that nothing that went before has spoilt the device."""
    assert torch.ones(3, device=device).sum().item() == 3


def set_parameters(module, weight1, bias1, weight2, bias2):
    """Overwrites the parameters; numbers fill them."""
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), (weight1, bias1, weight2, bias2), strict=True):
            parameter.copy_(torch.as_tensor(value))


# ---- Shapes and layouts ----------------------------------------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "one row expanded": lambda x: x[:1].expand(x.shape),
    "one column expanded": lambda x: x[:, :1].expand(x.shape),
    "overlapping": lambda x: x.contiguous().as_strided(x.shape, (1, 1)),
    "within a wider matrix": lambda x: nn.functional.pad(x, (3, 2), value=NAN)[:, 3:-2],
    "1 beyond an aligned address": lambda x: nn.functional.pad(x.flatten(), (1, 3), value=NAN)[1:-3].view(x.shape),
    "2 beyond an aligned address": lambda x: nn.functional.pad(x.flatten(), (2, 2), value=NAN)[2:-2].view(x.shape),
    "3 beyond an aligned address": lambda x: nn.functional.pad(x.flatten(), (3, 1), value=NAN)[3:-1].view(x.shape),
    "a view with a negative bit": lambda x: torch.complex(x.float(), -x.float()).conj().imag.to(x.dtype),
    "inference tensor": lambda x: torch.inference_mode()(x.clone)(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("input_size", [64, 65])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_x(device, layout, input_size, dtype):
    reference, new = make_pair(input_size, 40, 17, device=device, dtype=dtype)
    x = LAYOUTS[layout](make_input(21, input_size, device, dtype))
    before = x.clone()
    with torch.no_grad():
        out = new(x)
        check_match(out, reference(x.contiguous()), 1e-4 if dtype == torch.float32 else 1e-2)
    assert out.is_contiguous() and torch.equal(x, before)
    if not x.is_inference():
        check_gradients(new, reference, x.requires_grad_(), tolerance=1e-4 if dtype == torch.float32 else 3e-2)


PARAMETER_LAYOUTS = {
    "transposed storage": lambda p: p.t().contiguous().t() if p.dim() == 2 else p.repeat_interleave(2)[::2],
    "unaligned view of a flat buffer": lambda p: nn.functional.pad(p.flatten(), (1, 0), value=NAN)[1:].view(p.shape),
    "part of a wider matrix": lambda p: nn.functional.pad(p, (1, 1), value=NAN)[..., 1:-1],
    "one element expanded": lambda p: p.flatten()[0].expand(p.shape),
}


@pytest.mark.parametrize("layout", PARAMETER_LAYOUTS)
@pytest.mark.parametrize("name", ["linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"])
def test_any_layout_of_a_parameter(device, layout, name):
    reference, new = make_pair(*SIZES, device=device)
    for module in reference, new:
        linear, attribute = name.split(".")
        with torch.no_grad():
            value = PARAMETER_LAYOUTS[layout](getattr(getattr(module, linear), attribute))
        setattr(getattr(module, linear), attribute, nn.Parameter(value))
    x = make_input(21, 33, device, requires_grad=True)
    check_match(new(x), reference(x))
    check_gradients(new, reference, x)


@pytest.mark.parametrize("sizes", [s for s in itertools.product((0, 3), repeat=4) if 0 in s], ids=str)
def test_empty_sizes(device, sizes):
    batch, input_size, hidden, output = sizes
    with pytest.warns(UserWarning, match="zero-element") if 0 in sizes[1:] else torch.no_grad():
        reference, new = make_pair(input_size, hidden, output, device=device)
    with torch.no_grad():
        for parameter in (*new.parameters(), *reference.parameters()):
            parameter.fill_(0.5)
    x = make_input(batch, input_size, device, requires_grad=True)
    out = new(x)
    check_match(out, reference(x))
    check_gradients(new, reference, x)
    if output:
        logit = 0.5 + 0.5 * sum(1 / (1 + math.exp(-0.5 - 0.5 * x[0].sum().item())) for _ in range(hidden) if batch)
        check_match(out, torch.full((batch,), logit + math.log(output), device=device))
    else:
        check_match(out, torch.full((batch,), -INF, device=device))
    check_usable(device)


odd = st.sampled_from([1, 2, 3, 5, 7, 31, 33, 127, 129, 1000, 1023, 1025])


@examples(60)
@given(batch=odd, input_size=odd, hidden=odd, output=odd, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_size(device, batch, input_size, hidden, output, dtype):
    """x lies between NaNs, which any read beside a row would bring in."""
    reference, new = make_pair(input_size, hidden, output, device=device, dtype=dtype)
    guarded = torch.full((batch + 2, input_size), NAN, device=device, dtype=dtype)
    x = guarded[1:-1].copy_(make_input(batch, input_size, device, dtype))
    with torch.no_grad():
        check_match(new(x), reference(x), 1e-4 if dtype == torch.float32 else 1e-2)
        set_parameters(new, 0.5, 0.25, 0, 1.7)
        new.linear2.bias[1:] = -INF
        assert new(x).tolist() == [torch.tensor(1.7, dtype=dtype).item()] * batch  # of one logit, exactly that


@pytest.mark.parametrize("output", [102400, 50257])
def test_very_many_classes(device, output):
    reference, new = make_pair(64, 64, output, device=device)
    x = make_input(3, 64, device, requires_grad=True)
    check_match(new(x), reference(x))
    check_gradients(new, reference, x)
    set_parameters(new, 0, 0, 0, 0)
    check_match(new(x).detach(), torch.full((3,), math.log(output), device=device), 1e-6)
    with torch.no_grad():
        new.linear2.bias[-1] = 100
    assert new(x).tolist() == [100.0] * 3


@pytest.mark.parametrize("shape", [(), (33,), (4, 33), (2, 3, 33), (2, 3, 4, 33), (0, 3, 33), (2, 0, 33)], ids=str)
def test_any_number_of_dimensions(device, shape):
    reference, new = make_pair(*SIZES, device=device)
    x = make_input(max(1, math.prod(shape[:-1])), 33, device)[: math.prod(shape[:-1])]
    x = x.reshape(shape) if shape else x[0, 0]
    check_same_outcome(outcome(new, x), outcome(reference, x))


def test_rows_do_not_depend_on_each_other(device):
    _, new = make_pair(*SIZES, device=device)
    x = make_input(1024, 33, device)
    out = new(x)
    for batch in 1, 2, 17, 128:
        check_match(new(x[:batch]), out[:batch], 1e-5)
    check_match(new(x.flip(0)), out.flip(0), 1e-5)


# ---- Errors ----------------------------------------------------------------------------------------------------------


def check_same_error(new, reference, x, *words):
    """Asserts that both raise RuntimeError, ``new`` naming x or a weight and all of ``words``, and that it works on."""
    with pytest.raises(RuntimeError):
        reference(x)
    with pytest.raises(RuntimeError) as error:
        new(x)
    for word in words:
        assert word in str(error.value)
    good = make_input(2, new.linear1.in_features, new.linear1.weight.device, new.linear1.weight.dtype)
    check_usable(good.device)
    return good


@pytest.mark.parametrize("shape", [(2, 5), (2, 3), (2, 0), (0, 5), (5,), (2, 6, 5)], ids=str)
def test_wrong_number_of_features(device, shape):
    reference, new = make_pair(4, 3, 2, device=device)
    words = ("x must have 4 features", str(shape), "cannot be multiplied") if len(shape) > 1 else ()
    good = check_same_error(new, reference, torch.ones(shape, device=device), *words)
    check_match(new(good), reference(good))


dtypes = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64


@pytest.mark.parametrize("x_dtype", dtypes, ids=str)
@pytest.mark.parametrize("dtype", dtypes[:4], ids=str)
def test_dtypes(device, dtype, x_dtype):
    """The parameters' own dtype works, any other is an error that names both."""
    reference, new = make_pair(*SIZES, device=device, dtype=dtype)
    x = make_input(5, 33, device).to(x_dtype)
    if x_dtype == dtype:
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 1e-2)
        check_match(new(x), reference(x), tolerance)
        assert new(x).dtype == dtype
    else:
        good = check_same_error(new, reference, x, "x must be", str(dtype), str(x_dtype), "must have the same dtype")
        check_match(new(good), reference(good), 1e-2)


@pytest.mark.parametrize("other", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("linear", ["linear1", "linear2"])
def test_one_linear_of_another_dtype(device, linear, other):
    reference, new = make_pair(*SIZES, device=device)
    for module in reference, new:
        getattr(module, linear).to(other)
    for dtype in torch.float32, other:
        x = make_input(5, 33, device, dtype)
        assert isinstance(outcome(reference, x), RuntimeError)
        check_same_outcome(outcome(new, x), outcome(reference, x))
    check_usable(device)


def test_dtype_changes_after_a_forward(device):
    reference, new = make_pair(*SIZES, device=device)
    for dtype in torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float32:
        reference.to(dtype), new.to(dtype)
        x = make_input(5, 33, device, dtype)
        check_match(new(x), reference(x), 1e-4 if dtype.itemsize >= 4 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_overflow_as_the_reference_does(device, dtype):
    reference, new = make_pair(4, 3, 2, device=device, dtype=dtype)
    for module in reference, new:
        set_parameters(module, 0, 10, 60000, 60000)
    x = make_input(5, 4, device, dtype)
    check_match(new(x), reference(x), 1e-2)


def test_devices_that_differ():
    reference, new = make_pair(4, 3, 2)
    x = torch.ones(2, 4, device="meta")
    with pytest.raises(RuntimeError, match=r"x must be on cpu.*on meta"):
        new(x)
    check_match(new(torch.ones(2, 4)), reference(torch.ones(2, 4)))


@pytest.mark.parametrize("x", [None, 3.0, [[1.0, 2.0, 3.0, 4.0]], "text"], ids=str)
def test_what_is_no_tensor(x):
    reference, new = make_pair(4, 3, 2)
    check_same_outcome(outcome(new, x), outcome(reference, x))


# ---- Gradients -------------------------------------------------------------------------------------------------------

LOSSES = {
    "sum": torch.sum,  # its gradient is one element, expanded
    "mean": torch.mean,
    "every second": lambda out: out[::2].sum(),
    "weighted": lambda out: (out * torch.linspace(-2, 3, len(out), device=out.device)).sum(),
    "squares": lambda out: (out**2).sum(),
    "of zero": lambda out: (0 * out).sum(),
    "a huge gradient": lambda out: 3e34 * out.sum(),
    "a tiny gradient": lambda out: 1e-35 * out.sum(),
    "rows of very different weight": lambda out: (out * torch.logspace(-9, 9, len(out), device=out.device)).sum(),
}


@pytest.mark.parametrize("batch", [1, 21])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients(device, loss, batch):
    reference, new = make_pair(*SIZES, device=device)
    check_gradients(new, reference, make_input(batch, 33, device, requires_grad=True), LOSSES[loss])


names = "x", "linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"


@pytest.mark.parametrize("wanted", [w for n in range(6) for w in itertools.combinations(names, n)], ids=str)
def test_only_the_gradients_that_are_asked_for(device, wanted):
    reference, new = make_pair(*SIZES, device=device)
    for module in reference, new:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in wanted)
    x = make_input(5, 33, device, requires_grad="x" in wanted)
    assert new(x).requires_grad == bool(wanted)
    if wanted:
        check_gradients(new, reference, x)
        inputs = [x if name == "x" else new.get_parameter(name) for name in wanted]
        expected = [x if name == "x" else reference.get_parameter(name) for name in wanted]
        for i in range(len(wanted)):  # one alone
            check_match(*(torch.autograd.grad(m(x).sum(), of[i]) for m, of in ((new, inputs), (reference, expected))))


def test_no_graph_where_gradients_are_off(device, gradients_off):
    reference, new = make_pair(*SIZES, device=device)
    x = make_input(5, 33, device, requires_grad=True)
    with gradients_off():
        check_no_graph(new(x), reference(x))


def test_gradcheck(device):
    _, new = make_pair(5, 7, 3, device=device, dtype=torch.float64)
    x = make_input(4, 5, device, torch.float64, requires_grad=True)
    function = lambda x, *values: torch.func.functional_call(
        new, dict(zip(dict(new.named_parameters()), values, strict=True)), (x,)
    )
    assert gradcheck(function, (x, *new.parameters()))
    assert gradgradcheck(function, (x, *new.parameters()))


def test_double_backward(device):
    """A gradient penalty, on the gradient of x and on the parameters' too."""
    reference, new = make_pair(*SIZES, device=device)
    x = make_input(21, 33, device, requires_grad=True)
    for wanted in [x], [x, "linear1.weight", "linear2.bias"]:
        results = []
        for module in new, reference:
            inputs = [i if isinstance(i, torch.Tensor) else module.get_parameter(i) for i in wanted]
            first = torch.autograd.grad(LOSSES["weighted"](module(x)), inputs, create_graph=True)
            penalty = sum((g**2).sum() for g in first)
            results.append(torch.autograd.grad(penalty, [x, *module.parameters()], allow_unused=True))
        for actual, expected in zip(*results, strict=True):
            if expected is None:  # of a bias that the penalty does not depend on
                assert actual is None or not actual.any()
            else:
                check_close_to_largest(actual, expected)


def test_no_gradient_stays_none(device):
    _, new = make_pair(*SIZES, device=device)
    x = make_input(5, 33, device, requires_grad=True)
    NoGradient.apply(new(x)).sum().backward()
    assert all(t.grad is None for t in (x, *new.parameters()))


def test_backward_twice(device):
    _, new = make_pair(*SIZES, device=device)
    x = make_input(5, 33, device, requires_grad=True)
    out = new(x).sum()
    out.backward(retain_graph=True)
    once = x.grad.clone()
    out.backward()
    check_match(x.grad, 2 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()


@pytest.mark.parametrize("changed", ["x", "linear2.weight"])
def test_changes_in_place_before_backward_are_noticed(device, changed):
    reference, new = make_pair(*SIZES, device=device)
    for module in reference, new:
        x = make_input(5, 33, device)
        out = module(x)
        with torch.no_grad():
            (x if changed == "x" else module.linear2.weight).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_saved_tensors_pass_the_hooks(device):
    """Where checkpointing and offloading get at them; none is kept beside."""
    reference, new = make_pair(*SIZES, device=device)
    x = make_input(21, 33, device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.device, t.cpu()), lambda kept: kept[1].to(kept[0])):
        check_gradients(new, reference, x)
    with torch.autograd.graph.save_on_cpu():
        check_gradients(new, reference, x)
    checkpoint = lambda module, x: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
    results = []
    for module in new, reference:
        module.zero_grad()
        checkpoint(module, x).sum().backward()
        results.append([p.grad.clone() for p in module.parameters()])
    check_match(*results)

    def unpack(_):
        raise RuntimeError("asked for what was saved")

    with torch.autograd.graph.saved_tensors_hooks(lambda t: None, unpack):
        out = new(x)
    kept = list(getattr(out.grad_fn, "__dict__", {}).values())  # what is on an autograd.Function's ctx
    assert not any(isinstance(leaf, torch.Tensor) for leaf in torch.utils._pytree.tree_leaves(kept))
    with pytest.raises(RuntimeError, match="asked for what was saved"):
        out.sum().backward()


BACK = {  # what hooks give for the tensor they took
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    **{f"{n} elements off": lambda t, n=n: torch.cat((t.new_zeros(n), t.ravel()))[n:].view(t.shape) for n in (1, 2, 3)},
}


@pytest.mark.parametrize("back", BACK.values(), ids=BACK)
def test_saved_tensors_come_back_in_any_layout_at_any_address(device, back):
    reference, new = make_pair(*SIZES, device=device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, back):
        check_gradients(new, reference, make_input(21, 33, device, requires_grad=True))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, half, x_dtype):
    reference, new = make_pair(*SIZES, device=device)
    x = make_input(21, 33, device, x_dtype)
    kind = torch.device(device).type
    with torch.autocast(kind, dtype=half):
        check_match(new(x), reference(x), 1e-2)
        assert new(x).dtype == reference(x).dtype
        check_gradients(new, reference, x, tolerance=3e-2)
        assert all(p.grad.dtype == torch.float32 for p in new.parameters())
        with torch.autocast(kind, enabled=False):
            check_same_outcome(outcome(new, x), outcome(reference, x))
    out = []
    for module in new, reference:  # forward alone under autocast, as it is meant
        module.zero_grad()
        with torch.autocast(kind, dtype=half):
            loss = module(x).sum()
        loss.backward()
        out.append([p.grad for p in module.parameters()])
    check_match(*out, 1e-1)
    check_same_outcome(outcome(new, x), outcome(reference, x))


# ---- Transforms and compilers ----------------------------------------------------------------------------------------


def test_functional_call(device):
    _, new = make_pair(5, 7, 2, device=device)
    zeros = {name: torch.zeros_like(p) for name, p in new.named_parameters()}
    out = torch.func.functional_call(new, zeros, (make_input(4, 5, device),))
    check_match(out, torch.full((4,), math.log(2), device=device), 1e-6)


def test_gradients_by_sample(device):
    reference, new = make_pair(5, 7, 3, device=device)
    x = make_input(4, 5, device)
    parameters = dict(new.named_parameters())
    loss = lambda values, row: torch.func.functional_call(new, values, (row[None],)).sum()
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, row in enumerate(x):
        expected = gradients(reference, row[None])
        for name in parameters:
            check_match(each[name][i], expected[name])


def test_functional_derivatives(device):
    """Forward mode, reverse mode and both, and a batch of models at once."""
    reference, new = make_pair(5, 7, 3, device=device)
    x, tangent = make_input(4, 5, device), make_input(4, 5, device, seed=2)
    for transform in (
        lambda module: torch.func.jvp(module, (x,), (tangent,)),
        lambda module: torch.func.vjp(module, x)[1](torch.ones(4, device=device)),
        lambda module: torch.func.jacrev(module)(x),
        lambda module: torch.func.jacfwd(module)(x),
        lambda module: torch.func.hessian(lambda x: module(x).sum())(x),
        lambda module: torch.func.vmap(module, in_dims=1, out_dims=1)(torch.stack((x, tangent), 1)),
    ):
        check_match(transform(new), transform(reference))
    many = [ModelNew(5, 7, 3).to(device) for _ in range(3)]
    values, _ = torch.func.stack_module_state(many)
    outs = torch.func.vmap(lambda v, x: torch.func.functional_call(new, v, (x,)), in_dims=(0, None))(values, x)
    check_match(outs, torch.stack([module(x) for module in many]))


def test_forward_mode(device):
    """Dual tensors: the same tangent as the reference's, or PyTorch's error about a missing jvp; never none."""
    reference, new = make_pair(5, 7, 3, device=device)

    def tangent(module):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(make_input(4, 5, device), make_input(4, 5, device, seed=2))
            return torch.autograd.forward_ad.unpack_dual(module(dual)).tangent

    actual = outcome(tangent, new)
    if isinstance(actual, RuntimeError | NotImplementedError):
        assert "jvp" in str(actual)
    else:
        check_same_outcome(actual, tangent(reference))


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_compile(fresh_compiler):
    """In one graph, in training and inference, with one more compilation for any batch; 0 and 1 have their own."""
    reference, new = make_pair(*SIZES)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(new, fullgraph=True, backend=counter)
    for batch in 16, 17, 18, 40:
        x = make_input(batch, 33, requires_grad=True)
        check_match(compiled(x), reference(x))
        actual, expected = gradients(compiled, x), gradients(reference, x)
        check_match(list(actual.values()), list(expected.values()))
    assert counter.frame_count <= 2
    for batch in 1, 0, 23:
        check_match(compiled(make_input(batch, 33)), reference(make_input(batch, 33)))
        with torch.no_grad():
            check_match(compiled(make_input(batch, 33)), reference(make_input(batch, 33)))


def test_compile_within_a_larger_function(fresh_compiler):
    reference, new = make_pair(*SIZES)
    around = lambda module: lambda x: torch.stack((module(x.t() * 2), module(x.t())[::1])).exp()
    x = make_input(21, 33).t().contiguous()
    check_match(torch.compile(around(new), fullgraph=True, backend="aot_eager")(x), around(reference)(x))


def test_compile_sees_what_changes_afterwards(fresh_compiler, precision):
    reference, new = make_pair(*SIZES)
    compiled = torch.compile(new, backend="aot_eager")
    x = make_input(21, 33)
    check_match(compiled(x), reference(x))
    for module in reference, new:
        module.linear1.weight.data = module.linear1.weight.data * 2
    check_match(compiled(x), reference(x))
    precision("high")
    check_match(compiled(x), reference(x))
    for module in reference, new:
        module.linear1.forward = lambda x: x.sum() * torch.ones(len(x), 65)
    check_match(compiled(x), reference(x))


def test_compile_of_what_is_compiled_by_itself(fresh_compiler):
    reference, new = make_pair(*SIZES)
    new.linear1.compile(backend="eager")
    x = make_input(5, 33)
    check_match(torch.compile(new, backend="eager", fullgraph=True)(x), reference(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_jit_trace(device):
    reference, new = make_pair(*SIZES, device=device)
    traced = torch.jit.trace(new, make_input(5, 33, device))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    x = make_input(21, 33, device, requires_grad=True)
    check_match(loaded(x), reference(x))
    check_gradients(loaded, reference, x)


@pytest.mark.parametrize("strict", [False, True])
def test_export(device, tmp_path, strict):
    reference, new = make_pair(*SIZES, device=device)
    batch = torch.export.Dim("batch")
    arguments = (make_input(16, 33, device),)
    program = torch.export.export(new, arguments, dynamic_shapes=({0: batch},), strict=strict)
    assert all("aten" in str(node.target) for node in program.graph.nodes if node.op == "call_function")
    torch.export.save(program, tmp_path / "module.pt2")
    loaded = torch.export.load(tmp_path / "module.pt2").module()
    for rows in 16, 5, 100:
        check_match(loaded(make_input(rows, 33, device)), reference(make_input(rows, 33, device)))
    check_gradients(loaded, reference, make_input(5, 33, device, requires_grad=True))


def test_symbolic_trace():
    reference, new = make_pair(*SIZES)
    check_match(torch.fx.symbolic_trace(new)(make_input(5, 33)), reference(make_input(5, 33)))


# ---- The module as an nn.Module --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 42])
def test_the_same_seed_gives_the_same_parameters(seed):
    torch.manual_seed(seed)
    reference, after = Model(*SIZES), torch.rand(3)
    torch.manual_seed(seed)
    new = ModelNew(*SIZES)
    assert torch.equal(torch.rand(3), after)
    assert list(new.state_dict()) == list(reference.state_dict())
    assert all(map(torch.equal, new.parameters(), reference.parameters()))
    assert [p.requires_grad for p in new.parameters()] == [True] * 4


def test_state_dict_moves_both_ways(device):
    reference, new = make_pair(*SIZES, device=device)
    x = make_input(5, 33, device)
    keys = list(new.state_dict())
    new(x).sum().backward()
    assert list(new.state_dict()) == keys == ["linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"]
    assert not list(new.buffers()) and [name for name, _ in new.named_modules()] == ["", "linear1", "linear2"]
    other = Model(*SIZES).to(device)
    other.load_state_dict(new.state_dict(), strict=True)
    check_match(other(x), reference(x), 0)
    new.load_state_dict(Model(*SIZES).to(device).state_dict(), strict=True)


CHANGES = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.1).step(),
    "fused Adam": lambda m: torch.optim.Adam(m.parameters(), 0.1, fused=True).step(),
    ".data in place": lambda m: m.linear1.weight.data.mul_(2),
    ".data replaced": lambda m: setattr(m.linear2.weight, "data", m.linear2.weight.data * 3),
    "load_state_dict": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "load_state_dict, assign": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
    "copy_": lambda m: torch.no_grad()(m.linear1.weight.copy_)(torch.ones_like(m.linear1.weight)),
    "a view in place": lambda m: m.linear2.weight.detach().t()[3].zero_(),
    "a bias": lambda m: m.linear1.bias.data.add_(1),
    "zeros": lambda m: nn.utils.vector_to_parameters(0 * nn.utils.parameters_to_vector(m.parameters()), m.parameters()),
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference_mode"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_parameters_are_seen(device, change, inference):
    reference, new = make_pair(*SIZES, device=device)
    x = make_input(5, 33, device)
    for module in reference, new:
        module(x).sum().backward()
    with torch.inference_mode(inference):
        check_match(new(x), reference(x))
        for module in reference, new:
            CHANGES[change](module)
        check_match(new(x), reference(x))
    check_same_outcome(outcome(new, x), outcome(reference, x))  # inference tensors cannot be saved for backward


def test_weights_swapped_between_models(device):
    _, new = make_pair(*SIZES, device=device)
    _, other = make_pair(*SIZES, device=device, seed=7)
    x = make_input(5, 33, device)
    before, others = new(x), other(x)
    new.linear1, other.linear1 = other.linear1, new.linear1
    new.linear2.weight, other.linear2.weight = other.linear2.weight, new.linear2.weight
    new.linear2.bias, other.linear2.bias = other.linear2.bias, new.linear2.bias
    check_match(new(x), others, 1e-6)
    check_match(other(x), before, 1e-6)


def test_adding_to_the_last_bias_adds_to_the_result(device):
    _, new = make_pair(*SIZES, device=device)
    x = make_input(5, 33, device)
    before = new(x)
    new.linear2.bias.data.add_(1)
    check_match(new(x), before + 1, 1e-6)


def test_built_in_inference_mode(device):
    with torch.inference_mode():
        reference, new = make_pair(*SIZES, device=device)
        x = make_input(5, 33, device)
        check_match(new(x), reference(x))
        new.linear1.weight.mul_(2), reference.linear1.weight.mul_(2)
        check_match(new(x), reference(x))
    x = make_input(5, 33, device)
    check_same_outcome(outcome(new, x), outcome(reference, x))  # they cannot be saved for backward


def call(module, x):
    return module(x).tolist()


def through_torch_save(module):
    file = io.BytesIO()
    torch.save(module, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("kind", COPIES)
def test_copies(device, kind):
    reference, new = make_pair(*SIZES, device=device)
    x = make_input(5, 33, device, requires_grad=True)
    new(x)
    twin = COPIES[kind](new)
    check_match(twin(x), reference(x))
    check_gradients(twin, reference, x)
    if kind != "copy":  # which shares its parameters
        twin.linear1.weight.data.zero_()
        check_match(new(x), reference(x))


def test_other_processes(tmp_path):
    """One that is sent the module, and one that loads the file that torch.save wrote."""
    _, new = make_pair(*SIZES)
    x = make_input(5, 33)
    expected = call(new, x)
    with ProcessPoolExecutor(1, torch.multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(call, new, x).result() == expected
    torch.save((new, x), tmp_path / "module.pt")
    script = "import sys, torch; m, x = torch.load(sys.argv[1], weights_only=False); print(m(x).tolist())"
    command = [sys.executable, "-c", script, str(tmp_path / "module.pt")]
    assert eval(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout) == expected


def test_meta_device(device):
    reference, _ = make_pair(*SIZES, device=device)
    with torch.device("meta"):
        new = ModelNew(*SIZES)
    assert all(p.is_meta for p in new.parameters())
    out = new(torch.empty(5, 33, device="meta"))
    assert out.is_meta and out.shape == (5,)
    for width in 33, 34:
        rounded = torch.empty(5, width, device="meta", dtype=torch.bfloat16)
        check_same_outcome(outcome(new, rounded), outcome(copy.deepcopy(reference).to("meta"), rounded))
    new.to_empty(device=device).load_state_dict(reference.state_dict())
    x = make_input(5, 33, device, requires_grad=True)
    check_match(new(x), reference(x))
    check_gradients(new, reference, x)


def replace(module, path, value):
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, value)


def same_linear(device, *arguments, **options):
    """An ``nn.Linear`` that is the same in each call."""
    torch.manual_seed(5)
    return nn.Linear(*arguments, device=device, **options)


class Counted(nn.Module):
    """A parametrization whose result depends on how often it was asked for."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * self.calls


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class DoubledCall(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


def of_class(linear, kind):
    linear.__class__ = kind


def by_function(module):
    del module.linear1
    module.linear1 = lambda x: nn.functional.pad(x, (0, 32))


def half_masked(linear, name):
    torch.manual_seed(3)
    prune.random_unstructured(linear, name, 0.5)


def plain_attribute(linear, name):
    value = getattr(linear, name).detach() * 2
    delattr(linear, name)
    setattr(linear, name, value)


double = lambda module, args, out: out * 2
INTERVENTIONS = {  # what a person may do to a linear inside a module; each acts on (module, device)
    "forward hook": lambda m, d: m.linear1.register_forward_hook(double),
    "forward hook of the last": lambda m, d: m.linear2.register_forward_hook(double),
    "forward pre-hook": lambda m, d: m.linear2.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "forward pre-hook with keywords": lambda m, d: m.linear1.register_forward_pre_hook(
        lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True
    ),
    "full backward hook": lambda m, d: m.linear1.register_full_backward_hook(lambda module, i, o: (None,)),
    "full backward pre-hook": lambda m, d: m.linear2.register_full_backward_pre_hook(lambda module, o: (2 * o[0],)),
    "hook on the whole": lambda m, d: m.register_forward_hook(double),
    "hook on a parameter": lambda m, d: m.linear1.weight.register_hook(lambda gradient: 3 * gradient),
    "hook after accumulation": lambda m, d: m.linear2.weight.register_post_accumulate_grad_hook(
        lambda p: setattr(p, "grad", 3 * p.grad)
    ),
    "forward replaced": lambda m, d: setattr(
        m.linear1, "forward", lambda x: x.sum() * torch.ones(len(x), 65, device=d)
    ),
    "another class": lambda m, d: of_class(m.linear2, Doubled),
    "another class that is called in its own way": lambda m, d: of_class(m.linear2, DoubledCall),
    "_call_impl replaced": lambda m, d: setattr(m.linear1, "_call_impl", lambda x: torch.ones(len(x), 65, device=d)),
    "compiled by itself": lambda m, d: setattr(
        m.linear1, "_compiled_call_impl", lambda x: torch.ones(len(x), 65, device=d)
    ),
    "a function": lambda m, d: by_function(m),
    "traced by itself": lambda m, d: setattr(m, "linear1", torch.jit.trace(m.linear1, make_input(2, 33, d))),
    "scripted by itself": lambda m, d: setattr(m, "linear1", torch.jit.script(m.linear1)),
    "the last replaced as the first runs": lambda m, d: m.linear1.register_forward_hook(
        lambda *_: setattr(m, "linear2", same_linear(d, 65, 17))
    ),
    "no first layer": lambda m, d: setattr(m, "linear1", None),
    "no last layer": lambda m, d: setattr(m, "linear2", None),
    "no weight": lambda m, d: setattr(m.linear1, "weight", None),
    "more after a linear": lambda m, d: replace(m, "linear1", nn.Sequential(m.linear1, nn.LayerNorm(65, device=d))),
    "no last linear": lambda m, d: replace(m, "linear2", nn.Identity()),
    "another hidden size": lambda m, d: (
        replace(m, "linear1", same_linear(d, 33, 20)),
        replace(m, "linear2", same_linear(d, 20, 9)),
    ),
    "no first bias": lambda m, d: replace(m, "linear1", same_linear(d, 33, 65, bias=False)),
    "last bias removed": lambda m, d: setattr(m.linear2, "bias", None),
    "a bias of one element": lambda m, d: setattr(m.linear1, "bias", nn.Parameter(torch.ones(1, device=d))),
    "a weight replaced": lambda m, d: setattr(m.linear1, "weight", nn.Parameter(torch.ones(65, 33, device=d))),
    "a weight of another size": lambda m, d: setattr(m.linear2, "weight", nn.Parameter(torch.ones(17, 64, device=d))),
    "a weight that is no parameter": lambda m, d: plain_attribute(m.linear1, "weight"),
    "one frozen": lambda m, d: m.linear1.requires_grad_(False),
    "pruned": lambda m, d: half_masked(m.linear1, "weight"),
    "pruned bias": lambda m, d: half_masked(m.linear2, "bias"),
    "weight norm": lambda m, d: parametrizations.weight_norm(m.linear1),
    "spectral norm": lambda m, d: parametrizations.spectral_norm(m.linear2),
    "parametrized": lambda m, d: parametrize.register_parametrization(m.linear1, "weight", Counted()),
    "parametrized bias": lambda m, d: parametrize.register_parametrization(m.linear2, "bias", Counted()),
}


@pytest.mark.parametrize("intervention", INTERVENTIONS)
def test_what_is_done_to_a_linear_has_its_effect(device, intervention):
    reference, new = make_pair(*SIZES, device=device)
    x = make_input(5, 33, device, requires_grad=True)
    check_match(new(x), reference(x))
    for module in reference, new:
        torch.manual_seed(9)
        INTERVENTIONS[intervention](module, device)
    expected = outcome(reference, x)
    check_same_outcome(outcome(new, x), expected)
    check_match(dict(new.state_dict()), dict(reference.state_dict()))  # a norm's buffers change with each use
    if not isinstance(expected, Exception):
        check_gradients(new, reference, x)
        check_match(new.eval()(x), reference.eval()(x))
        check_match(new.train()(x), reference.train()(x))


def test_a_proxy_of_a_linear(device):
    modules = make_pair(*SIZES, device=device)
    linears = [module.linear1 for module in modules]
    for module, linear in zip(modules, linears, strict=True):
        module.linear1 = weakref.proxy(linear)
    reference, new = modules
    x = make_input(5, 33, device)
    check_match(new(x), reference(x))


def test_a_method_replaced_before_the_import(device, monkeypatch):
    before = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * before(self, x))
    reference, imported = make_pair(*SIZES, device=device)
    late = {"__name__": "late"}
    exec((ROOT / "model_new.py").read_text(), late)
    new = late["ModelNew"](*SIZES).to(device)
    new.load_state_dict(reference.state_dict())
    x = make_input(5, 33, device)
    check_match(new(x), reference(x))
    check_match(imported(x), reference(x))


class Cast(TorchFunctionMode):
    """Casts what enters a linear to its weight's dtype."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            args = args[0].to(args[1].dtype), *args[1:]
        return function(*args, **(kwargs or {}))


class Double(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is nn.functional.linear else result


@pytest.mark.parametrize("mode, dtype", [(Cast, torch.float64), (Double, torch.float32)])
def test_a_mode_sees_pytorch_s_own_ops(device, mode, dtype):
    reference, new = make_pair(*SIZES, device=device)
    x = make_input(5, 33, device).to(dtype)
    with mode():
        actual, expected = new(x), reference(x)
    check_match(actual, expected)


@pytest.mark.parametrize("name", ["sigmoid", "logsumexp"])
def test_another_function_replaced(device, monkeypatch, name):
    reference, new = make_pair(*SIZES, device=device)
    before = getattr(torch, name)
    monkeypatch.setattr(torch, name, lambda *args, **kwargs: 2 * before(*args, **kwargs))
    x = make_input(5, 33, device)
    check_match(new(x), reference(x))


def test_the_function_replaced(device, monkeypatch):
    reference, new = make_pair(*SIZES, device=device)
    before = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda x, *parameters: 2 * before(x.float(), *parameters))
    x = make_input(5, 33, device).half()
    check_match(new(x), reference(x))


@pytest.mark.parametrize("owner, name", [(nn.Linear, "forward"), (nn.Module, "__call__"), (nn.Module, "_call_impl")])
def test_a_method_of_every_linear_replaced(device, monkeypatch, owner, name):
    reference, new = make_pair(*SIZES, device=device)
    before = getattr(owner, name)

    def twice(self, *args):
        return before(self, *args) * (2 if isinstance(self, nn.Linear) else 1)

    monkeypatch.setattr(owner, name, twice)
    x = make_input(5, 33, device)
    check_match(new(x), reference(x))


class Stored(torch.Tensor):
    """A matrix kept as 8 bits, transposed, which ``nn.functional.linear`` alone unpacks."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return function(*(a.as_subclass(torch.Tensor).t().float() if isinstance(a, cls) else a for a in args))
        return super().__torch_function__(function, types, args, kwargs or {})


def stored(rows, cols, device):
    return torch.arange(rows * cols, device=device).remainder(7).to(torch.int8).view(cols, rows).as_subclass(Stored)


def test_a_weight_that_says_another_shape_and_dtype(device):
    reference, new = make_pair(*SIZES, device=device)
    for module in reference, new:
        module.linear1.weight = nn.Parameter(stored(65, 33, device), requires_grad=False)
    x = make_input(5, 33, device)
    check_match(new(x), reference(x))


def test_an_x_that_says_another_shape_and_dtype(device):
    reference, new = make_pair(*SIZES, device=device)
    check_match(new(stored(5, 33, device)), reference(stored(5, 33, device)))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_x(device, layout):
    reference, new = make_pair(*SIZES, device=device)
    x = torch.nested.nested_tensor([make_input(rows, 33, device) for rows in (3, 2)], layout=layout)
    check_same_outcome(outcome(new, x), outcome(reference, x))


def test_an_x_of_another_width_leaves_the_module_as_it_is_left_by_the_reference(device):
    reference, new = make_pair(*SIZES, device=device)
    for module in reference, new:
        torch.manual_seed(9)
        parametrizations.spectral_norm(module.linear2)
        with pytest.raises(RuntimeError):
            module(torch.ones(5, 34, device=device))
    check_match(dict(new.state_dict()), dict(reference.state_dict()))


def test_hooks_that_are_removed(device):
    reference, new = make_pair(*SIZES, device=device)
    x = make_input(5, 33, device)
    handle = new.linear1.register_forward_hook(double)
    hooked = new(x)
    handle.remove()
    check_match(new(x), reference(x))
    assert not torch.allclose(hooked, new(x))


@pytest.mark.parametrize(
    "register, hook",
    [
        (register_module_forward_hook, lambda module, args, out: 2 * out if isinstance(module, nn.Linear) else None),
        (register_module_forward_pre_hook, lambda module, args: (args[0] + 1,)),
        (register_module_full_backward_hook, lambda module, into, out: tuple(i if i is None else 2 * i for i in into)),
    ],
)
def test_global_hooks(device, register, hook):
    reference, new = make_pair(*SIZES, device=device)
    x = make_input(5, 33, device, requires_grad=True)
    handle = register(hook)
    try:
        check_match(new(x), reference(x))
        check_gradients(new, reference, x)
    finally:
        handle.remove()


def test_tied_weights(device):
    reference, new = make_pair(40, 40, 40, device=device)
    for module in reference, new:
        module.linear2.weight = module.linear1.weight
        module.linear2.bias = module.linear1.bias
    x = make_input(5, 40, device, requires_grad=True)
    check_match(new(x), reference(x))
    check_gradients(new, reference, x)


def test_training_goes_the_same_way(device):
    reference, new = make_pair(*SIZES, device=device)
    for module in reference, new:
        optimizer = torch.optim.AdamW(module.parameters(), 0.01)
        for step in range(5):
            optimizer.zero_grad()
            (module(make_input(21, 33, device, seed=step)) ** 2).mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    check_match(list(new.parameters()), list(reference.parameters()))


def test_subclasses_of_tensor(device):
    class Tagged(torch.Tensor):
        pass

    reference, new = make_pair(*SIZES, device=device)
    x = make_input(5, 33, device).as_subclass(Tagged)
    assert type(new(x)) is type(reference(x)) is Tagged
    check_match(new(x).as_subclass(torch.Tensor), reference(x).as_subclass(torch.Tensor))


# ---- Numbers ---------------------------------------------------------------------------------------------------------

LOGITS = [  # b2, its logsumexp
    ((-INF,) * 4, -INF),
    ((INF, 0, 0, 0), INF),
    ((0, 0, 0, INF), INF),
    ((INF, -INF, 0, 0), INF),
    ((INF, INF), INF),
    ((NAN, 0, 0, 0), NAN),
    ((0, 0, 0, NAN), NAN),
    ((INF, NAN, 0, 0), NAN),
    ((NAN, -INF, -INF, -INF), NAN),
    ((-INF, -INF, -INF, 2), 2),
    ((2, -INF, -INF, -INF), 2),
    ((1e38,) * 4, 1e38),
    ((3e38,) * 4, 3e38),
    ((-3e38,) * 4, -3e38),
    ((3e38, -3e38), 3e38),
    ((1000, 1000), 1000.6932),
    ((-1000, -1000), -999.3068),
    ((88.8, 88.8), 89.49315),
    ((1e-45, -1e-45), math.log(2)),
    ((0,) * 300 + (50,), 50),
    ((-INF,) * 5000 + (2,), 2),  # longer than one warp reads, or one block at once
    ((2,) + (-INF,) * 5000, 2),
    ((-INF,) * 4999 + (INF,), INF),
]


@pytest.mark.parametrize("logits, expected", LOGITS, ids=lambda value: str(value)[:30])
def test_logsumexp_at_the_extremes(device, logits, expected):
    reference, new = make_pair(3, 5, len(logits), device=device)
    bias = torch.tensor(logits, dtype=torch.float32)
    for module in reference, new:
        set_parameters(module, 0.1, 0, 0, bias)
    x = make_input(2, 3, device, requires_grad=True)
    check_match(new(x).detach(), torch.full((2,), float(expected), device=device), 1e-6)
    check_match(new(x), reference(x), 1e-6)
    actual, wanted = gradients(new, x), gradients(reference, x)
    for name in wanted:
        torch.testing.assert_close(actual[name], wanted[name], rtol=1e-4, atol=1e-6, equal_nan=True)


SIGMOIDS = [  # x, out and dx of the module with W1 = 1, b1 = 0, W2 = (1, 2), b2 = 0
    (0.0, 1.4740770, 0.405615),
    (1e-45, 1.4740770, 0.405615),
    *((x, 2.3132617, 0.0) for x in (89.0, 104.0, 1e4, 3.4e38, INF)),
    *((x, 0.6931472, 0.0) for x in (-89.0, -104.0, -1e4, -3.4e38, -INF)),
    (NAN, NAN, NAN),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value, expected, slope", SIGMOIDS)
def test_sigmoid_at_the_extremes(device, value, expected, slope, dtype):
    reference, new = make_pair(1, 1, 2, device=device, dtype=dtype)
    for module in reference, new:
        set_parameters(module, 1, 0, torch.tensor([[1.0], [2.0]]), 0)
    x = torch.full((3, 1), value, device=device).to(dtype).requires_grad_()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    check_match(new(x).detach(), torch.full((3,), expected, device=device, dtype=dtype), tolerance)
    check_match(new(x), reference(x), tolerance)
    new(x).sum().backward()
    check_match(x.grad, torch.full((3, 1), slope, device=device, dtype=dtype), tolerance)


def test_a_bad_row_stays_alone(device):
    """Infinities and NaNs in x: the same rows as in the reference, and the others to the bit."""
    reference, new = make_pair(*SIZES, device=device)
    x = make_input(20, 33, device)
    clean = new(x)
    for row, values in enumerate([(NAN,), (INF,), (-INF,), (INF, -INF), (INF, NAN), (-INF,) * 33, (3e38, 3e38, -3e38)]):
        x[2 * row + 1, : len(values)] = torch.tensor(values)
    out = new(x)
    check_match(out, reference(x))
    assert torch.equal(out[0::2], clean[0::2])


@pytest.mark.parametrize("bad", [INF, -INF, NAN], ids=str)
@pytest.mark.parametrize("name", ["linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"])
def test_bad_parameters(device, name, bad):
    reference, new = make_pair(*SIZES, device=device)
    x = make_input(20, 33, device)
    x[3] = 0  # 0 * inf
    for module in reference, new:
        module.get_parameter(name).data.flatten()[7] = bad
    check_match(new(x), reference(x))


def test_infinity_times_zero(device):
    reference, new = make_pair(4, 3, 2, device=device)
    for module in reference, new:
        module.linear1.weight.data[:, 1] = 0
    x = torch.tensor([[1.0, INF, 0, 0], [INF, -INF, 0, 0], [1, 2, 3, 4]], device=device)
    assert new(x).isnan().tolist() == reference(x).isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("x, weight, expected", [(2.0**-120, 2.0**114, 0.7310586), (2.0**127, 2.0**-140, 0.5019531)])
def test_products_of_far_apart_magnitudes(device, x, weight, expected):
    reference, new = make_pair(64, 1, 1, device=device)
    for module in reference, new:
        set_parameters(module, weight, 0, 1, 0)
    x = torch.full((3, 64), x, device=device)
    check_match(new(x), reference(x), 1e-6)
    check_match(new(x).detach(), torch.full((3,), expected, device=device), 1e-6)


special = [0.0, -0.0, 1.0, -3.5, 1e-45, -1e-40, 1.2e-38, 1e-20, 6e-8, 65504.0, 1e5, 1e20, -1e30, 3.4e38, INF, -INF, NAN]
magnitudes = st.one_of(st.sampled_from(special), st.floats(width=32), st.floats(-10, 10, width=32))


@examples(100)
@given(st.data())
def test_any_values(device, data):
    """Any float32 in x and the parameters: finite, infinite and NaN where the reference is, against float64 within it.

    Where float32 itself is far from float64, as where products cancel or overflow, the reference's own error counts.
    """
    batch, input_size, hidden, output = 3, 2, 3, 2
    numbers = lambda *shape: torch.tensor(
        data.draw(st.lists(magnitudes, min_size=math.prod(shape), max_size=math.prod(shape)))
    ).reshape(shape)
    reference, new = make_pair(input_size, hidden, output, device=device)
    values = numbers(hidden, input_size), numbers(hidden), numbers(output, hidden), numbers(output)
    for module in reference, new:
        set_parameters(module, *values)
    x = numbers(batch, input_size).to(device)
    with torch.no_grad():
        expected, out = reference(x), new(x)
        exact = copy.deepcopy(reference).double()(x.double())
    # Where the order of summation decides between inf, NaN and a finite number, or cancels, float64 tells otherwise.
    sure = (exact - expected.double()).abs() <= 1e-5 * (1 + exact.abs())
    sure |= exact.isnan() & expected.isnan() | (exact == expected)
    check_match(out[sure], expected[sure])


SPELLINGS = {  # of the float32 switch -> whether products may round to TF32
    "set_float32_matmul_precision highest": (lambda: torch.set_float32_matmul_precision("highest"), False),
    "set_float32_matmul_precision high": (lambda: torch.set_float32_matmul_precision("high"), True),
    "set_float32_matmul_precision medium": (lambda: torch.set_float32_matmul_precision("medium"), True),
    "allow_tf32": (lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True), True),
    "not allow_tf32": (lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False), False),
    "matmul.fp32_precision tf32": (lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"), True),
    "matmul.fp32_precision ieee": (lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee"), False),
    "fp32_precision tf32": (lambda: setattr(torch.backends, "fp32_precision", "tf32"), True),
    "fp32_precision ieee": (lambda: setattr(torch.backends, "fp32_precision", "ieee"), False),
}


def switch_state():
    """What every getter of the switch says; an old one that a new setting has disabled says the error."""
    getters = (
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: torch.backends.cuda.matmul.fp32_precision,
        lambda: torch.backends.fp32_precision,
        lambda: torch.backends.mkldnn.matmul.fp32_precision,
    )
    return [str(outcome(getter)) for getter in getters]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("first, second", list(itertools.permutations(SPELLINGS, 2)))
def test_every_spelling_of_the_precision(device, precision, first, second):
    """Two settings one after the other never make it raise or warn, and it leaves them as they are.

    On a GPU it is as exact as the reference then is. The data tell TF32 from float32 by a factor of a thousand.
    """
    reference, new = make_pair(64, 64, 64, device=device)
    for module in reference, new:
        module.linear2.weight.data.mul_(100)
    x = make_input(32, 64, device)
    with torch.no_grad():
        exact = copy.deepcopy(reference).double()(x.double())
        for setting in first, second:
            SPELLINGS[setting][0]()
            before = switch_state()
            error = {module: (module(x) - exact).abs().max().item() for module in (new, reference)}
            assert switch_state() == before
            assert (error[new] > 1e-4) == (error[reference] > 1e-4), f"errors {error} after {setting}"
            if device == "cpu" and torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee"):
                assert error[new] < 1e-4
