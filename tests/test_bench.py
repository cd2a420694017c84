"""bench.py: what it refuses to time, what its numbers mean, and what it writes."""

import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import bench
import model_new

ROOT = Path(bench.__file__).parent
FIELDS = set(  # what a row must hold, whoever reads it
    "problem contender precision dtype batch mode ms_median ms_p20 ms_p80 speedup_vs_eager speedup_low speedup_high "
    "rms_error max_error max_tolerance_share peak_extra_mib tflops ceiling_share".split()
)
REFERENCE = """
import torch
from torch import nn

batch_size, hidden_size = 24, 65

class Model(nn.Module):
    def __init__(self, inputs, hidden, outputs):
        super().__init__()
        self.linear1 = nn.Linear(inputs, hidden)
        self.linear2 = nn.Linear(hidden, outputs)

    def forward(self, x):
        return torch.logsumexp(self.linear2(torch.sigmoid(self.linear1(x))), dim=1)

def get_inputs():
    return [torch.rand(batch_size, 33)]

def get_init_inputs():
    return [33, hidden_size, 17]
"""
SOLUTIONS = {
    "model_new": "out = right(self, x)",
    "forgets_a_bias": "out = torch.logsumexp(torch.sigmoid(self.linear1(x)) @ self.linear2.weight.T, dim=1)",
    "returns_nan": "out = right(self, x) * float('nan')",
    "raises": "raise RuntimeError('no such kernel')",
    "wrong_in_odd_batches": "out = right(self, x) + x.shape[0] % 2",
    "remembers_by_pointer": "out = self.seen.setdefault(x.data_ptr(), right(self, x))",
    "wrong_from_the_second_trial": "out = right(self, x) + wrong_trial(self, x)",
    "loses_a_gradient": "self.linear1.bias.requires_grad_(False); out = right(self, x)",
    "sleeps": "out = right(self, x); time.sleep(0.2)",
}
HELPERS = """
import time

right = Base.forward

def wrong_trial(self, x):
    own = bool(x.min() >= 0 and x.max() < 1)
    return own and not torch.equal(x, self.seen.setdefault("first", x.clone()))
"""


@pytest.fixture
def problem(tmp_path):
    """A small problem in a folder of its own, with an honest solution and dishonest ones."""
    (tmp_path / "reference.py").write_text(REFERENCE)
    for name, body in SOLUTIONS.items():
        forward = f"    def forward(self, x):\n        {body}\n        return out\n"
        setup = "    def __init__(self, *sizes):\n        super().__init__(*sizes)\n        self.seen = {}\n"
        start = REFERENCE.replace("class Model", "class Base") + HELPERS
        (tmp_path / f"{name}.py").write_text(f"{start}\nclass ModelNew(Base):\n{setup}\n{forward}")
    return bench.Problem(tmp_path)


@pytest.fixture
def quick(monkeypatch):
    """Few rounds, no torch.compile (it takes half a minute on two cores), and every solution accepted by the check."""
    monkeypatch.setattr(bench, "ROUNDS", (6, 6))
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(bench, "verify", lambda *arguments: None)


def measure(problem, *names, device="cpu", **setting):
    """Race the named solutions of ``problem``: ``(rows by contender, reasons of refusal by contender)``."""
    default = {"problem": "p", "precision": "highest", "dtype": "float32", "batch": 24, "mode": "inference"}
    solutions = {name: bench.solution_class(problem.folder / f"{name}.py") for name in names}
    ceilings = {} if device == "cpu" else {"float32": 100.0, "float16": 100.0, "copy": 100.0}
    rows, refused = bench.measure(problem, solutions, default | {"sweep": True} | setting, device, ceilings)
    return {row["contender"]: row for row in rows}, {entry["contender"]: entry["reason"] for entry in refused}


# The numbers


def test_speedup_is_the_ratio_of_medians_within_its_interval():
    noise = torch.Generator().manual_seed(1)
    eager, ours = ((1 + 0.05 * torch.randn(60, generator=noise)) for _ in range(2))
    ratio, low, high = bench.speedup((8 * eager).tolist(), (2 * ours).tolist())
    assert ratio == pytest.approx(4, rel=0.03)
    assert 3.8 < low < ratio < high < 4.2


def test_speedup_of_a_contender_over_itself_is_one_without_doubt():
    assert bench.speedup([1.0, 2.0, 5.0] * 4, [1.0, 2.0, 5.0] * 4) == (1, 1, 1)


def test_a_drifting_clock_widens_the_interval():
    times, steady = [1.0, 1.02, 1.1] * 20, [1.0] * 60
    _, low, high = bench.speedup(times, steady)
    _, low_drifting, high_drifting = bench.speedup(sorted(times), steady)
    assert high_drifting - low_drifting > high - low


def test_sittings_that_differ_widen_the_interval():
    noise = torch.Generator().manual_seed(2)
    eager, ours = (1 + 0.01 * torch.randn(4, 15, generator=noise) for _ in range(2))
    apart = ours * torch.tensor([0.97, 0.99, 1.01, 1.03])[:, None]
    widths = [
        high - low
        for _, low, high in (bench.speedup(eager.flatten().tolist(), t.flatten().tolist(), 4) for t in (ours, apart))
    ]
    assert widths[1] > 2 * widths[0] and widths[1] > 0.02


