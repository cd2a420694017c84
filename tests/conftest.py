"""What the tests share: the project's folder on the import path, and skips, with the reason, for what is missing."""

import contextlib
import functools
import sys
import types
from pathlib import Path

import hypothesis
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def pytest_collection_modifyitems(items):
    """Skip ``gpu`` and ``multigpu`` tests where there are not that many GPUs."""
    gpus = torch.cuda.device_count()
    for item in items:
        needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
        if gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPU(s), this machine has {gpus}"))


# ---- What the tests of the drop-in share (test_module*.py) -----------------------------------------------------------


class _Held:
    """The fused operators, each held to one of its forms: float16 products (``split``) or plain cuBLAS."""

    def __init__(self, operators, split):
        self.operators, self.split = operators, split

    def __getattr__(self, name):
        operator = getattr(self.operators, name).default
        return types.SimpleNamespace(default=functools.partial(operator, split=self.split))


@pytest.fixture
def hold(monkeypatch):
    """``hold(split)``: from now on the module's fused operators take that form, whatever the size."""
    import model_new

    extension = model_new.extension
    return lambda split: monkeypatch.setattr(model_new, "extension", lambda index: _Held(extension(index), split))


@pytest.fixture(params=["cpu", *(pytest.param(form, marks=pytest.mark.gpu) for form in ("plain", "split"))])
def device(request):
    """The CPU, and the GPU with the module held to each of its forms, which at small sizes it would not choose."""
    if request.param == "cpu":
        return "cpu"
    request.getfixturevalue("hold")(request.param == "split")
    return "cuda:0"


@pytest.fixture
def precision():
    """``precision(mode)`` sets the float32 switch, to "highest" or "high"; afterwards all spellings are as before.

    A test that sets another spelling asks for this fixture too.
    """
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision("highest")  # the old spelling and, so that they agree, the new one
    for owner in (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        owner.fp32_precision = "none"


either_precision = pytest.mark.parametrize("mode", ["highest", "high"])


def make_pair(*sizes, device="cpu", dtype=torch.float32, seed=0):
    """The reference and ``ModelNew`` of these sizes (input, hidden, output), with the same parameters."""
    from model_new import ModelNew
    from reference import Model

    torch.manual_seed(seed)
    reference, new = Model(*sizes), ModelNew(*sizes)
    new.load_state_dict(reference.state_dict())
    return reference.to(device, dtype), new.to(device, dtype)


def make_input(batch, input_size, device="cpu", dtype=torch.float32, seed=1, requires_grad=False):
    """``x`` (batch, input), normal with standard deviation 3: sigmoids all over their range."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(batch, input_size, generator=generator)
    return x.to(device, dtype).requires_grad_(requires_grad)


def set_up(sizes, **options):
    """The reference, ``ModelNew`` and x of these sizes (batch, input, hidden, output), on the GPU."""
    batch, *rest = sizes
    return *make_pair(*rest, device="cuda:0"), make_input(batch, rest[0], "cuda:0", **options)


def check_match(actual, expected, tolerance=1e-4):
    """Asserts that ``actual`` is of the expected shape, dtype and device and within the tolerance; NaN matches NaN."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def check_close_to_largest(actual, expected, tolerance=1e-4, **options):
    """Asserts the same to within ``tolerance`` of each element and of the largest one."""
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item(), **options
    )


def outcome(function, *arguments):
    """What a call comes to: its result, or the exception that it raises."""
    try:
        return function(*arguments)
    except Exception as error:
        return error


def check_same_outcome(actual, expected, tolerance=1e-4):
    """Asserts that two outcomes are both results that match, or both exceptions of one type."""
    if isinstance(expected, Exception):
        assert type(actual) is type(expected), f"got {actual!r}, the reference {expected!r}"
    else:
        assert not isinstance(actual, Exception), f"got {actual!r}, the reference a result"
        check_match(actual, expected, tolerance)


@contextlib.contextmanager
def _enable_grad_inside_inference_mode():
    with torch.inference_mode(), torch.enable_grad():
        yield


@pytest.fixture(params=[torch.no_grad, torch.inference_mode, _enable_grad_inside_inference_mode])
def gradients_off(request):
    """Of a context in which no graph is kept."""
    return request.param


def check_no_graph(out, expected):
    """Asserts that ``out`` matches, with no graph behind it, and is an inference tensor where ``expected`` is one."""
    check_match(out, expected)
    assert not out.requires_grad and out.grad_fn is None and out.is_inference() == expected.is_inference()


class NoGradient(torch.autograd.Function):
    """The same tensor; behind it there is no gradient, not even of zeros."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def gradients(module, x, loss=torch.sum):
    """The gradients of ``loss(module(x))``, by name: "x" and the parameters'; those that are not asked for are None."""
    x = x.detach().requires_grad_(x.requires_grad)
    module.zero_grad()
    loss(module(x)).backward()
    return {"x": x.grad} | {name: parameter.grad for name, parameter in module.named_parameters()}


def check_gradients(new, reference, x, loss=torch.sum, tolerance=1e-4):
    """Asserts the same gradients of both modules, within ``tolerance`` of the largest element (of x: of its row)."""
    actual, expected = gradients(new, x, loss), gradients(reference, x, loss)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient is None:
            assert actual[name] is None, f"a gradient of {name}, which the reference does not give"
            continue
        assert actual[name] is not None, f"no gradient of {name}"
        sizes = gradient.nan_to_num(0, 0, 0).abs()
        if gradient.numel():  # a row of x has its own scale
            sizes = sizes.amax(-1, keepdim=True) if name == "x" else sizes.max()
        allowed = tolerance * (sizes + gradient.abs())
        wrong = ~(((actual[name] - gradient).abs() <= allowed) | (actual[name].isnan() & gradient.isnan()))
        wrong &= actual[name] != gradient  # infinities of the same sign
        assert actual[name].shape == gradient.shape and actual[name].dtype == gradient.dtype, name
        assert not wrong.any(), f"{name}: {actual[name][wrong][:3]}, the reference {gradient[wrong][:3]}"


def examples(count):
    """hypothesis's settings for ``count`` examples, the same in each run."""
    unmoved = hypothesis.HealthCheck.function_scoped_fixture  # `device` is the same for all examples
    return hypothesis.settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=[unmoved]
    )
