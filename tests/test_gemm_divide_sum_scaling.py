"""The second problem: both solutions against the reference, and the collapsed one against the truth in float64."""

import copy
import importlib.util
import sys

import pytest
import torch
from conftest import ROOT, check_close_to_largest

FOLDER = ROOT / "gemm_divide_sum_scaling"
SOLUTIONS = ["model_new", "model_collapsed"]


def load(name):
    """A file of the folder as a module, under another name than the main solution's."""
    spec = importlib.util.spec_from_file_location(f"second_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # torch.compile looks it up by name
    spec.loader.exec_module(module)
    return module


modules = {name: load(name) for name in ("reference", *SOLUTIONS)}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=SOLUTIONS)
def solution(request):
    return modules[request.param]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def pair(solution, input_size, hidden_size, device="cpu", dtype=torch.float32, scale=1.5):
    """The reference and the solution's model, with the same weight."""
    torch.manual_seed(0)
    reference = modules["reference"].Model(input_size, hidden_size, scale)
    new = solution.ModelNew(input_size, hidden_size, scale)
    new.load_state_dict(reference.state_dict())
    return reference.to(device, dtype), new.to(device, dtype)


def rand(*shape, device="cpu", dtype=torch.float32):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def exact(reference, x):
    """What the reference gives in float64, rounded to the dtype of ``x``."""
    return copy.deepcopy(reference).double()(x.double()).to(x.dtype)


def check_near(actual, reference, x):
    """Within a few roundings of what float32 can tell: relative to the sum of the magnitudes of all products."""
    expected = exact(reference, x)
    magnitudes = (x.abs().double() @ reference.weight.abs().double().sum(0)).unsqueeze(1) * abs(
        reference.scaling_factor
    )
    assert actual.shape == expected.shape and actual.dtype == expected.dtype and actual.device == expected.device
    assert actual.is_contiguous()
    finite = expected.isfinite()
    torch.testing.assert_close(actual[~finite], expected[~finite], rtol=0, atol=0, equal_nan=True)
    error = (actual.double() - expected.double()).abs()[finite]
    assert (error <= 1e-6 * magnitudes[finite] + 1e-30).all(), error.max()


def test_parameters_and_state_are_the_references(solution):
    models = []
    for kind in (modules["reference"].Model, solution.ModelNew):
        torch.manual_seed(3)
        models.append(kind(5, 7, 2.0))
    assert models[1].state_dict().keys() == {"weight"}
    assert torch.equal(models[0].weight, models[1].weight) and models[1].weight.shape == (7, 5)
    models[0].load_state_dict(models[1].state_dict())


@pytest.mark.parametrize(
    "batch, input_size, hidden_size",
    [(1, 1, 1), (3, 5, 7), (2, 64, 129), (129, 63, 1), (5, 65, 1025), (4, 1000, 3), (7, 1028, 300), (1, 4096, 2050)],
)
def test_odd_sizes(solution, device, batch, input_size, hidden_size):
    reference, new = pair(solution, input_size, hidden_size, device)
    x = rand(batch, input_size, device=device) - 0.25
    check_near(new(x), reference, x)


@pytest.mark.parametrize("sizes", [(0, 5, 7), (3, 0, 7), (3, 5, 0), (0, 0, 0)])
def test_empty_sizes(solution, device, sizes):
    batch, input_size, hidden_size = sizes
    reference, new = pair(solution, input_size, hidden_size, device)
    x = rand(batch, input_size, device=device).requires_grad_()
    out = new(x)
    assert torch.equal(out, reference(x)) and out.shape == (batch, 1)
    out.sum().backward()
    assert x.grad.shape == x.shape and new.weight.grad.shape == new.weight.shape
    assert not x.grad.any() and not new.weight.grad.any()