def test_the_interval_holds_from_run_to_run():
    """Of 200 runs whose sittings differ by more than their rounds do, nineteen in twenty find the truth."""
    noise = torch.Generator().manual_seed(3)
    hits = 0
    for _ in range(200):
        eager, ours = (1 + 0.01 * torch.randn(4, 25, generator=noise) for _ in range(2))
        ours = ours * (1 + 0.01 * torch.randn(4, 1, generator=noise))
        _, low, high = bench.speedup(eager.flatten().tolist(), ours.flatten().tolist(), 4)
        hits += low <= 1 <= high
    assert hits >= 190


def test_error_is_in_units_of_the_output_and_of_the_tolerance():
    exact = torch.tensor([0.0, 1.0, -3.0], dtype=torch.float64)
    found = bench.error([([exact + torch.tensor([3e-4, 0, 4e-4])], [exact])], 1e-4, training=False)
    assert found["max_error"] == pytest.approx(4e-4)
    assert found["rms_error"] == pytest.approx(5e-4 / 3**0.5)
    assert found["max_tolerance_share"] == pytest.approx(3)  # 3e-4 where 1e-4 * (1 + 0) is allowed


def test_gradients_are_judged_alike_whatever_their_size():
    exact = torch.randn(50, dtype=torch.float64)
    found = [bench.error([([1.001 * exact * s], [exact * s])], 1e-4, training=True) for s in (1, 1e-9)]
    assert found[0] == pytest.approx(found[1])
    assert found[0]["rms_error"] == pytest.approx(1e-3)


def test_nan_in_any_output_stays_in_the_error():
    good, bad = torch.ones(3, dtype=torch.float64), torch.tensor([1.0, float("nan"), 1.0])
    for pairs in ([([bad], [good]), ([good], [good])], [([good], [good]), ([bad], [good])]):
        assert all(value != value for value in bench.error(pairs, 1e-4, training=False).values())


def test_an_output_of_another_shape_is_an_error_not_a_broadcast():
    with pytest.raises(ValueError, match=r"\(3,\), got \(1,\)"):
        bench.error([([torch.ones(1)], [torch.ones(3, dtype=torch.float64)])], 1e-4, training=False)


@pytest.mark.parametrize("mode, factor", [("inference", 1), ("training", 3)])
def test_arithmetic_is_counted_as_the_reference_writes_it(problem, quick, mode, factor):
    rows, _ = measure(problem, "model_new", mode=mode)
    flops = 2 * 24 * (33 * 65 + 65 * 17) * factor - (2 * 24 * 33 * 65 if mode == "training" else 0)
    for row in rows.values():
        assert row["tflops"] * row["ms_median"] * 1e9 == pytest.approx(flops)


def test_least_bytes_are_inputs_parameters_and_outputs_once(problem, quick):
    row = measure(problem, "model_new")[0]["model_new"]
    elements = 24 * 33 + 33 * 65 + 65 + 65 * 17 + 17 + 24
    assert row["gb_per_s"] * row["ms_median"] * 1e6 == pytest.approx(4 * elements)


# The race


