"""ModelNew on a GPU: what depends on streams, graphs, memory, compilers and size.

What holds on every device is in test_module.py, and runs there through both forms of the fused operators.
"""

import copy
import gc
import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch
from conftest import (
    ROOT,
    check_close_to_largest,
    check_gradients,
    check_match,
    check_same_outcome,
    either_precision,
    gradients,
    make_input,
    make_pair,
    outcome,
    set_up,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import model_new

pytestmark = pytest.mark.gpu
GPU = "cuda:0"
SIZES = {  # batch, input, hidden, output: sizes at which the module by itself chooses each form
    "plain": (21, 33, 65, 17),  # by mm
    "plain by addmm": (9, 33, 65, 17),  # in float32; in TF32 by mm
    "split": (2048, 1000, 1025, 1023),
}
either_form = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
TOLERANCE = {"highest": 1e-4, "high": 1e-2}


@pytest.fixture
def deterministic(monkeypatch):
    """PyTorch's deterministic mode, in which memory that nobody has written yet is NaN, and cuBLAS may be used."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run_script(script, **environment):
    """Runs a Python script in the project's folder, in a process of its own."""
    start = "import sys, torch; from model_new import ModelNew; x = torch.randn(21, 33, device='cuda')\n"
    start += "model = ModelNew(33, 65, 17).cuda(); plain = lambda x: torch.logsumexp(model.linear2(torch.sigmoid("
    start += "model.linear1(x))), dim=1)\n"
    process = subprocess.run(
        [sys.executable, "-c", start + script], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


# ---- Operators -------------------------------------------------------------------------------------------------------


def operator_calls(batch, input_size, hidden, output, tf32, split):
    """Each operator with arguments that fit: (operator, positional arguments)."""
    _, new, x = set_up((batch, input_size, hidden, output))
    operators = model_new.extension(0)
    weight1, bias1, weight2, bias2 = (p.detach() for p in new.parameters())
    inputs = x, weight1, bias1, weight2, bias2, tf32
    kept = operators.forward_keeping(*inputs, split=split)
    grad = torch.linspace(-1, 2, batch, device=GPU)
    yield operators.forward.default, inputs
    yield operators.forward_keeping.default, inputs
    for needs in itertools.product([False, True], repeat=3):
        yield operators.gradients.default, (grad, x, weight1, weight2, *kept, tf32, *needs)


@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
@pytest.mark.parametrize("tf32", [False, True], ids=["float32", "tf32"])
def test_opcheck(split, tf32):
    for operator, arguments in operator_calls(16, 24, 40, 32, tf32, split):
        torch.library.opcheck(operator, arguments, {"split": split})
    for operator, arguments in operator_calls(5, 33, 65, 17, tf32, split):  # their padding is nobody's to compare
        torch.library.opcheck(operator, arguments, {"split": split}, test_utils="test_faketensor")


@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
def test_operators_refuse_what_does_not_fit(split):
    forward = model_new.extension(0).forward
    _, new, x = set_up((5, 33, 65, 17))
    good = [x, *(p.detach() for p in new.parameters())]
    for i, name in enumerate(("x", "weight1", "bias1", "weight2", "bias2")):
        for bad in (good[i][..., :-1], good[i].double(), good[i].cpu(), good[i][None], good[i][:0]):
            if name == "x" and bad.shape == (0, 33):
                continue
            arguments = [*good[:i], bad, *good[i + 1 :]]
            with pytest.raises((RuntimeError, NotImplementedError)):
                forward(*arguments, False, split=split)
    torch.cuda.synchronize()
    check_match(forward(*good, False, split=split), new(x).detach())


@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
def test_operators_refuse_more_columns_than_they_count(split):
    """The one element is expanded, so that nothing large is there."""
    x, many = torch.ones(1, 1, device=GPU), 2**31 - 32768
    with pytest.raises(RuntimeError, match="must be below"):
        model_new.extension(0).forward(x, x, x[0], x.expand(many, 1), x[0].expand(many), False, split=split)


def test_mixed_devices():
    """RuntimeError, in which devices are named, and the GPU is usable after."""
    reference, new, x = set_up(SIZES["plain"])
    with pytest.raises(RuntimeError, match=r"x must be on cuda:0.*on cpu"):
        new(x.cpu())
    with pytest.raises(RuntimeError, match=r"x must be on cpu.*on cuda:0"):
        copy.deepcopy(new).cpu()(x)
    half_moved = copy.deepcopy(new)
    half_moved.linear2.cpu()
    with pytest.raises(RuntimeError, match="device"):
        half_moved(x)
    check_match(new(x), reference(x))


# ---- Streams, threads, graphs ----------------------------------------------------------------------------------------


@either_form
def test_runs_on_the_current_stream(sizes):
    """Work that writes x is still waiting when the module is called; nothing of the module's is on another stream."""
    reference, new, x = set_up(sizes, requires_grad=True)
    inputs = [make_input(*sizes[:2], GPU, seed=seed) for seed in range(4)]
    expected = [reference(i).detach() for i in inputs]
    expected_grads = [gradients(reference, i)["linear1.weight"] for i in inputs]
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    buffers = [torch.zeros_like(inputs[0]).fill_(torch.nan) for _ in streams]
    new(x).sum().backward()  # once, so that all kernels are loaded: loading one may wait for the whole GPU
    with torch.no_grad():
        new(x)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # half a second on the default stream: what is put there stays undone
    done = []
    for step in range(100):
        which = step % 2
        with torch.cuda.stream(streams[which]):
            torch.cuda._sleep(20_000)
            buffers[which].copy_(inputs[step % 4])
            with torch.no_grad():
                done.append((step % 4, new(buffers[which])))
            buffers[which].fill_(torch.nan)
    for stream in streams:
        stream.synchronize()
    assert not torch.cuda.default_stream().query(), "the module waited for the default stream"
    for which, out in done:
        check_match(out, expected[which])
    with torch.cuda.stream(streams[0]):
        for which in range(4):
            torch.cuda._sleep(20_000)
            buffers[0].copy_(inputs[which])
            new.zero_grad()
            new(buffers[0]).sum().backward()
            gradient = new.linear1.weight.grad.clone()
            buffers[0].fill_(torch.nan)
            check_close_to_largest(gradient, expected_grads[which])


@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
def test_copies_live_as_long_as_they_are_read(hold, split):
    """Layouts that are copied first, on a side stream, with other memory taken and given back in between."""
    hold(split)
    reference, new, _ = set_up((40, 33, 65, 17))
    for module in reference, new:
        module.linear1.weight = nn.Parameter(module.linear1.weight.detach().t().contiguous().t())
    x = make_input(33, 40, GPU).t()
    before = x.clone()
    with torch.no_grad():
        expected = reference(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = []
            for _ in range(1000):
                outs.append(new(x))
                torch.full((40, 33), torch.nan, device=GPU)
            check_match(torch.stack(outs), expected.expand(1000, -1))
        torch.cuda.synchronize()
    assert torch.equal(x, before)


@either_form
def test_threads(sizes):
    """Four threads, each on its own stream, on one module."""
    reference, new, _ = set_up(sizes)
    inputs = [make_input(*sizes[:2], GPU, seed=seed) for seed in range(4)]
    expected = [reference(x).detach() for x in inputs]
    new(inputs[0])
    torch.cuda.synchronize()
    together = threading.Barrier(4)

    def work(which):
        together.wait()
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            outs = [new(inputs[which]) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        return outs

    with ThreadPoolExecutor(4) as pool:
        for which, outs in enumerate(pool.map(work, range(4))):
            for out in outs:
                check_match(out, expected[which])


@either_form
@either_precision
def test_cublas_is_left_as_found(sizes, mode, precision):
    precision(mode)
    _, new, x = set_up(sizes, requires_grad=True)
    a = make_input(300, 301, GPU)
    before = a @ a.t()
    new(x).sum().backward()
    assert torch.equal(a @ a.t(), before)


@either_form
@either_precision
def test_graph_capture(sizes, mode, precision):
    """Replays see new inputs and new weights."""
    precision(mode)
    reference, new, x = set_up(sizes)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                new(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = new(x)
        for seed in 5, 6, 7:
            x.copy_(make_input(*sizes[:2], GPU, seed=seed))
            for module in reference, new:
                module.linear1.weight.mul_(1.25)
                module.linear2.bias.add_(0.5)
            graph.replay()
            check_match(out, reference(x), TOLERANCE[mode])


@either_form
def test_graphed_callable(sizes):
    reference, new, x = set_up(sizes, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(new), (x,))
    for seed in 5, 6, 7:
        check_gradients(graphed, reference, make_input(*sizes[:2], GPU, seed=seed, requires_grad=True))


def test_the_first_call_ever_inside_a_graph():
    """Works, or says in one error to call the module once before; the process goes on either way."""
    out = run_script("""
graph, text = torch.cuda.CUDAGraph(), ""
torch.mm(x, x.t())  # PyTorch's own cuBLAS handle and workspace
try:
    with torch.no_grad(), torch.cuda.graph(graph):
        out = model(x)
except RuntimeError as error:
    text = str(error)
else:
    graph.replay()
    assert torch.allclose(out, plain(x), atol=1e-4)
torch.cuda.synchronize()
assert torch.allclose(model(x), plain(x), atol=1e-4)
print("captured" if not text else text)
""")
    assert out.strip() == "captured" or "once" in out


def test_exit_right_after_a_forward():
    run_script("""
from threading import Thread
thread = Thread(target=lambda: model(x).sum().backward())
thread.start(), thread.join()
model(x)
""")


@either_form
@either_precision
def test_no_synchronisation(sizes, mode, precision):
    precision(mode)
    _, new, x = set_up(sizes, requires_grad=True)
    new(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        new(x).sum().backward()
        with torch.no_grad():
            new(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- Memory and determinism ------------------------------------------------------------------------------------------


@either_form
@pytest.mark.parametrize("first", ["new", "reference"])
def test_memory_that_was_used_before(sizes, first):
    """The allocator hands out blocks full of NaN; what a launch leaves unwritten would show."""
    reference, new, x = set_up(sizes)
    batch, _, hidden, output = sizes
    outs = []
    for module in (new, reference) if first == "new" else (reference, new):
        for count in batch * hidden, batch * output, batch:
            torch.full((2, count), torch.nan, device=GPU).unbind()
        outs.append(module(x).detach())
    check_match(*outs)
    assert not outs[0].isnan().any()


@either_form
@either_precision
def test_memory_that_nobody_has_written(sizes, mode, precision, deterministic):
    precision(mode)
    reference, new, x = set_up(sizes, requires_grad=True)
    check_match(new(x), reference(x), TOLERANCE[mode])
    check_gradients(new, reference, x, tolerance=TOLERANCE[mode])


@either_form
@either_precision
def test_the_same_bits_from_run_to_run(sizes, mode, precision):
    """With two other streams busy, which changes when what runs."""
    precision(mode)
    _, new, x = set_up(sizes, requires_grad=True)
    first = new(x).detach()
    first_gradients = gradients(new, x)
    busy = torch.cuda.Stream(), torch.cuda.Stream()
    a = make_input(1024, 1024, GPU)
    for step in range(100):
        with torch.cuda.stream(busy[step % 2]):
            torch.mm(a, a)
        assert torch.equal(new(x), first)
        for name, gradient in gradients(new, x).items():
            assert torch.equal(gradient, first_gradients[name]), name


@either_form
def test_deterministic_mode_without_a_workspace_setting(sizes, monkeypatch):
    """PyTorch's own products raise then; ours raise too, or are the same to the bit."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    _, new, x = set_up(sizes)
    torch.use_deterministic_algorithms(True)
    try:
        first = outcome(new, x)
        if isinstance(first, Exception):
            assert isinstance(first, RuntimeError) and "CUBLAS_WORKSPACE_CONFIG" in str(first)
        else:
            assert all(torch.equal(new(x), first) for _ in range(20))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("there", "back"), [("high", "highest"), ("highest", "high")])
def test_precision_that_changes_before_the_backward(precision, deterministic, there, back):
    """At this size one precision takes the plain form and the other the split form."""
    reference, new, x = set_up((512, 2048, 4096, 1024), requires_grad=True)

    def gradients_of(module):
        precision(there)
        out = module(x)
        precision(back)
        return torch.autograd.grad(out.sum(), [x, *module.parameters()])

    for ours, theirs in zip(gradients_of(new), gradients_of(reference), strict=True):
        check_close_to_largest(ours, theirs, 1e-2)


@either_form
def test_memory_stays_flat_without_backward(sizes):
    _, new, x = set_up(sizes, requires_grad=True)
    new(x), new(x)
    gc.collect()  # what other tests left
    torch.cuda.synchronize()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(1000):
        new(x)
    assert torch.cuda.memory_allocated() <= before and torch.cuda.memory_reserved() == reserved


# ---- Compilers and other processes -----------------------------------------------------------------------------------


@either_precision
def test_compile(fresh_compiler, precision, mode):
    """In one graph, training and inference, with at most one more compilation for any batch; 0 and 1 have their own."""
    precision(mode)
    reference, new, _ = set_up(SIZES["plain"])
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(new, fullgraph=True, backend=counter)
    for batch in 16, 17, 18, 40:
        x = make_input(batch, 33, GPU, requires_grad=True)
        check_match(compiled(x), reference(x), TOLERANCE[mode])
        check_match(gradients(compiled, x)["x"], gradients(reference, x)["x"], 1e-2)
    assert counter.frame_count <= 2
    for batch in 1, 0, 23:
        x = make_input(batch, 33, GPU)
        check_match(compiled(x), reference(x), TOLERANCE[mode])
        with torch.no_grad():
            check_match(compiled(x), reference(x), TOLERANCE[mode])
    torch._dynamo.reset()  # of the eight compilations of one function that PyTorch allows
    big, new_big, x = set_up(SIZES["split"])
    check_match(torch.compile(new_big, fullgraph=True)(x), big(x), TOLERANCE[mode])


def test_compile_within_a_larger_function(fresh_compiler):
    reference, new, x = set_up(SIZES["plain"])
    around = lambda module: lambda x: torch.stack((module(x.t() * 2), module(x.t())[::1])).exp()
    x = x.t().contiguous()
    check_match(torch.compile(around(new), fullgraph=True)(x), around(reference)(x))


def test_compile_follows_the_precision(fresh_compiler, precision):
    """Settings that are changed after compiling, to and fro."""
    _, new, x = set_up(SIZES["split"])
    compiled = torch.compile(new, fullgraph=True)
    with torch.no_grad():
        for mode in "highest", "high", "highest":
            precision(mode)
            assert torch.equal(compiled(x), new(x)), mode
        precision("highest")
        exact = new(x)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert torch.equal(compiled(x), new(x)) and not torch.equal(compiled(x), exact)


@either_form
def test_reduce_overhead(sizes, fresh_compiler):
    reference, new, _ = set_up(sizes)
    compiled = torch.compile(new, mode="reduce-overhead", fullgraph=True)
    for seed in range(5):
        x = make_input(*sizes[:2], GPU, seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            check_match(compiled(x).clone(), reference(x))
        reference.linear1.weight.data.mul_(1.1), new.linear1.weight.data.mul_(1.1)


def test_compile_before_anything_else():
    """The very first call in a process is a compiled one."""
    run_script("""
with torch.no_grad():
    assert torch.allclose(torch.compile(model, fullgraph=True)(x), plain(x), atol=1e-4)
torch.compile(model, fullgraph=True)(x).sum().backward()
""")


def on_gpu(module, x):
    """In a spawned process."""
    return module.to(GPU)(x.to(GPU)).tolist()


def test_other_processes_after_a_forward(tmp_path):
    reference, new, x = set_up(SIZES["plain"])
    new(x).sum().backward()
    expected = reference(x).tolist()
    with ProcessPoolExecutor(1, torch.multiprocessing.get_context("spawn")) as pool:
        sent = pool.submit(on_gpu, copy.deepcopy(new).cpu(), x.cpu()).result()
    assert sent == pytest.approx(expected, abs=1e-4)
    torch.save((new, x), tmp_path / "module.pt")
    out = run_script(f"m, x = torch.load({str(tmp_path / 'module.pt')!r}, weights_only=False); print(m(x).tolist())")
    assert eval(out) == pytest.approx(expected, abs=1e-4)


def test_grad_scaler():
    """Mixed-precision training as PyTorch documents it goes the way the reference goes."""
    reference, new, _ = set_up(SIZES["plain"])
    for module in reference, new:
        optimizer, scaler = torch.optim.SGD(module.parameters(), 0.01), torch.amp.GradScaler("cuda", init_scale=1024.0)
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = (module(make_input(21, 33, GPU, seed=step)) ** 2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    check_match(list(new.parameters()), list(reference.parameters()), 1e-2)


# ---- Sizes -----------------------------------------------------------------------------------------------------------


CHOSEN = [  # batch, input, hidden, output, and whether the split form is the quicker one at either precision
    ((16, 2048, 4096, 1024), False),  # a weight's parts cost more than few rows gain
    ((4096, 65536, 128, 10), False),  # few tiles of long sums, in slice after slice
    ((256, 64, 65536, 64), False),
    ((4096, 2048, 4096, 1024), True),
    ((333, 2048, 4096, 50257), True),
]


@pytest.mark.parametrize(
    "mode, sizes, split",
    [
        *((mode, *case) for case in CHOSEN for mode in TOLERANCE),
        ("high", (128, 300, 512, 128256), False),  # a great many short rows of a weight; at "highest" a near tie
    ],
    ids=str,
)
def test_the_form_that_is_chosen_is_the_quicker_one(precision, mode, sizes, split):
    """Its bits are those of the form that takes at most 3/4 of the other's time, by measurement on an H200.

    The two tie at 16 rows and "highest", where the plain one moves less.
    """
    precision(mode)
    _, new, x = set_up(sizes)
    arguments = (x, *(p.detach() for p in new.parameters()), mode == "high")
    forward = model_new.extension(0).forward
    with torch.no_grad():
        out = new(x)
    assert torch.equal(out, forward(*arguments, split=split))
    assert not torch.equal(out, forward(*arguments, split=not split))


def check_gradients_against_float64(new, exact, x, tolerance=1e-4):
    """Asserts the gradients of ``exact``, which is float64, within ``tolerance`` of each element and of the largest."""
    actual, expected = gradients(new, x), gradients(exact, x.detach().double().requires_grad_())
    for name, gradient in expected.items():
        check_close_to_largest(actual[name].double(), gradient, tolerance, msg=name)


@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
@pytest.mark.parametrize(
    "sizes",
    [(65535, 3, 3, 3), (65536, 3, 3, 3), (70000, 3, 3, 3), (1 << 20, 3, 3, 3), (3, 5, 300_000, 7), (3, 5, 7, 300_000)],
    ids=str,
)
def test_beyond_65535_rows_or_columns(hold, split, sizes):
    hold(split)
    reference, new, x = set_up(sizes, requires_grad=True)
    check_match(new(x), reference(x))
    check_gradients_against_float64(new, copy.deepcopy(reference).double(), x)


ROWS = {  # batch, input, hidden, output; numbers are lengths at which another kernel takes over
    "hidden": (300, 2056, 4104, 40),
    "input and output": (300, 9001, 50, 4100),
    "hidden by far": (50, 30, 20_000, 30),
    "half of a block": (300, 30, 4352, 3),
    "two slices": (1100, 9, 65_600, 3),
    "64": (1003, 64, 70, 5),
    "65": (1003, 65, 64, 5),
    "128 and 129": (300, 128, 129, 16),
    "256 and 257": (300, 257, 256, 17),
    "512 and 513": (300, 513, 512, 33),
    "512 twice": (21, 513, 512, 512),
    "1024 and 1025": (300, 1025, 1024, 65),
    "2048 and 2049": (140, 2049, 2048, 129),
    "3072": (140, 20, 3072, 257),
    "3073": (140, 20, 3073, 513),
    "4096": (140, 20, 4096, 512),
    "few outputs of many rows": (5003, 20, 40, 5),
    "partial products": (5003, 33, 65, 130),
    "partial products of slices": (2100, 16_390, 9, 3),
    "fewer rows left than partial products": (16_522, 3000, 20, 3),
    "two sweeps of a warp": (4100, 20, 40, 600),
    "two warps": (1000, 20, 520, 1000),
    "three sweeps of a block": (1030, 20, 40, 4200),
    "the largest block": (40, 600, 30, 9001),
    "five sweeps of the largest block": (5, 20, 40, 70_003),
    "addmm of a wide layer": (40, 30, 16_391, 70),
    "addmm of many multiplications": (700, 4100, 4100, 40),
    "addmm of many rows of few columns": (17_001, 9, 10, 63),
    "addmm of few rows": (7, 5000, 2050, 9),
    "few rows of long sums": (10, 4100, 70, 5),
    "16 rows of long sums": (16, 2049, 2051, 9),
    "sums over shares of the batch": (66_001, 9, 601, 4),
}


@either_precision
@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
@pytest.mark.parametrize("sizes", ROWS.values(), ids=ROWS)
def test_rows_of_any_length(hold, precision, deterministic, mode, split, sizes):
    """Rows that part of a warp takes, a warp, a block in registers, and longer ones; sums over few and many rows.

    In memory that nobody has written, so that what a kernel leaves out, or a product adds to, is NaN.
    """
    hold(split)
    precision(mode)
    reference, new, x = set_up(sizes, requires_grad=True)
    exact = copy.deepcopy(reference).double()
    with torch.no_grad():
        check_match(new(x).double(), exact(x.double()), TOLERANCE[mode])
    check_gradients_against_float64(new, exact, x, TOLERANCE[mode])


@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
@pytest.mark.parametrize(("heavy", "rest"), [(1e3, 1e-3), (1e-6, 0.0)])
@pytest.mark.parametrize("input_size", [3, 9, 20, 40, 64, 100, 200, 300, 600])
def test_one_row_that_weighs_far_more_than_the_rest(hold, input_size, heavy, rest, split):
    """Wherever in the batch it stands, and however many rows a block of the gradients' kernels takes."""
    hold(split)
    reference, new, x = set_up((100, input_size, 40, 9), requires_grad=True)
    for row in (0, 15, 16, 47, 63, 70, 99):
        weights = torch.full((100,), rest, device=GPU)
        weights[row] = heavy
        check_gradients(new, reference, x, lambda out, weights=weights: (out * weights).sum())


@pytest.mark.parametrize("split", [False, True], ids=["plain", "split"])
@pytest.mark.parametrize("sizes", [(131_073, 8, 16_384, 4), (131_073, 16_384, 8, 4)], ids=str)
def test_more_elements_than_32_bits_count(hold, split, sizes):
    """h, then x, of more than 2^31 elements; some rows and their gradients against the same rows run alone."""
    if torch.cuda.mem_get_info()[0] < 80 << 30:
        pytest.skip("needs 80 GiB of free GPU memory")
    hold(split)
    batch, *rest = sizes
    reference, new = make_pair(*rest, device=GPU)
    x = torch.randn(batch, rest[0], device=GPU).requires_grad_()
    rows = torch.tensor([0, 1, batch // 2, batch - 3, batch - 2, batch - 1], device=GPU)
    out = new(x)
    assert out.shape == (batch,)
    check_match(out[rows], reference(x[rows]))
    out.sum().backward()
    some = x.detach()[rows].requires_grad_()
    reference(some).sum().backward()
    check_close_to_largest(x.grad[rows], some.grad)
    # Each row's softmax sums to 1, so the last bias's gradients sum to the batch.
    assert new.linear2.bias.grad.sum().item() == pytest.approx(batch, rel=1e-4)


@either_precision
def test_peak_memory_at_the_problem_s_size(precision, mode):
    import reference as problem

    precision(mode)
    x = torch.rand(problem.batch_size, problem.input_size, device=GPU)
    peaks = []
    for module in make_pair(*problem.get_init_inputs(), device=GPU):
        with torch.no_grad():
            module(x[:64]), module(x)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            module(x)
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= peaks[0] / 2, f"{peaks[1] >> 20} MiB, the reference {peaks[0] >> 20} MiB"


def test_nothing_is_kept_between_calls():
    _, new, x = set_up(SIZES["split"])
    with torch.no_grad():
        new(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = new(x)
        assert torch.cuda.memory_allocated() - before <= max(512, out.numel() * 4)


def test_precision_decides_between_forms_of_one_module(precision):
    """The module obeys the switch as it is at each call, whatever it was at the last."""
    _, new, x = set_up(SIZES["split"])
    with torch.no_grad():
        seen = {}
        for mode in "highest", "high", "medium", "highest", "high":
            precision(mode)
            out = new(x)
            assert torch.equal(out, seen.setdefault("high" if mode == "medium" else mode, out))
    assert not torch.equal(seen["highest"], seen["high"])


@pytest.mark.parametrize("context", [torch.device(GPU), torch.device("cpu")], ids=str)
def test_a_device_context_keeps_the_fused_operators(context):
    _, new, x = set_up(SIZES["plain"])
    with context:
        assert type(new(x).grad_fn).__name__ == "_FusedBackward"


def test_what_the_reference_takes_and_the_fused_operators_do_not():
    """Odd kinds of x at a size at which the module would choose float16 products."""
    reference, new, x = set_up(SIZES["split"])
    for odd in (x[None], x[:, :, None], x[0], x.double(), x.half(), x.to_sparse(), x.cpu()):
        check_same_outcome(outcome(new, odd), outcome(reference, odd), 1e-3)
    torch.cuda.synchronize()