@pytest.mark.parametrize("fault", ["nan", "inf", "-inf", "both", "weight nan", "weight inf"])
def test_not_finite(solution, device, fault):
    """The same rows become the same; the others stay as they were."""
    reference, new = pair(solution, 65, 300, device)
    x = rand(9, 65, device=device)
    with torch.no_grad():
        for weight in (reference.weight, new.weight):
            weight[:, 10] = weight[:, 10].abs() + 1  # of one sign, the others of both
            weight[:, 11] = -weight[:, 11].abs() - 1
            weight[7, 12] = 0  # with an infinity, NaN
            if fault.startswith("weight"):
                weight[3, 4] = float(fault.split()[1])
    if not fault.startswith("weight"):
        for row, column in ((1, 10), (3, 11), (5, 12), (7, 20)):
            x[row, column] = float("inf" if fault == "both" else fault)
        if fault == "both":
            x[1, 11], x[3, 10] = float("inf"), float("-inf")
    check_near(new(x), reference, x)


def test_layouts(solution, device):
    reference, new = pair(solution, 64, 130, device)
    base = rand(40, 200, device=device)
    inputs = {
        "transposed": base[:, :64].t().contiguous().t(),
        "strided rows": base[::3, :64],
        "strided columns": base[:, 1:129:2],
        "expanded": base[:1, :64].expand(6, 64),
        "one element off": base.flatten()[1 : 1 + 12 * 64].view(12, 64),
        "two elements off": base.flatten()[2 : 2 + 12 * 64].view(12, 64),
    }
    for name, x in inputs.items():
        before = x.clone()
        check_near(new(x), reference, x)
        assert torch.equal(x, before), name
    for weight in (new.weight.data.t().contiguous().t(), rand(130 * 64 + 1, device=device)[1:].view(130, 64)):
        new.weight.data = reference.weight.data = weight
        check_near(new(inputs["one element off"]), reference, inputs["one element off"])


@pytest.mark.parametrize(
    "x, kind",
    [
        (torch.rand(2, 4), RuntimeError),
        (torch.rand(2, 0), RuntimeError),
        (torch.ones(2, 5, dtype=torch.int64), RuntimeError),
        (torch.rand(2, 5, dtype=torch.float64), RuntimeError),
        (torch.rand(5), IndexError),
    ],
)
def test_what_does_not_fit_raises_as_in_the_reference(solution, device, x, kind):
    reference, new = pair(solution, 5, 7, device)
    for model in (reference, new):
        with pytest.raises(kind):
            model(x.to(device))
    assert new(rand(2, 5, device=device)).isfinite().all()


@pytest.mark.gpu
def test_mixed_devices_raise_and_leave_the_process_usable(solution):
    _, new = pair(solution, 5, 7, "cuda")
    with pytest.raises(RuntimeError):
        new(torch.rand(2, 5))
    with pytest.raises(RuntimeError):
        new.cpu()(torch.rand(2, 5, device="cuda"))
    torch.cuda.synchronize()


def test_three_dimensions_are_summed_as_the_reference_does(solution, device):
    reference, new = pair(solution, 5, 7, device)
    x = rand(2, 3, 5, device=device)
    torch.testing.assert_close(new(x), reference(x))
    assert new(x).shape == (2, 1, 7)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float16, 1e-2), (torch.bfloat16, 1e-2)])
def test_other_dtypes(solution, device, dtype, tolerance):
    reference, new = pair(solution, 33, 65, device, dtype)
    x = rand(5, 33, device=device, dtype=dtype)
    torch.testing.assert_close(new(x), reference(x), rtol=tolerance, atol=tolerance)