def test_every_contender_runs_once_a_round_and_follows_each_other_as_often():
    order = []
    steps = {name: lambda inputs, name=name: order.append(name) or [inputs[0].clone()] for name in "abc"}
    buffers = [[torch.zeros(2)] for _ in range(bench.BUFFERS)]
    bench.race(steps, buffers, lambda r: [torch.full((2,), float(r))], lambda step: (step(), 1.0, 1.0), rounds=12)
    rounds = [order[i : i + 3] for i in range(0, 36, 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    pairs = [(first, second) for names in rounds for first, second in itertools.pairwise(names)]
    assert {pairs.count(pair) for pair in pairs} == {4} and len(set(pairs)) == 6


def test_inputs_are_rewritten_between_rounds_in_buffers_that_change():
    seen = []
    buffers = [[torch.zeros(2)] for _ in range(bench.BUFFERS)]
    steps = {"a": lambda inputs: seen.append((inputs[0].data_ptr(), inputs[0][0].item())) or [inputs[0].clone()]}
    result = bench.race(steps, buffers, lambda r: [torch.full((2,), float(r))], lambda step: (step(), 1.0, 1.0), 7)
    assert [value for _, value in seen] == list(range(7))
    assert all(first[0] != second[0] for first, second in itertools.pairwise(seen))
    for i, inputs in enumerate(buffers):
        torch.testing.assert_close(result.kept["a"][i][0], inputs[0])  # what is verified is what was timed last


def test_cpu_clock_times_the_step_and_keeps_what_it_returned():
    outputs, ms, wall = bench.cpu_clock(lambda: time.sleep(0.02) or ["kept"])
    assert outputs == ["kept"] and 20 <= ms < 40 and wall == ms


def test_cpu_clock_does_not_see_an_interruption_of_a_short_step():
    """Another program takes the core for 10 ms, many times as long as the step lasts, in the first call that counts."""
    calls = itertools.count(1)
    _, ms, _ = bench.cpu_clock(lambda: time.sleep(0.01 if next(calls) == 3 else 0.0001))
    assert 0.1 <= ms < 0.3


def test_no_share_of_a_ceiling_is_shown_on_the_cpu(problem, quick, capsys):
    """On a machine that others use too, a product measured alone is no ceiling."""
    rows, _ = measure(problem, "model_new")
    assert all(row["ceiling_share"] is row["copy_share"] is row["gemm_kind"] is None for row in rows.values())
    bench.main([str(problem.folder), "--device", "cpu"])
    out = capsys.readouterr().out
    assert "no ceiling" in out and "TFLOP/s" in out and "of the ceiling" not in out and "of a copy" not in out


def test_a_slow_solution_is_shown_as_slow(problem, quick):
    rows, refused = measure(problem, "sleeps")
    assert not refused
    assert rows["sleeps"]["ms_median"] >= 200 and rows["sleeps"]["speedup_high"] < 0.5
    assert rows["sleeps"]["ms_p20"] <= rows["sleeps"]["ms_median"] <= rows["sleeps"]["ms_p80"]


# What is refused


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_an_honest_solution_gets_a_whole_row_in_each_mode(problem, quick, mode):
    rows, refused = measure(problem, "model_new", mode=mode, sweep=False)
    assert list(rows) == ["eager", "compile", "model_new"] and not refused
    assert all(row.keys() >= FIELDS for row in rows.values())
    assert 0 < rows["model_new"]["rms_error"] < 1e-5


@pytest.mark.parametrize(
    "name, batch, reason",
    [
        ("forgets_a_bias", 24, "its error is"),
        ("returns_nan", 24, "its error is nan"),
        ("raises", 24, "RuntimeError: no such kernel"),
        ("wrong_in_odd_batches", 25, "its error is"),
        ("remembers_by_pointer", 24, "while timed, its error was"),
    ],
)
def test_a_wrong_solution_is_refused_with_the_reason_and_the_others_are_timed(problem, quick, name, batch, reason):
    rows, refused = measure(problem, "model_new", name, batch=batch)
    assert list(refused) == [name] and refused[name].startswith(reason)
    assert list(rows) == ["eager", "model_new"]


def test_wrong_gradients_are_refused(problem, quick):
    right = bench.solution_class(problem.folder / "model_new.py")

    class StopsTheGradient(right):
        def forward(self, x):
            return (
                right.forward(self, x)
                + 0.1 * right.forward(self, x).sum()
                - 0.1 * right.forward(self, x).sum().detach()
            )

    setting = {
        "problem": "p",
        "precision": "highest",
        "dtype": "float32",
        "batch": 24,
        "mode": "training",
        "sweep": True,
    }
    _, refused = bench.measure(problem, {"grad": StopsTheGradient}, setting, "cpu", {})
    assert [entry["contender"] for entry in refused] == ["grad"]


def test_work_that_outlasts_its_end_event_is_refused(problem, quick, monkeypatch):
    """On a GPU that is a kernel left on another stream; here the clock says so of one solution."""
    real, hiding = bench.make_step, []

    def make_step(model, mode, upstream):
        step = real(model, mode, upstream)
        if type(model).__module__.startswith("sleeps"):
            hiding.append(step)
        return step

    monkeypatch.setattr(bench, "make_step", make_step)
    monkeypatch.setattr(bench, "cpu_clock", lambda step: (step(), 1.0, 50.0 if step.func in hiding else 1.01))
    rows, refused = measure(problem, "model_new", "sleeps")
    assert list(rows) == ["eager", "model_new"] and "another stream" in refused["sleeps"]


@pytest.mark.parametrize("hides", [True, False], ids=["hides", "is_disturbed"])
def test_work_in_three_of_five_rounds_is_the_contenders_own_where_it_makes_the_median(hides):
    """Hiding 50 ms of work in them lowers the median, and is found; a disturbance, which does not, is ignored."""
    often = [r % 5 < 3 for r in range(25)]
    ms = [1.0 if hides and there else 50.0 for there in often]
    wall = [m + 50 * there for m, there in zip(ms, often, strict=True)]
    assert bench.outlasting(ms, wall) == (50 if hides else 0)


def test_a_compiler_that_fails_is_reported_and_does_not_end_the_run(problem, quick, monkeypatch, capsys):
    class Broken(torch.nn.Module):
        def forward(self, x):
            raise OSError("no C++ compiler\nand a long tail")

    monkeypatch.setattr(torch, "compile", lambda model: Broken())
    assert bench.main([str(problem.folder), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert 'compile, "highest": OSError: no C++ compiler\n' in out and "model_new" in out


@pytest.mark.parametrize("name, shown", [("forgets_a_bias", True), ("returns_nan", False)])
def test_a_compiled_reference_that_strays_is_shown_with_its_error(problem, quick, monkeypatch, name, shown):
    """It is a baseline: how far it strays is a result, unlike in a solution."""

    def strayed(model):
        other = bench.solution_class(problem.folder / f"{name}.py")(33, 65, 17)
        other.load_state_dict(model.state_dict())
        return other

    monkeypatch.setattr(torch, "compile", strayed)
    rows, refused = measure(problem, "model_new", sweep=False)
    assert ("compile" in rows) == shown and ("compile" in refused) != shown
    assert not shown or rows["compile"]["max_tolerance_share"] > 1


def test_what_the_check_rejects_is_not_timed(problem, quick, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "verify", lambda p, path, *rest: "wrong" if path.stem == "raises" else None)
    solutions = [str(problem.folder / f"{name}.py") for name in ("model_new", "raises")]
    report = tmp_path / "out" / "report.json"
    arguments = [str(problem.folder), "--device", "cpu", "--solution", *solutions, "--json", str(report)]
    assert bench.main(arguments) == 1
    found = json.loads(report.read_text())
    assert [row["contender"] for row in found["rows"]] == ["eager", "compile", "model_new"]
    assert [(entry["contender"], entry["reason"]) for entry in found["refused"]] == [("raises", "wrong")]
    assert "not timed" in capsys.readouterr().out


OTHER_LAYOUT = """

class ModelNew(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.parts = nn.ParameterList(p.detach().t().contiguous() for p in Model(*sizes).parameters())

    def forward(self, x):
        weight1, bias1, weight2, bias2 = self.parts
        return torch.logsumexp(torch.sigmoid(x @ weight1 + bias1) @ weight2 + bias2, dim=1)
"""


def test_a_solution_with_another_layout_is_timed_when_built_from_the_same_seed(problem, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "ROUNDS", (6, 6))
    monkeypatch.setattr(torch, "compile", lambda model: model)
    path, report = tmp_path / "other_layout.py", tmp_path / "report.json"
    path.write_text(REFERENCE + OTHER_LAYOUT)
    arguments = [str(problem.folder), "--device", "cpu", "--solution", str(path), "--json", str(report)]
    assert bench.main(arguments) == 1 and "not timed" in capsys.readouterr().out
    assert bench.main([*arguments, "--same-seed"]) == 0
    assert [row["contender"] for row in json.loads(report.read_text())["rows"]] == ["eager", "compile", "other_layout"]
    with pytest.raises(SystemExit):
        bench.main([*arguments, "--same-seed", "--training"])
    assert "gradients of another layout" in capsys.readouterr().err


@pytest.mark.parametrize("name, accepted", [("model_new", True), ("forgets_a_bias", False)])
def test_check_py_is_asked_before_a_solution_is_timed(problem, name, accepted):
    reason = bench.verify(problem, problem.folder / f"{name}.py", None, "cpu", 24, "highest")
    assert (reason is None) == accepted, reason


def test_a_refusal_names_the_first_fault_of_any_trial_and_the_command_that_repeats_it(problem, monkeypatch):
    monkeypatch.chdir(problem.folder)
    reason = bench.verify(problem, problem.folder / "wrong_from_the_second_trial.py", None, "cpu", 24, "highest")
    said, command = reason.split(" To repeat it: ")
    assert said == "check.py exited 1: own, trial 2: 24 of 24 elements are off beyond the tolerance."
    python, *words = shlex.split(command)
    assert python == "python" and not any(os.path.isabs(word) for word in words)
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 1 and "own, trial 2" in done.stdout


@pytest.mark.parametrize(
    "check_py, said",
    [
        ("import sys; sys.exit('the last of its words')", "check.py exited 1: the last of its words. To repeat it: "),
        ("raise SystemExit(3)", "check.py exited 3: no output. To repeat it: "),
    ],
)
def test_a_check_that_breaks_down_is_a_reason_too(problem, monkeypatch, tmp_path, check_py, said):
    (tmp_path / "check.py").write_text(check_py)
    monkeypatch.setattr(bench.check, "__file__", str(tmp_path / "check.py"))
    assert bench.verify(problem, problem.folder / "model_new.py", None, "cpu", 24, "highest").startswith(said)


def test_a_solution_that_leaves_a_gradient_out_is_refused_in_training(problem, quick):
    rows, refused = measure(problem, "model_new", "loses_a_gradient", mode="training")
    assert refused == {"loses_a_gradient": "ValueError: must give 4 gradients, gives 3"} and "model_new" in rows


def test_a_parameter_that_the_reference_does_not_use_needs_no_gradient(quick, tmp_path):
    unused = REFERENCE.replace("super().__init__()", "super().__init__(); self.a = nn.Parameter(torch.ones(3))")
    (tmp_path / "reference.py").write_text(unused)
    (tmp_path / "model_new.py").write_text(unused.replace("class Model", "class ModelNew"))
    rows, refused = measure(bench.Problem(tmp_path), "model_new", mode="training")
    assert "model_new" in rows and not refused


def test_training_without_parameters_is_one_sentence(quick, tmp_path, capsys):
    sums = "import torch\n\nclass Model(torch.nn.Module):\n    forward = lambda self, x: x.sum(1)\n\n"
    sums += "get_inputs = lambda: [torch.rand(24, 33)]\nget_init_inputs = lambda: []\n"
    (tmp_path / "reference.py").write_text(sums)
    (tmp_path / "model_new.py").write_text(sums.replace("Model(", "ModelNew("))
    assert bench.main([str(tmp_path), "--device", "cpu", "--training"]) == 2
    assert capsys.readouterr().err.startswith("bench.py: --training needs parameters")


WITH_A_NUMBER = """
import torch
get_inputs = lambda: [torch.rand(4, 3), 3.14]
get_init_inputs = lambda: []
Model = torch.nn.Identity
"""


@pytest.mark.parametrize(
    "text, words",
    [
        ("class Model(:", "reference.py must load and give inputs, and raises SyntaxError"),
        ("class Model: ...", "raises AttributeError"),
        (WITH_A_NUMBER, "tensors alone"),
    ],
    ids=["syntax", "no inputs", "a number among the inputs"],
)
def test_a_reference_that_cannot_be_used_is_one_sentence(tmp_path, monkeypatch, capsys, text, words):
    monkeypatch.setattr(bench, "verify", lambda *arguments: None)
    (tmp_path / "reference.py").write_text(text)
    (tmp_path / "model_new.py").write_text("from torch.nn import Identity as ModelNew")
    assert bench.main([str(tmp_path), "--device", "cpu"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("bench.py: ") and words in said


# Precision


@pytest.fixture
def switches():
    """PyTorch's switches for products on the GPU and on the CPU, put back to the default at the end."""
    pair = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    yield pair
    torch.set_float32_matmul_precision("highest")
    for switch in pair:
        switch.fp32_precision = "none"


@pytest.mark.parametrize("old", [None, "highest", "high", "medium"])
@pytest.mark.parametrize("new", [None, "ieee", "tf32"])  # with `old`, both spellings are mixed
@pytest.mark.parametrize("name, value", [("highest", "ieee"), ("high", "tf32")])
def test_the_precision_switch_is_set_within_and_found_again_after(switches, old, new, name, value):
    cuda, cpu = switches
    if old:
        torch.set_float32_matmul_precision(old)
    if new:
        cuda.fp32_precision = new
    found = cuda.fp32_precision, cpu.fp32_precision
    with bench.float32_precision(name):
        assert cuda.fp32_precision == value
        assert torch.get_float32_matmul_precision() == name  # raises where the spellings disagree
    assert (cuda.fp32_precision, cpu.fp32_precision) == found
    if not new:
        assert torch.get_float32_matmul_precision() == (old or "highest")


def test_every_float32_precision_names_itself_in_its_rows(problem, quick, tmp_path):
    report = tmp_path / "report.json"
    bench.main([str(problem.folder), "--device", "cpu", "--precision", "high", "--json", str(report)])
    assert {row["precision"] for row in json.loads(report.read_text())["rows"]} == {"high"}


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_another_dtype_is_compared_with_the_reference_in_that_dtype(problem, quick, dtype):
    rows, refused = measure(problem, "model_new", dtype=dtype)
    assert not refused
    assert rows["model_new"]["rms_error"] == rows["eager"]["rms_error"]
    assert (rows["eager"]["rms_error"] < 1e-12) == (dtype == "float64")


# The command line


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["nowhere"], "a problem is a file or a folder with a reference.py"),
        (["--reference", "nowhere.py"], "--reference must name a file"),
        (["--solution", "nowhere.py"], "the solution must be a file, nowhere.py is none"),
        (["--solution", "a/eager.py"], "the solution must be a file"),
        (["--device", "cuda", "--gpus", "99"], "99 NVIDIA GPU(s) are needed, PyTorch sees"),
    ],
)
def test_what_cannot_run_is_one_sentence_and_exit_code_2(arguments, sentence, capsys):
    assert bench.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"bench.py: {sentence}")


def test_nothing_is_said_of_a_missing_numpy_or_gpu(tmp_path):
    """PyTorch warns of both when it is imported."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}
    command = [sys.executable, ROOT / "bench.py", "nowhere", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("text", ["16,32", "batch=", "batch=0", "batch=1,x", "batch:input=3", "batch=1:2"])
def test_a_sweep_that_names_no_sizes_is_refused(text, capsys):
    with pytest.raises(SystemExit) as exit:
        bench.main(["--sweep", text])
    assert exit.value.code == 2 and "--sweep" in capsys.readouterr().err


def test_two_solutions_of_one_name_are_refused(problem, tmp_path, capsys):
    (tmp_path / "b").mkdir()
    other = tmp_path / "b" / "model_new.py"
    other.write_text("")
    assert bench.main([str(problem.folder), "--solution", str(problem.folder / "model_new.py"), str(other)]) == 2
    assert "rename a file" in capsys.readouterr().err


@pytest.fixture
def single_file(problem, tmp_path):
    """A problem that is one file, in a folder of its own, and a solution elsewhere."""
    path = tmp_path / "alone" / "45_Sums.v2.py"
    path.parent.mkdir()
    path.write_text(REFERENCE)
    return ["--device", "cpu", "--reference", str(path)], str(problem.folder / "model_new.py")


def test_a_problem_may_be_a_single_file_named_by_its_stem(single_file, quick, tmp_path):
    arguments, solution = single_file
    report = tmp_path / "report.json"
    assert bench.main([*arguments, "--solution", solution, "--json", str(report)]) == 0
    assert {row["problem"] for row in json.loads(report.read_text())["rows"]} == {"45_Sums.v2"}


def test_check_py_gets_the_single_file(single_file):
    arguments, solution = single_file
    assert bench.verify(bench.Problem(arguments[-1]), Path(solution), None, "cpu", 24, "highest") is None
    reason = bench.verify(bench.Problem(arguments[-1]), Path("nowhere.py"), None, "cpu", 24, "highest")
    assert f"There is no file {Path('nowhere.py').absolute()}: name" in reason
    assert "45_Sums.v2.py --solution nowhere.py" in reason


def test_a_single_file_without_its_solution_says_what_is_missing(single_file, capsys):
    arguments, _ = single_file
    assert bench.main(arguments) == 2
    err = capsys.readouterr().err
    assert "no model_new.py lies beside" in err and "--solution" in err and err.count("\n") == 1
    with pytest.raises(SystemExit):
        bench.main([*arguments, "gemm_divide_sum_scaling"])


def test_what_the_columns_mean_is_said_once_and_only_where_there_is_a_table(problem, quick, monkeypatch, capsys):
    arguments = [str(problem.folder), "--device", "cpu"]
    assert bench.main([*arguments, "--training"]) == 0
    out = capsys.readouterr().out
    assert out.count("95 % interval  ") == 2 and out.count(bench.TABLE_LEGEND) == out.count("no ceiling") == 1
    assert out.index("wall ms") < out.index(bench.TABLE_LEGEND) < out.index(", training, ")
    assert "the intervals do not hold from one run to the next" in out.splitlines()[0]
    monkeypatch.setattr(bench, "verify", lambda *arguments: "wrong")
    assert bench.main(arguments) == 1
    out = capsys.readouterr().out
    assert "no ceiling" not in out and bench.TABLE_LEGEND not in out


def test_the_legend_explains_the_columns():
    for word in ("20 %", "80 %", "wall ms", "Eager itself may stray by more than the tolerance"):
        assert word in bench.TABLE_LEGEND


def test_sweep_and_training_add_rows_and_the_problems_own_size_comes_first(problem, quick, tmp_path):
    report = tmp_path / "report.json"
    arguments = [str(problem.folder), "--device", "cpu", "--training", "--sweep", "batch=1,24,129"]
    assert bench.main([*arguments, "--json", str(report)]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert list(dict.fromkeys((row["mode"], row["batch"], row["sweep"]) for row in rows)) == [
        ("inference", 24, False),
        ("training", 24, False),
        ("inference", 1, True),
        ("inference", 129, True),
        ("training", 1, True),
        ("training", 129, True),
    ]
    assert not any(row["contender"] == "compile" for row in rows if row["sweep"])


def test_a_sweep_may_name_the_sizes_of_the_reference(problem, quick, tmp_path, capsys):
    report = tmp_path / "report.json"
    arguments = [str(problem.folder), "--device", "cpu", "--json", str(report), "--sweep"]
    assert bench.main([*arguments, "batch:hidden_size=5:7,24:9"]) == 0
    rows = [row for row in json.loads(report.read_text())["rows"] if row["contender"] == "model_new"]
    assert [(row["batch"], row["sizes"]) for row in rows] == [
        (24, {}),
        (5, {"hidden_size": 7}),
        (24, {"hidden_size": 9}),
    ]
    flops = [row["tflops"] * row["ms_median"] / row["batch"] for row in rows]
    assert flops[1] / flops[0] == pytest.approx(7 / 65) and flops[2] / flops[0] == pytest.approx(9 / 65)
    assert "batch 5, hidden_size 7" in capsys.readouterr().out
    assert problem.reference.hidden_size == 65
    assert bench.main([*arguments, "width=3"]) == 2 and "width is none" in capsys.readouterr().err


def test_an_interrupted_run_keeps_the_rows_it_had(problem, quick, tmp_path, monkeypatch):
    report, real = tmp_path / "report.json", bench.measure

    def interrupted(problem, solutions, setting, *rest):
        if setting["batch"] == 7:
            raise KeyboardInterrupt
        return real(problem, solutions, setting, *rest)

    monkeypatch.setattr(bench, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.main([str(problem.folder), "--device", "cpu", "--sweep", "batch=1,7", "--json", str(report)])
    assert {row["batch"] for row in json.loads(report.read_text())["rows"]} == {24, 1}


def test_the_report_says_what_was_measured_and_with_what(problem, quick, tmp_path):
    path = tmp_path / "report.json"
    bench.main([str(problem.folder), "--device", "cpu", "--json", str(path)])
    report = json.loads(path.read_text())
    assert report["environment"].keys() >= {"gpu", "driver", "pytorch", "cuda", "date"}
    assert report["source_sha256"] == bench.digest(ROOT / "model_new.py")
    assert report["sources"] == {"model_new.py": bench.digest(problem.folder / "model_new.py")}
    assert all(row["problem"] == problem.folder.name for row in report["rows"])


# Builds and several processes


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """A compiler that only our solutions would find, and an architecture to build for."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    path = tmp_path / "site-packages" / "nvidia" / "cu0" / "bin" / "nvcc"
    monkeypatch.setattr(model_new, "_find_nvcc", lambda: str(path))
    return path


def test_a_cold_build_is_timed_against_an_empty_one_in_fresh_folders(problem, monkeypatch, nvcc):
    empty = "import os, time; assert not os.listdir(os.environ['TORCH_EXTENSIONS_DIR']); print('noise'); print(2.0)"
    monkeypatch.setattr(bench, "EMPTY_BUILD", empty)
    monkeypatch.setattr(bench, "SOLUTION_BUILD", empty.replace("2.0", "0.5"))
    build = bench.measure_build(problem, problem.folder / "model_new.py")
    assert build["share_of_empty"] == 0.25 and build["seconds"]["empty"] == [2.0] * bench.BUILDS
    assert "0.25 times the 2.0 s" in bench.build_line(build)


def test_the_empty_build_gets_the_compiler_and_the_headers_that_ours_finds(problem, monkeypatch, nvcc):
    (nvcc.parent.parent / "include" / "cccl").mkdir(parents=True)
    monkeypatch.setattr(model_new, "_pip_folders", lambda: [str(nvcc.parent.parent.parent)])
    monkeypatch.delenv("CPLUS_INCLUDE_PATH", raising=False)
    empty = f"import os; assert os.environ['CUDA_HOME'] == {str(nvcc.parent.parent)!r}; "
    empty += "assert [p[-12:] for p in os.environ['CPLUS_INCLUDE_PATH'].split(':')] == ['/cu0/include', 'include/cccl']"
    monkeypatch.setattr(bench, "EMPTY_BUILD", f"{empty}; print(1.0)")
    monkeypatch.setattr(bench, "SOLUTION_BUILD", "print(0.5)")
    assert bench.measure_build(problem, problem.folder / "model_new.py")["share_of_empty"] == 0.5


def test_a_build_without_a_compiler_says_so(problem, monkeypatch, nvcc, capsys):
    def none():
        raise RuntimeError("the compiler, nvcc, is missing: install it")

    monkeypatch.setattr(model_new, "_find_nvcc", none)
    assert bench.main([str(problem.folder), "--build"]) == 2
    assert capsys.readouterr().err.endswith("bench.py: the compiler, nvcc, is missing: install it\n")


def test_a_build_without_a_gpu_asks_for_the_architectures(problem, monkeypatch, capsys):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([str(problem.folder), "--build"]) == 2
    assert "TORCH_CUDA_ARCH_LIST" in capsys.readouterr().err


def check_throughput(problem, device, gpus):
    names = ["model_new", "wrong_in_odd_batches"]
    paths = {name: problem.folder / f"{name}.py" for name in names}
    rows, refused = bench.throughput(problem, paths, "highest", "float32", 25, device, gpus)
    assert [(row["mode"], row["contender"], row["gpus"]) for row in rows] == [
        *(("inference", name, n) for n in (1, gpus) for name in ("eager", "model_new")),
        *(("training", name, n) for n in (1, gpus) for name in ("eager", *names)),  # a constant has no gradient
    ]
    assert {entry["contender"] for entry in refused} == {"wrong_in_odd_batches"}
    for row in rows:
        assert row["rows_per_s_p20"] <= row["rows_per_s"] <= row["rows_per_s_p80"]
        assert row["gpus"] > 1 or row["efficiency"] == 1
        assert row["gpus"] == 1 or row["max_tolerance_share"] < 1  # DDP's gradients are the mean over all rows


def test_throughput_of_two_processes_on_the_cpu(problem):
    check_throughput(problem, "cpu", 2)


# README.md and the pictures


def synthetic_report():
    """A report of the shape that a full run writes, with made-up numbers."""
    rows = []
    for problem, names in {"gemm_sigmoid_logsumexp": ["model_new"], "second": ["model_new", "model_collapsed"]}.items():
        for precision in ("highest", "high"):
            for mode, batch, sweep in [("inference", 64, False), ("training", 64, False), ("inference", 1, True)]:
                for i, name in enumerate(["eager", *([] if sweep else ["compile"]), *names]):
                    row = dict.fromkeys([*FIELDS, "ms_wall", "gb_per_s", "copy_share"], 0.5 / (i + 1))
                    row |= {"problem": problem, "contender": name, "precision": precision, "dtype": "float32"}
                    row |= {"batch": batch, "mode": mode, "sweep": sweep, "gemm_kind": "float16", "rounds": 9}
                    row |= {"sizes": {}}
                    row |= {"speedup_vs_eager": i + 1.0, "speedup_low": i + 0.9, "speedup_high": i + 1.1}
                    rows.append(row)
    for mode, batch in ("inference", 5), ("training", 6):
        rows.append(rows[-1] | {"mode": mode, "batch": batch, "sizes": {"input_size": 33, "output_size": 7}})
    place = {"gpu": "GPU X", "driver": "580.1", "pytorch": "2.14", "cuda": "13.0", "date": "2000-01-02", "threads": 2}
    throughput = {"mode": "training", "precision": "high", "contender": "model_new", "gpus": 2, "rows_per_s": 1234567.0}
    throughput |= {"efficiency": 0.97, "speedup_vs_eager": 3.5}
    report = {"environment": place, "source_sha256": "0123456789abcdef", "rows": rows, "throughput": [throughput]}
    report["ceilings"] = {"float16": 700.0, "copy": 4000.0}
    builds = [
        {"problem": "p", "solution": "s", "cpus": 2, "seconds": {"empty": [60], "s": [20]}, "share_of_empty": 1 / 3}
    ]
    return report | {"builds": builds}


def test_the_readme_block_shows_every_kind_of_result(tmp_path):
    (tmp_path / "gpu.json").write_text(json.dumps(synthetic_report()))
    (tmp_path / "check.json").write_text(json.dumps({"verdict": "another program's"}))
    block = bench.readme_block(tmp_path)
    assert "GPU X, driver 580.1, PyTorch 2.14, CUDA 13.0, 2000-01-02, model_new.py 0123456789ab*" in block
    for text in (
        "| model_new | highest | 2.00 | 3.00 |",
        "1,234,567",
        "0.33 times the 60.0 s",
        "results/gpu.json",
        "Speed-up over eager, inference, at other sizes:",
        "| 5 | 33 -> 7 |",
        "Speed-up over eager, training, at other sizes:",
        "| 6 | 33 -> 7 |",
    ):
        assert text in block, text
    lines = block.splitlines()
    for line, following in itertools.pairwise(lines):  # every table has one width
        assert not (line.startswith("|") and following.startswith("|")) or line.count("|") == following.count("|")


def test_the_readme_leaves_out_what_only_the_report_need_hold(tmp_path):
    (tmp_path / "gpu.json").write_text(json.dumps(synthetic_report()))
    table = [line.split(" | ") for line in bench.readme_block(tmp_path).splitlines() if line.startswith("| ")]
    shown = {(line[0][2:], line[2], line[4]) for line in table if line[2] in ("inference", "training")}
    first = "gemm_sigmoid_logsumexp"
    assert shown == {
        *((first, "inference", name) for name in ("eager", "compile", "model_new")),
        *((first, "training", name) for name in ("eager", "model_new")),
        *(("second", "inference", name) for name in ("eager", "model_new", "model_collapsed")),
    }


def test_the_readme_block_is_empty_without_results(tmp_path):
    assert bench.readme_block(tmp_path) == ""


def test_a_report_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    bench.draw(synthetic_report(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_rewriting_the_readme_leaves_the_rest_alone_and_is_idempotent(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "gpu.json").write_text(json.dumps(synthetic_report()))
    readme = tmp_path / "README.md"
    readme.write_text("no markers")
    assert bench.main(["--readme"]) == 2 and "<!-- results -->" in capsys.readouterr().err
    readme.write_text(f"before\n{bench.BEGIN}old\n{bench.END}after\n")
    for _ in range(2):
        assert bench.main(["--readme"]) == 0
        block = bench.readme_block(tmp_path / "results")
        assert readme.read_text() == f"before\n{bench.BEGIN}{block}{bench.END}after\n"
    assert "![gpu](results/gpu.png)" in block


def test_the_readme_is_rewritten_without_matplotlib_and_the_pictures_stay(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "gpu.json").write_text(json.dumps(synthetic_report()))
    (tmp_path / "results" / "gpu.png").write_text("a picture")
    (tmp_path / "README.md").write_text(bench.BEGIN + bench.END)
    assert bench.main(["--readme"]) == 0
    assert "the pictures were left as they are" in capsys.readouterr().err
    assert "GPU X" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "results" / "gpu.png").read_text() == "a picture"


def test_the_readme_shows_what_results_holds():
    if not list((ROOT / "results").glob("*.json")):
        pytest.skip("results/ holds no report yet")
    shown = (ROOT / "README.md").read_text().partition(bench.BEGIN)[2].partition(bench.END)[0]
    assert shown == bench.readme_block(ROOT / "results"), "README.md is out of date; run: python bench.py --readme"


def test_every_row_in_results_is_whole():
    for path in (ROOT / "results").glob("*.json"):
        report = json.loads(path.read_text())
        for row in report["rows"] if "source_sha256" in report else []:
            assert row.keys() >= FIELDS, f"{path.name}: {FIELDS - row.keys()} missing in {row}"


# On a GPU


@pytest.mark.gpu
def test_the_cuda_clock_times_the_step_and_not_the_flush():
    clock = bench.cuda_clock()
    x = torch.rand(2048, 2048, device="cuda")
    empty = statistics.median(clock(lambda: None)[1] for _ in range(20))
    product = statistics.median(clock(lambda: [x @ x])[1] for _ in range(20))
    assert empty < 0.05 and product > 2 * empty
    _, ms, wall = clock(lambda: torch.cuda._sleep(50_000_000))
    assert ms > 10 and wall >= ms


@pytest.mark.gpu
def test_work_left_on_another_stream_is_refused(problem, quick):
    right = bench.solution_class(problem.folder / "model_new.py")

    class SideStream(right):
        def forward(self, x):
            with torch.cuda.stream(side):
                torch.cuda._sleep(50_000_000)
            return right.forward(self, x)

    side = torch.cuda.Stream()
    setting = {"problem": "p", "precision": "highest", "dtype": "float32", "batch": 24, "mode": "inference"}
    ceilings = {"float32": 1.0, "float16": 1.0, "copy": 1.0}
    rows, refused = bench.measure(problem, {"side": SideStream}, setting | {"sweep": True}, "cuda", ceilings)
    assert [row["contender"] for row in rows] == ["eager"]
    assert "another stream" in refused[0]["reason"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["forgets_a_bias", "remembers_by_pointer"])
def test_a_wrong_solution_is_refused_on_the_gpu(problem, quick, name):
    rows, refused = measure(problem, "model_new", name, device="cuda")
    assert list(rows) == ["eager", "model_new"] and list(refused) == [name]


@pytest.mark.gpu
def test_peak_extra_memory_counts_what_one_step_takes():
    x = torch.rand(1 << 20, device="cuda")  # 4 MiB
    model = torch.nn.Identity()
    assert bench.peak_extra_mib(model, lambda inputs: [inputs[0] + 1], [x]) == pytest.approx(4)
    assert bench.peak_extra_mib(model, lambda inputs: [(inputs[0] + 1) * 2], [x]) == pytest.approx(8)


@pytest.mark.gpu
def test_ceilings_are_those_of_a_gpu():
    found = bench.measure_ceilings({"float32", "tf32", "float16"})
    assert found["float16"] > found["float32"] > 1 and found["copy"] > 100


@pytest.mark.gpu
def test_two_runs_agree_within_their_intervals(monkeypatch):
    monkeypatch.setitem(bench.SECONDS, "sweep", 1.5)
    problem = bench.Problem(ROOT)
    setting = {"problem": problem.name, "precision": "highest", "dtype": "float32", "batch": 16384}
    solutions = {"model_new": bench.solution_class(ROOT / "model_new.py")}
    ceilings = {"float32": 1.0, "float16": 1.0, "copy": 1.0}
    runs = [
        bench.measure(problem, solutions, setting | {"mode": "inference", "sweep": True}, "cuda", ceilings)[0][-1]
        for _ in range(2)
    ]
    assert max(run["speedup_low"] for run in runs) <= min(run["speedup_high"] for run in runs), runs


@pytest.mark.gpu
def test_the_whole_program_runs_on_the_gpu(tmp_path):
    report, picture = tmp_path / "report.json", tmp_path / "picture.png"
    command = [sys.executable, "bench.py", "--batch-size", "1000", "--training", "--sweep", "batch=1,129"]
    command += ["--json", report, "--plot", picture]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(report.read_text())["rows"]
    assert len(rows) == 2 * 2 * 3 + 2 * 2 * 2 * 2 and all(row["peak_extra_mib"] is not None for row in rows)
    assert picture.exists()


@pytest.mark.multigpu
def test_throughput_of_two_gpus(problem):
    check_throughput(problem, "cuda", 2)
