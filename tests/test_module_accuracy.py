"""How exact ModelNew is on a GPU, against float64 and beside eager PyTorch at the same precision."""

import copy

import pytest
import torch
from conftest import check_close_to_largest, either_precision, examples, gradients, make_pair, set_up
from hypothesis import given
from hypothesis import strategies as st

import check
import reference as problem
from model_new import ModelNew

pytestmark = pytest.mark.gpu
GPU = "cuda:0"
UNIT = 2.0**-23  # of float32's mantissa
MODES = {"highest": UNIT, "high": 2.0**-10}  # the unit of the operands: float32's, TF32's and float16's
ROUNDINGS = 8
either_form = pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])


def rms(t):
    return t.double().square().mean().sqrt().item()


@torch.no_grad()
def exact_out(model, x):
    """``model(x)`` in float64, 2048 rows at a time."""
    double = copy.deepcopy(model).double()
    return torch.cat([double(rows.double()) for rows in x.split(2048)])


@pytest.mark.parametrize("distribution", check.DISTRIBUTIONS, ids=lambda d: d.name)
def test_the_five_distributions_at_full_size(distribution, precision):
    model = check.draw_model(problem, distribution, 0, GPU)
    (x,) = check.draw(problem, distribution, 1, device=GPU)
    new = ModelNew(*problem.get_init_inputs()).to(GPU)
    new.load_state_dict(model.state_dict())
    exact = exact_out(model, x)
    with torch.no_grad():
        precision("highest")
        ours, eager = rms(new(x) - exact), rms(model(x) - exact)
        assert ours <= max(2 * eager, 3 * UNIT * exact.abs().mean().item()), f"{ours:.2e}, eager float32 {eager:.2e}"
        precision("high")
        ours, eager = rms(new(x) - exact), rms(model(x) - exact)
        assert ours <= eager, f"{ours:.2e}, eager TF32 {eager:.2e}"


@pytest.mark.parametrize("distribution", check.DISTRIBUTIONS, ids=lambda d: d.name)
@pytest.mark.parametrize("sizes", [(21, 33, 65, 17), (2048, 1000, 1025, 1023)], ids=["plain", "split"])
def test_gradients(sizes, distribution, precision):
    """Within twice eager's own error at either precision, or 4 units of their rms, the loss weighted by rows."""
    batch, input_size, hidden, output = sizes
    torch.manual_seed(0)
    model = problem.Model(input_size, hidden, output)
    x = torch.rand(batch, input_size)
    with torch.no_grad():
        if distribution.parameters:
            distribution.parameters(model)
        if distribution.inputs:
            x = distribution.inputs(x)
    model, x, weights = model.to(GPU), x.to(GPU), torch.randn(batch, device=GPU)
    new = ModelNew(input_size, hidden, output).to(GPU)
    new.load_state_dict(model.state_dict())

    def gradients(module):
        dtype = next(module.parameters()).dtype
        leaf = x.to(dtype).requires_grad_()
        return torch.autograd.grad((module(leaf) * weights.to(dtype)).sum(), [leaf, *module.parameters()])

    exact = gradients(copy.deepcopy(model).double())
    for mode in MODES:
        precision(mode)
        names = "x", "weight1", "bias1", "weight2", "bias2"
        for name, truth, ours, eager in zip(names, exact, gradients(new), gradients(model), strict=True):
            error, allowed = rms(ours - truth), max(2 * rms(eager - truth), 4 * UNIT * rms(truth))
            assert error <= allowed, f"{mode}, {name}: {error:.2e}, allowed {allowed:.2e}"


def rounding_error(model, x, mode):
    """What one rounding of each operand, sum, bias and sigmoid may do to ``model(x)``: (batch), float64.

    At "high" h may be rounded as h - 1/2.
    """
    w1, b1, w2, b2 = (p.double() for p in model.parameters())
    x = x.double()
    h = torch.sigmoid(x @ w1.t() + b1)  # (batch, hidden)
    weights = torch.softmax(h @ w2.t() + b2, dim=1)  # (batch, output)
    rounded = h if mode == "highest" else h.clamp(min=0.5)
    in_h = rounded + h * (1 - h) * (x.abs() @ w1.abs().t() + b1.abs())
    in_y = (h + in_h) @ w2.abs().t() + b2.abs()
    return MODES[mode] / 2 * ((weights * in_y).sum(1) + torch.logsumexp(h @ w2.t() + b2, dim=1).abs() + 1)