def test_autocast(solution, device):
    reference, new = pair(solution, 33, 65, device)
    x = rand(5, 33, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        expected, out = reference(x), new(x)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("loss", [torch.sum, torch.mean, lambda out: out[::2].sum(), lambda out: (out**2).sum()])
def test_gradients(solution, device, loss):
    reference, new = pair(solution, 33, 65, device)
    gradients = []
    for model in (reference, new):
        x = rand(6, 33, device=device).requires_grad_()
        loss(model(x)).backward()
        gradients.append((x.grad, model.weight.grad))
    for actual, expected in zip(gradients[1], gradients[0], strict=True):
        check_close_to_largest(actual, expected)


def test_gradients_are_asked_for_as_in_the_reference(solution, device):
    _, new = pair(solution, 5, 7, device)
    x = rand(2, 5, device=device)
    assert new(x).requires_grad
    new.weight.requires_grad_(False)
    assert not new(x).requires_grad
    x.requires_grad_()
    new(x).sum().backward()
    assert x.grad is not None and new.weight.grad is None
    with torch.no_grad():
        assert not new(x).requires_grad


def test_gradgradcheck(solution):
    _, new = pair(solution, 4, 3, dtype=torch.float64)
    x = rand(3, 4, dtype=torch.float64).requires_grad_()
    call = lambda x, weight: torch.func.functional_call(new, {"weight": weight}, (x,))
    assert torch.autograd.gradcheck(call, (x, new.weight)) and torch.autograd.gradgradcheck(call, (x, new.weight))


def test_function_transforms(solution, device):
    """Gradients of each row apart, as ``torch.func`` takes them."""
    models = pair(solution, 5, 7, device)
    x = rand(3, 5, device=device)
    gradients = [
        torch.func.vmap(
            torch.func.grad(lambda w, row, m=m: torch.func.functional_call(m, {"weight": w}, (row[None],)).sum()),
            (None, 0),
        )(m.weight.detach(), x)
        for m in models
    ]
    torch.testing.assert_close(*gradients)


def test_forward_mode_gradients(solution, device):
    """Dual tensors get the reference's tangent."""
    models = pair(solution, 5, 7, device)
    x, tangent = rand(3, 5, device=device), rand(3, 5, device=device) - 0.5
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        expected, actual = (torch.autograd.forward_ad.unpack_dual(model(dual)).tangent for model in models)
    torch.testing.assert_close(actual, expected)


def test_weight_changed_in_any_way_is_seen(solution, device):
    reference, new = pair(solution, 33, 65, device)
    x = rand(5, 33, device=device)
    new(x)
    new.weight.data.mul_(-2)
    reference.weight.data.mul_(-2)
    check_near(new(x), reference, x)


def test_compile_and_export(solution, device):
    reference, new = pair(solution, 33, 65, device)
    x = rand(5, 33, device=device)
    compiled = torch.compile(new, fullgraph=True, backend="aot_eager")
    check_near(compiled(x), reference, x)
    compiled(x).sum().backward()
    for strict in (False, True):
        check_near(torch.export.export(new, (x,), strict=strict).module()(x), reference, x)
    torch._dynamo.reset()


def test_collapsed_form_is_nearer_to_the_truth(device):
    """At a quarter of the problem's sizes: within a rounding of the output, where the float32 product is not."""
    solution = modules["model_collapsed"]
    reference, new = pair(solution, 2048, 2048, device)
    x = rand(64, 2048, device=device)
    truth = copy.deepcopy(reference).double()(x.double())
    error, theirs = ((model(x).double() - truth).abs().max().item() for model in (new, reference))
    assert error <= 2**-24 * truth.abs().max().item() * 1.01 < theirs


def test_module_is_copied_and_saved(solution, device, tmp_path):
    reference, new = pair(solution, 5, 7, device)
    x = rand(2, 5, device=device)
    new(x)
    check_near(copy.deepcopy(new)(x), reference, x)
    torch.save(new.state_dict(), tmp_path / "state")
    new.load_state_dict(torch.load(tmp_path / "state", weights_only=True))


@pytest.mark.nvcc
def test_operator_on_meta_tensors(solution, monkeypatch):
    """What torch.compile learns of the result's shape; built without a GPU."""
    if not torch.cuda.device_count():
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    operators = getattr(torch.ops, solution.build())
    x, weight = torch.empty(4, 6, device="meta"), torch.empty(3, 6, device="meta")
    if solution is modules["model_new"]:
        assert operators.divide_sum_scale(x, 1.5).shape == (4, 1)
        with pytest.raises(RuntimeError, match="product must be a float32 matrix, got Double"):
            operators.divide_sum_scale(x.double(), 1.5)
        assert operators.spread(x[:, :1], 5, 1.5).shape == (4, 5)
        with pytest.raises(RuntimeError, match="grad must be a float32 column, got Float"):
            operators.spread(x, 5, 1.5)
    else:
        assert operators.collapsed_gemm_sum(x, weight, 1.5).shape == (4, 1)
        with pytest.raises(RuntimeError, match="must be float32 matrices of as many columns"):
            operators.collapsed_gemm_sum(x, weight.T, 1.5)


# ---- On a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_plain_form_at_the_problems_sizes_is_eager_bit_for_bit():
    """Or else outputs near zero do not fit the tolerance."""
    problem, solution = modules["reference"], modules["model_new"]
    reference, new = pair(solution, problem.input_size, problem.hidden_size, "cuda")
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.rand(problem.batch_size, problem.input_size, device="cuda")
        with torch.no_grad():
            assert torch.equal(new(x), reference(x)), (new(x) - reference(x)).abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["highest", "high"])
@pytest.mark.parametrize(
    "batch, input_size, hidden_size",
    [
        (1, 1, 1),
        (0, 5, 7),
        (3, 0, 7),
        (3, 5, 0),
        (129, 63, 1),  # one column
        (70_000, 3, 1),
        (70_000, 3, 3),
        (7, 65, 127),  # rows that do and do not start on 16 bytes, below and above where PyTorch's loads do
        (7, 65, 128),
        (5, 65, 1025),
        (1000, 65, 1026),
        (1, 256, 8192),  # few rows
        (3, 33, 8191),
        (300, 64, 4096),
        (1, 3, 300_000),  # wide rows, of several blocks each
        (2, 3, 1_000_003),
        (200, 3, 100_000),
    ],
)
def test_plain_form_is_eager_bit_for_bit(batch, input_size, hidden_size, mode, precision):
    """Outputs and gradients, whatever the order in which this version of PyTorch adds for these sizes."""
    precision(mode)
    models = pair(modules["model_new"], input_size, hidden_size, "cuda")
    upstream = rand(batch, 1, device="cuda") - 0.5
    found = []
    for model in models:
        x = (rand(batch, input_size, device="cuda") - 0.25).requires_grad_()
        out = model(x)
        out.backward(upstream)
        with torch.no_grad():
            found.append((out.detach(), model(x), x.grad, model.weight.grad))
    for name, expected, actual in zip(("out", "out without gradients", "x", "weight"), *found, strict=True):
        assert torch.equal(actual, expected), (name, (actual - expected).abs().max())


@pytest.mark.gpu
def test_plain_form_of_any_layout_is_eager_bit_for_bit():
    """Of ``x`` and the weight, that is; the product is contiguous."""
    reference, new = pair(modules["model_new"], 64, 1030, "cuda")
    base = rand(40, 200, device="cuda") - 0.25
    with torch.no_grad():
        for weight in (reference.weight.data, reference.weight.data.t().contiguous().t()):
            new.weight.data = reference.weight.data = weight
            for x in (base[:, :64].t().contiguous().t(), base[::3, :64], base[:, 1:129:2], base[:1, :64].expand(6, 64)):
                assert torch.equal(new(x), reference(x)), (x.shape, x.stride())


@pytest.mark.gpu
def test_gradients_that_are_expanded_or_strided_are_eager_bit_for_bit():
    models = pair(modules["model_new"], 65, 1026, "cuda")
    x = rand(9, 65, device="cuda")
    for loss in (torch.sum, lambda out: out[::2].sum(), lambda out: out.expand(9, 5)[:, 1:3].sum()):
        gradients = [torch.autograd.grad(loss(model(x)), model.weight)[0] for model in models]
        assert torch.equal(*gradients)