def check_as_good_as_eager(new, model, x, mode):
    """Asserts that each element is within a few roundings of float64, each relative to its own product.

    Eager PyTorch is held to the same bound, which so is seen to be a fair one. What is not finite must be as in eager.
    """
    with torch.no_grad():
        out, eager, exact, unit = new(x), model(x), exact_out(model, x), rounding_error(model, x, mode)
    finite = eager.isfinite() & exact.isfinite()
    torch.testing.assert_close(out[~finite], eager[~finite], rtol=0, atol=0, equal_nan=True)
    for name, found in ("eager", eager), ("ours", out):
        ratio = ((found - exact).abs() / unit)[finite]
        assert not (ratio > ROUNDINGS).any(), f"{name} is off by {ratio.max():.1f} roundings, allowed {ROUNDINGS}"


SIZES = {  # what takes a row of logits: batch, input, hidden, output, no multiples of 8
    "parts of a warp": (37, 130, 67, 35),
    "warps": (37, 570, 530, 301),
    "blocks": (37, 1030, 2070, 1201),
}
any_width = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def spanning(rows, cols, octaves, seed, largest=3.0):
    """A matrix whose rows' elements span that many powers of two, evenly, from ``largest`` down."""
    generator = torch.Generator().manual_seed(seed)
    exponents = -octaves * torch.rand(rows, cols, generator=generator)
    return torch.randn(rows, cols, generator=generator).sign() * largest * 2**exponents


@either_precision
@either_form
@any_width
@pytest.mark.parametrize("octaves", [0, 10, 20, 40, 60])
@pytest.mark.parametrize("where", ["x", "weight1", "weight2", "all"])
def test_rows_that_span_many_magnitudes(hold, precision, mode, split, where, octaves, sizes):
    """Products of a row's small elements are as exact as eager's, though a neighbour is larger by far."""
    hold(split)
    precision(mode)
    model, new, x = set_up(sizes)
    with torch.no_grad():
        for module in model, new:
            if where in ("weight1", "all"):
                module.linear1.weight.copy_(spanning(*module.linear1.weight.shape, octaves, 3))
            if where in ("weight2", "all"):
                module.linear2.weight.copy_(spanning(*module.linear2.weight.shape, octaves, 4, largest=50))
    if where in ("x", "all"):
        x = spanning(*x.shape, octaves, 5).to(GPU)
    check_as_good_as_eager(new, model, x, mode)


@either_precision
@either_form
@any_width
@pytest.mark.parametrize("gap", [1e3, 1e6, 1e9, 1e15, 1e25])
@pytest.mark.parametrize("where", ["x", "weight1", "weight2"])
def test_a_large_element_that_meets_zero(hold, precision, mode, split, where, gap, sizes):
    """One element of each row is larger by ``gap``, and meets zeros: the rest alone decides, as exactly as in eager."""
    hold(split)
    precision(mode)
    model, new, x = set_up(sizes)
    with torch.no_grad():
        for module in model, new:
            weight1, weight2 = module.linear1.weight, module.linear2.weight
            if where == "x":
                weight1[:, 7] = 0
            if where == "weight1":
                weight1[:, 7] = gap
            if where == "weight2":
                weight2[:, 7] = gap
                module.linear1.bias[7] = -1e4  # sigmoid 0
        if where == "x":
            x[:, 7] = gap
        if where == "weight1":
            x[:, 7] = 0
    check_as_good_as_eager(new, model, x, mode)