def eager(product, scale):
    return torch.sum(product / 2, dim=1, keepdim=True) * scale


@pytest.mark.gpu
@pytest.mark.parametrize("rows, width", [(1, 1), (1, 5000), (6, 129), (40, 8192), (3000, 17), (2, 1_000_003)])
@pytest.mark.parametrize("fault", ["large", "subnormal", "infinite", "nan"])
def test_operator_is_eager_bit_for_bit_at_the_ends_of_the_range(rows, width, fault):
    """Halving comes first: what would overflow does not, and what is subnormal is rounded."""
    product = rand(rows, width, device="cuda") - 0.5
    if fault == "large":
        product = torch.where(product > 0, 3e38, -3e38)  # a sum may end beyond the range
    elif fault == "subnormal":
        product = product * 2**-145  # odd multiples of the least number among them
    else:
        product[0, width // 2] = float(fault[:3])
    scale = 2**20 if fault == "subnormal" else 0.3
    actual = modules["model_new"].extension(product.device.index).divide_sum_scale(product, scale)
    torch.testing.assert_close(actual, eager(product, scale), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_operator_takes_any_layout():
    """Small integers, whose sums are exact in any order; and the transposed one bit for bit."""
    operator = modules["model_new"].extension(0).divide_sum_scale
    base = torch.randint(-8, 9, (130, 2000), generator=torch.Generator().manual_seed(1)).float().cuda()
    for product in (base.t(), base[:, ::3], base[5:, 1:1998], base[:1].expand(7, 2000), base[:, :1], base[:, :0]):
        assert torch.equal(operator(product, 1.5), eager(product, 1.5)), (product.shape, product.stride())
    product = rand(130, 2000, device="cuda").t()
    assert torch.equal(operator(product, 1.5), eager(product, 1.5))


@pytest.mark.gpu
@pytest.mark.parametrize("rows, width", [(1, 2**29 + 5), (3, 2**28 + 1), (2**28 + 1, 3), (2**29 + 5, 1)])
def test_operator_is_eager_bit_for_bit_beyond_32_bit_offsets(rows, width):
    """More than 2**31 bytes, which PyTorch sums in parts: only what is finished is scaled."""
    product = torch.rand(rows, width, device="cuda") - 0.5
    assert torch.equal(modules["model_new"].extension(0).divide_sum_scale(product, 3.0), eager(product, 3.0))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 5, 8])
@pytest.mark.parametrize("input_size", [1, 4, 63, 64, 68, 1024, 1025, 4096, 4100, 8196])
@pytest.mark.parametrize("hidden_size", [1, 31, 33, 256, 257, 1000])
def test_collapsed_form_around_the_ends_of_its_rings(batch, input_size, hidden_size):
    reference, new = pair(modules["model_collapsed"], input_size, hidden_size, "cuda")
    x = rand(batch, input_size, device="cuda") - 0.25
    with torch.no_grad():
        check_near(new(x), reference, x)


@pytest.mark.gpu
def test_collapsed_form_sees_what_was_written_just_before():
    """Its second kernel starts while the first one runs, and yet reads nothing that is still to be written."""
    _, new = pair(modules["model_collapsed"], 4096, 2048, "cuda")
    x, strided = torch.empty(600, 4096, device="cuda"), torch.empty(600, 4096, 2, device="cuda")[..., 0]
    outs = []
    with torch.no_grad():
        for step in range(1, 60):
            new.weight.fill_(step)
            x.fill_(2 * step)
            strided.fill_(3 * step)
            outs.append((step, new(x), new(strided)))
    for step, out, other in outs:
        one = 4096 * 2048 * step**2 * 0.75
        assert (out == 2 * one).all() and (other == 3 * one).all(), step


@pytest.mark.gpu
def test_collapsed_form_at_the_problems_sizes():
    problem, solution = modules["reference"], modules["model_collapsed"]
    reference, new = pair(solution, problem.input_size, problem.hidden_size, "cuda")
    x = torch.rand(problem.batch_size, problem.input_size, device="cuda")
    with torch.no_grad():
        truth = copy.deepcopy(reference).double()(x.double())
        out = new(x)
        assert (out.double() - truth).abs().max().item() <= 3e-4
        assert torch.equal(out, new(x))  # deterministic
        assert torch.equal(out[5:6], new(x[5:6]))  # whatever the batch
        assert torch.equal(out[:1000], new(x[:1000]))


@pytest.mark.gpu
@pytest.mark.parametrize("batch, input_size, hidden_size", [(3, 3, 300_000), (70_000, 3, 3), (3, 300_000, 3)])
def test_grid_limits(solution, batch, input_size, hidden_size):
    reference, new = pair(solution, input_size, hidden_size, "cuda")
    x = rand(batch, input_size, device="cuda")
    check_near(new(x), reference, x)


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["weight", "x"])
def test_more_than_two_to_the_31_elements(what):
    """Of the collapsed form's matrices; rows beyond the limit count."""
    solution, long = modules["model_collapsed"], 2**31 // 8192 + 3
    sizes = (2, 8192, long) if what == "weight" else (long, 8192, 2)
    _, new = pair(solution, 8, 8, "cuda")
    new.weight = torch.nn.Parameter(torch.ones(sizes[2], 8192, device="cuda"), requires_grad=False)
    x = torch.ones(sizes[0], 8192, device="cuda")
    (new.weight if what == "weight" else x)[-1] = 3
    out = new(x)
    total = 8192 * (sizes[2] + (2 if what == "weight" else 0)) * 0.75
    assert out[0].item() == pytest.approx(total, rel=1e-7)
    assert out[-1].item() == pytest.approx(total * (1 if what == "weight" else 3), rel=1e-7)


@pytest.mark.gpu
def test_product_of_more_than_two_to_the_31_elements():
    rows = 2**31 // 8192 + 3
    product = torch.ones(rows, 8192, device="cuda")
    product[-1] = 3
    out = modules["model_new"].extension(product.device.index).divide_sum_scale(product, 2.0)
    assert out[0].item() == out[-2].item() == 8192 and out[-1].item() == 3 * 8192
    grad = torch.arange(rows, device="cuda").remainder(1000).float().unsqueeze(1)
    spread = modules["model_new"].extension(product.device.index).spread(grad, 8192, 2.0)
    assert torch.equal(spread[:, 0], grad[:, 0]) and torch.equal(spread[-1], grad[-1].expand(8192))


@pytest.mark.gpu
def test_current_stream_and_graphs(solution):
    reference, new = pair(solution, 1028, 300, "cuda")
    x = rand(64, 1028, device="cuda")
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for factor in range(1, 20):
                torch.cuda._sleep(200_000)
                moved = x * factor
                out = new(moved)
                del moved
        torch.cuda.current_stream().wait_stream(stream)
        check_near(out, reference, x * 19)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = new(x)
        for factor in (2, 3):
            x.mul_(factor)
            graph.replay()
            check_near(out, reference, x)


@pytest.mark.multigpu
def test_current_device_is_not_the_tensors(solution):
    reference, new = pair(solution, 1028, 300, "cuda:1")
    x = rand(64, 1028, device="cuda:1").requires_grad_()
    with torch.cuda.device(0):
        out = new(x)
        check_near(out, reference, x)
        out.sum().backward()
        assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_unwritten_memory_is_never_seen(solution):
    """Freed blocks are full of NaN, and stay what results are made in."""
    reference, new = pair(solution, 1028, 300, "cuda")
    x = rand(64, 1028, device="cuda")
    for size in (64, 64 * 300, 64 * 1028, 1028 * 8):
        torch.full((size,), torch.nan, device="cuda", dtype=torch.float64)
    check_near(new(x), reference, x)