SPECIAL = {
    "zeros": lambda m: m.zero_(),
    "a zero row": lambda m: m[3].zero_(),
    "a zero column": lambda m: m[:, 3].zero_(),
    "subnormals": lambda m: m.mul_(1e-39),
    "a subnormal row": lambda m: m[3].mul_(1e-40),
    "a row near the limit": lambda m: m[3].copy_(m[3].sign() * 1e35),  # no order of the sum overflows
    "a row beyond the scales' range": lambda m: m[3].mul_(1e30),
    "a tiny row": lambda m: m[3].mul_(1e-30),
    "an infinity": lambda m: m[3, 5].fill_(torch.inf),
    "minus infinity": lambda m: m[3, 5].fill_(-torch.inf),
    "both infinities": lambda m: (m[3, 5].fill_(torch.inf), m[3, 6].fill_(-torch.inf)),
    "NaN": lambda m: m[3, 5].fill_(torch.nan),
    "the last element NaN": lambda m: m[-1, -1].fill_(torch.nan),
    "the last element infinite": lambda m: m[-1, -1].fill_(torch.inf),
}


@either_precision
@either_form
@any_width
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("where", ["x", "weight1", "weight2"])
def test_special_values(hold, precision, mode, split, where, special, sizes):
    hold(split)
    precision(mode)
    model, new, x = set_up(sizes)
    with torch.no_grad():
        for module in model, new:
            if where != "x":
                SPECIAL[special](module.linear1.weight if where == "weight1" else module.linear2.weight)
        if where == "x":
            SPECIAL[special](x)
    check_as_good_as_eager(new, model, x, mode)


@either_precision
@either_form
def test_a_bias_cancels_what_float16_cannot_hold(hold, precision, mode, split):
    """z = 66048 - 66018, beside an element of x whose size has the row computed anew."""
    hold(split)
    precision(mode)
    model, new = make_pair(8, 5, 3, device=GPU)
    x = torch.zeros(2, 8, device=GPU)
    x[:, 0], x[0, 1] = 66048, 2.0**62
    with torch.no_grad():
        for module in model, new:
            module.linear1.weight[:, 0], module.linear1.weight[:, 1:] = 1, 0
            module.linear1.bias.fill_(-66018)
    check_as_good_as_eager(new, model, x, mode)


@either_precision
@either_form
@pytest.mark.parametrize("hidden", [67, 4352])
@pytest.mark.parametrize("large", [1.0, 2.0**61], ids=["in range", "a row beyond the scales' range"])
def test_gradients_where_all_is_saturated(hold, precision, mode, split, hidden, large):
    """z = -30 everywhere, in one row by an element of size ``large``: gradients 1e13 times smaller than most are."""
    hold(split)
    precision(mode)
    model, new = make_pair(20, hidden, 9, device=GPU)
    x = torch.ones(5, 20, device=GPU)
    x[0] = 0
    x[0, 0] = large
    with torch.no_grad():
        for module in model, new:
            module.linear1.weight[:, 0], module.linear1.weight[:, 1:] = -30 / large, -30 / 19
            module.linear1.bias.zero_()
    actual, expected = gradients(new, x.requires_grad_()), gradients(copy.deepcopy(model).double(), x.double())
    for name in "x", "linear1.weight", "linear1.bias":
        check_close_to_largest(actual[name].double(), expected[name], 1e-3 if mode == "highest" else 1e-2, msg=name)


@either_precision
@either_form
@examples(60)
@given(
    seed=st.integers(0, 2**31),
    octaves=st.tuples(*[st.integers(0, 80)] * 3),
    scales=st.tuples(*[st.integers(-60, 20)] * 3),
)
def test_any_span_at_any_scale(hold, precision, mode, split, seed, octaves, scales):
    """Spans and scales of x, W1 and W2 at once, and some zeros."""
    hold(split)
    precision(mode)
    model, new = make_pair(50, 41, 23, device=GPU)
    x = spanning(9, 50, octaves[0], seed, 2.0 ** scales[0]).to(GPU)
    with torch.no_grad():
        for module in model, new:
            module.linear1.weight.copy_(spanning(41, 50, octaves[1], seed + 1, 2.0 ** scales[1]))
            module.linear2.weight.copy_(spanning(23, 41, octaves[2], seed + 2, 2.0 ** min(scales[2], 6)))
            module.linear2.weight[:, ::3] = 0
    check_as_good_as_eager(new, model, x, mode)
