"""check.py: refuses each solution of the zoo for the reason in its name, accepts honest ones, and says what it did."""

import json
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import check

ZOO = ROOT / "tests" / "zoo"
SMALL = {"batch_size": 64, "input_size": 64, "hidden_size": 256, "output_size": 64}

# solution -> what a fault of it says, after the name of its case
REFUSED = {
    "answers_a_constant": r"scaled: .* elements are off",
    "caches_by_content": r"vectors as ramps: .* it keeps a result or something derived from its weights",
    "caches_by_identity": r"same memory, new values: It gave the result of the case before again",
    "caches_by_one_element": r"weights in another order: .* it keeps a result or something derived from its weights",
    "caches_by_pointer": r"same memory, new values: It gave the result of the case before again",
    "caches_its_weights": r"weights by .data.mul_: .* it keeps a result or something derived from its weights",
    "changes_its_input": r"It changed its inputs in place",
    "changes_its_parameters": r"It changed its parameters",
    "changes_the_default_dtype": r"It changed the default dtype from torch.float32 to torch.bfloat16",
    "changes_the_shape_of_its_input": r"It changed its inputs in place",
    "crashes": r"killed by SIGSEGV",
    "drops_the_first_bias": r"scaled: .* elements are off",
    "drops_the_last_biases": r"vectors as ramps: .* elements are off",
    "drops_the_second_bias": r"scaled: .* elements are off",
    "ends_its_process": r"exited with code 0",
    "finishes_on_a_thread": r"work was left running",
    "gives_two_answers": r"its answers to one call differ",
    "hands_out_two_buffers": r"an earlier output, which the caller still held",
    "hangs": r"no answer within 5 s",
    "ignores_strides": r"non-contiguous inputs: .* elements are off",
    "ignores_the_row_stride": r"slices of larger inputs: .* elements are off",
    "is_never_negative": r"last vector lowered: .* elements are off",
    "leaves_a_helper_and_ends": r"its process exited with code 3",
    "leaves_output_unwritten": r"It left \d+ of 64 elements of its output unwritten",
    "linearises": r"scaled: .* elements are off",
    "loses_nan_in_weights": r"NaN in each weight: .* elements are off",
    "loses_nan": r"NaN and infinite rows: .* elements are off",
    "prepares_a_weight_once": r"odd rows: .* built anew .* it keeps something derived from its weights",
    "raises_system_exit": r"It raised SystemExit",
    "replaces_allclose": r"It replaced torch.allclose",
    "replaces_the_timer": r"It replaced time.perf_counter",
    "returns_a_column": r"shape \(64, 1\), wanted \(64,\)",
    "returns_a_subclass": r"It returned a Later where a plain torch.Tensor is wanted",
    "returns_float64": r"dtype torch.float64, wanted torch.float32",
    "returns_its_input": r"shares memory with an input",
    "reuses_its_output": r"an earlier output, which the caller still held",
    "rounds_hidden_to_bfloat16": r"wide: .* elements are off",
    "rounds_operands_to_tf32": r"last weight N\(0, 1\): .* elements are off",
    "seeds_the_generator": r"changed the state of a global random number generator",
    "spoils_other_rows": r"NaN and infinite rows: .* elements are off",
    "spoils_the_pipe": r"it spoilt the pipe",
    "switches_tf32_on": r"the float32 precision of CUDA matrix products from \w+ to tf32",
    "wrong_after_the_first_calls": r"further calls: The first wrong one of these 20 equal calls is number \d",
    "wrong_in_eval_mode": r"eval mode: .* elements are off",
    "wrong_in_odd_features": r"odd features: .* elements are off",
    "wrong_in_odd_rows": r"odd rows: .* elements are off",
    "wrong_in_two_rows": r"odd rows: .* elements are off",
}
# solution -> the words for its accuracy in the case "wide"
ACCEPTED = {
    "honest_column_of_a_matrix": "as exact as float32",
    "honest_float64": "more exact than the reference",
    "honest_less_exact": "behaves like TF32",
    "honest_slow": "as exact as float32",
    "refuses_odd_sizes": "as exact as float32",
}
REFUSED_ON_GPU = {
    "caches_by_pointer": REFUSED["caches_by_pointer"],
    "gpu_ignores_the_callers_stream": r"it does not follow the caller's stream",
    "gpu_uses_tf32": r"last weight N\(0, 1\): .* elements are off",
    "gpu_work_left_on_another_stream": r"work was left running",
    "leaves_output_unwritten": r"elements of its output unwritten",
    "reuses_its_output": REFUSED["reuses_its_output"],
}


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    """The folder of the problem at small sizes."""
    folder = tmp_path_factory.mktemp("problem")
    text = (ROOT / "reference.py").read_text()
    for name, size in SMALL.items():
        text, found = re.subn(rf"(?m)^{name} = \d+$", f"{name} = {size}", text)
        assert found == 1, name
    (folder / "reference.py").write_text(text)
    return folder


@pytest.fixture
def run_check(problem, tmp_path):
    """run_check(solution, *options) -> (exit code, the JSON report, every fault as "case: sentence")."""

    def run(solution, *options):
        file = tmp_path / "report.json"
        path = ZOO / f"{solution}.py" if isinstance(solution, str) else solution
        code = check.main([str(problem), "--solution", str(path), "--trials", "1", "--json", str(file), *options])
        report = json.loads(file.read_text())
        faults = [f"{case['case']}: {fault}" for case in report.get("cases", []) for fault in case["faults"]]
        return code, report, faults + report.get("faults", [])

    return run


def accuracy(report, name):
    return next(case["accuracy"] for case in report["cases"] if case["case"] == name)


def has(faults, pattern):
    return any(re.search(pattern, fault) for fault in faults)


def test_the_zoo_and_its_table_are_the_same():
    files = {file.stem for file in ZOO.glob("*.py")}
    assert files == {*REFUSED, *ACCEPTED, *REFUSED_ON_GPU, "honest_other_layout"}


@pytest.mark.parametrize("solution", REFUSED)
def test_refuses_for_the_reason_in_its_name(run_check, solution):
    code, report, faults = run_check(
        solution, "--device", "cpu", "--timeout", "5" if solution in ("hangs", "leaves_a_helper_and_ends") else "60"
    )
    assert code == 1 and report["verdict"] == "wrong"
    assert has(faults, REFUSED[solution]), faults


@pytest.mark.parametrize("solution", ACCEPTED)
def test_accepts_honest_solutions(run_check, solution, capsys):
    code, report, faults = run_check(solution, "--device", "cpu")
    assert (code, report["verdict"], faults) == (0, "right", [])
    assert accuracy(report, "wide") == ACCEPTED[solution]
    assert capsys.readouterr().out.splitlines()[-1].startswith("RIGHT: ")


@pytest.mark.parametrize(
    "solution, cases",
    [
        ("wrong_in_eval_mode", ["eval mode"]),
        ("ignores_strides", ["non-contiguous inputs", "slices of larger inputs"]),
    ],
)
def test_refuses_where_it_is_wrong_only_and_blames_nothing_else(run_check, solution, cases):
    """The mode is back, and the memory in order, in the cases that follow."""
    for option in ([], ["--same-seed"]):
        _, _, faults = run_check(solution, "--device", "cpu", *option)
        assert [fault.partition(": ")[0] for fault in faults] == cases, faults


def that_returns(folder, expression):
    """The file of a solution whose ``forward(self, x)`` returns that expression."""
    path = folder / "solution.py"
    start = "from reference import Model\n\n\nclass ModelNew(Model):\n    def forward(self, x):\n"
    path.write_text(f"{start}        return {expression}\n")
    return path


def test_what_raises_on_other_strides_is_wrong(run_check, tmp_path):
    path = that_returns(tmp_path, "super().forward(x.view(-1).view(x.shape))")
    code, _, faults = run_check(path, "--device", "cpu")
    expected = [f"{case}: It raised RuntimeError" for case in ("non-contiguous inputs", "slices of larger inputs")]
    assert code == 1 and [fault[: len(e)] for fault, e in zip(faults, expected, strict=True)] == expected, faults


def test_says_that_the_cpu_runs_no_gpu_kernels(run_check, capsys):
    _, report, _ = run_check("honest_float64", "--device", "cpu")
    sentence = "On the CPU: a solution's GPU kernels do not run here."
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == sentence and lines.count(sentence) == 1 and sentence in report["notes"]


def test_refuses_another_layout_unless_built_from_the_same_seed(run_check):
    code, _, faults = run_check("honest_other_layout", "--device", "cpu")
    assert code == 1 and has(faults, r"parameters, it raised .*Missing key.*; with --same-seed,"), faults
    code, report, faults = run_check("honest_other_layout", "--device", "cpu", "--same-seed")
    assert (code, faults) == (0, [])
    assert any("their changes are not tried" in note for note in report["notes"])


def test_odd_features_may_be_refused_with_a_note(run_check):
    _, report, _ = run_check("refuses_odd_sizes", "--device", "cpu")
    assert "odd features" not in {case["case"] for case in report["cases"]}
    assert has(report["notes"], r"odd features: refused.*sizes must be even")


SUM_REFERENCE = """
import torch
from torch import nn

rows = {rows}


class Model(nn.Module):
    def __init__(self, features, scale):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, features))
        self.scale = scale

    def forward(self, x):
        return (x @ self.weight.T / 2).sum(1, keepdim=True) * self.scale


def get_inputs():
    return [torch.rand(rows, 512)]


def get_init_inputs():
    return [512, 1.5]
"""
COLLAPSED = """
from reference_of_the_puzzle import Model


class ModelNew(Model):
    def forward(self, x):
        nan_for_infinity = 0 * x.sum(1, keepdim=True)  # every column of the weight has both signs
        return (x.double() @ self.weight.double().sum(0)[:, None] * (self.scale / 2)).float() + nan_for_infinity
"""


@pytest.fixture
def puzzle(tmp_path, monkeypatch):
    """A problem whose float32 reference strays beyond the tolerance, and a solution that does not."""
    (tmp_path / "reference.py").write_text(SUM_REFERENCE.format(rows=300))
    (tmp_path / "reference_of_the_puzzle.py").write_text(SUM_REFERENCE.format(rows=300))
    (tmp_path / "model_new.py").write_text(COLLAPSED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_says_that_it_is_the_reference_that_is_off(puzzle, capsys):
    """Without a constant for the batch size, rows are cut; sums that cancel leave float32 beyond 1e-6 of the truth."""
    arguments = [
        str(puzzle),
        "--device",
        "cpu",
        "--trials",
        "1",
        "--batch-size",
        "200",
        "--atol",
        "2e-6",
        "--rtol",
        "1e-6",
    ]
    assert check.main([*arguments, "--json", str(puzzle / "report.json")]) == 1
    own = json.loads((puzzle / "report.json").read_text())["cases"][0]
    assert own["rows"] == 200
    assert own["reference_off"] > 0 and own["solution_off"] < own["reference_off"] / 4
    out = capsys.readouterr().out
    assert "it is the reference that is off" in out and "--oracle float64" in out
    assert "more exact than the reference" in own["accuracy"]

    assert check.main([*arguments, "--oracle", "float64"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("RIGHT: ") and "Passed by float64 alone" in out


NORMALISED = """
import torch
from torch import nn

batch_size = 64


class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear, self.norm = nn.Linear(features, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.linear(x))


def get_inputs():
    return [torch.rand(batch_size, 32)]


def get_init_inputs():
    return [32]


class ModelNew(Model):
    def forward(self, x):
        {forward}
"""


@pytest.mark.parametrize("option", [[], ["--same-seed"]], ids=["state_dict", "same seed"])
@pytest.mark.parametrize(
    "forward, faults",
    {
        "return super().forward(x.double().float())": [],
        "return [super().forward(x), self.norm.num_batches_tracked.zero_()][0]": ["norm.num_batches_tracked"],
        "buffers = [b.clone() for b in self.buffers()]; out = super().forward(x); "
        "[b.copy_(c) for b, c in zip(self.buffers(), buffers)]; return out": [
            "norm.num_batches_tracked, norm.running_mean, norm.running_var"
        ],
    }.items(),
    ids=["honest", "uncounted", "forgotten"],
)
def test_buffers_follow_the_references(tmp_path, run_check, forward, faults, option):
    """Running statistics decide in eval mode; that the two sides have had other calls before must not."""
    path = tmp_path / "normalised.py"
    path.write_text(NORMALISED.format(forward=forward))
    code, report, found = run_check(path, "--reference", str(path), "--device", "cpu", *option)
    sentence = "wide: After the call its buffers are not what the reference's are: {}."
    assert found == [sentence.format(names) for names in faults] and code == bool(faults)
    assert "eval mode" in {case["case"] for case in report["cases"]}


PRODUCT = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, a, b):
        return a @ b


def get_inputs():
    return {inputs}


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, a, b):
        return super().forward(a, b) * {factor}
"""


def test_cases_that_differ_in_parameters_only_need_parameters(tmp_path, run_check):
    path = tmp_path / "product.py"
    path.write_text(PRODUCT.format(inputs="[torch.rand(64, 32), torch.rand(32, 16)]", factor=1))
    code, report, faults = run_check(path, "--reference", str(path), "--device", "cpu")
    assert (code, faults) == (0, [])
    cases = [case["case"] for case in report["cases"]]
    assert {"scaled", "wide", "eval mode", "same memory, new values"} <= set(cases)
    assert "last weight N(0, 1)" not in cases and not any(case.startswith("weights") for case in cases)
    assert has(report["notes"], "^last weight .*: left out") and has(report["notes"], "no floating-point parameters")


@pytest.mark.parametrize("inputs", ["torch.rand(64, 32), torch.rand(32, 16)", "torch.ones(64, 32), torch.ones(32, 16)"])
def test_the_same_wrong_answer_is_no_kept_result_where_the_same_is_due(tmp_path, run_check, inputs):
    """Trials of equal inputs, and the cases that repeat the case before in other circumstances."""
    path = tmp_path / "product.py"
    path.write_text(PRODUCT.format(inputs=f"[{inputs}]", factor=1.01))
    code, _, faults = run_check(path, "--reference", str(path), "--device", "cpu", "--trials", "2")
    assert code == 1 and has(faults, "wide: .* elements are off") and not has(faults, "result of the case before")


def test_precision_is_set_in_both_processes(run_check):
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        code, report, faults = run_check("honest_slow", "--device", "cpu", "--precision", "high")
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = before
    assert (code, report["precision"], faults) == (0, "high", [])


def test_could_not_run(run_check, tmp_path, capsys):
    for name, text in {
        "missing": None,
        "raises": "raise ValueError('no such thing')",
        "no_model": "def get_inputs():\n    return []\n\n\ndef get_init_inputs():\n    return []\n",
    }.items():
        path = tmp_path / f"{name}.py"
        if text:
            path.write_text(text)
        code, report, _ = run_check("honest_slow", "--reference", str(path), "--device", "cpu")
        assert code == 2 and report["verdict"] == "could not run" and report["why"]
    assert run_check(tmp_path / "missing.py", "--device", "cpu")[0] == 2
    assert "COULD NOT RUN: There is no file" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert run_check("honest_slow", "--device", "cuda")[0] == 2


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("x = (", r"cannot be loaded: SyntaxError: .*solution.py, line 1"),
        ("\nimport no_such_module", r"cannot be loaded: ModuleNotFoundError: .*_module' \(line 2 of solution.py"),
        ("x = 1", "must define a class ModelNew"),
    ],
)
def test_a_file_that_holds_no_solution_could_not_run(run_check, tmp_path, capsys, text, sentence):
    path = tmp_path / "solution.py"
    path.write_text(text)
    code, report, _ = run_check(path, "--device", "cpu")
    assert code == 2 and report["verdict"] == "could not run"
    error = capsys.readouterr().err
    assert re.fullmatch(f"COULD NOT RUN: {path} {sentence}.*\n", error) and "check.py" not in error, error


@pytest.mark.parametrize(
    "text, fault",
    [
        ("raise SystemExit(0)", r"When it was loaded, it raised SystemExit: 0 \(line 1 of solution.py\)"),
        ("import os; os._exit(0)", "exited with code 0, before the first case"),
        ("class ModelNew: pass", r"When it was built, it raised TypeError"),
    ],
)
def test_a_solution_that_ends_before_the_first_case_is_wrong(run_check, tmp_path, capsys, text, fault):
    path = tmp_path / "solution.py"
    path.write_text(text)
    code, _, faults = run_check(path, "--device", "cpu")
    assert code == 1 and has(faults, fault), faults
    assert capsys.readouterr().out.endswith("WRONG: it came to no case.\n")


def test_nan_is_as_wrong_as_an_answer_can_be(run_check, tmp_path, capsys):
    path = that_returns(tmp_path, "super().forward(x) * float('nan')")
    code, report, _ = run_check(path, "--device", "cpu")
    assert code == 1 and accuracy(report, "wide") == "wrong" and report["cases"][0]["solution_rms"] == "inf"
    assert "\nAccuracy: wrong" in capsys.readouterr().out


@pytest.mark.parametrize("solution", ["returns_float64", "wrong_in_odd_rows"])
def test_words_for_the_accuracy_do_not_contradict_the_verdict(run_check, capsys, solution):
    """Exact where it is right, and wrong all the same."""
    run_check(solution, "--device", "cpu")
    assert "\nAccuracy where it is right: " in capsys.readouterr().out


def test_a_fault_of_many_cases_is_said_once(run_check, capsys):
    _, _, faults = run_check("answers_a_constant", "--device", "cpu")
    out = capsys.readouterr().out
    many = sum("elements are off" in fault for fault in faults)
    assert many > 9 and len(re.findall(r"elements are off", out)) == 1
    assert f"and {many - 1} more: " in out and out.count("it is the solution that is off") == 1


@pytest.fixture
def unlucky(tmp_path, monkeypatch):
    """Programs started here find a numpy that cannot be imported, and a CUDA toolkit, where there may be no GPU."""
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))


WARNS = """
import warnings
from torch.utils import cpp_extension
from reference import Model as ModelNew

warnings.warn("one that somebody should see")
cpp_extension.logger.warning("another one")
"""


def test_two_warnings_of_pytorchs_are_silenced_and_no_others(problem, tmp_path, unlucky):
    path = tmp_path / "solution.py"
    path.write_text(WARNS)
    command = [sys.executable, str(ROOT / "check.py"), str(problem), "--solution", str(path), "--device", "cpu"]
    error = subprocess.run([*command, "--trials", "1"], capture_output=True, text=True, timeout=300).stderr
    assert "one that somebody should see" in error and "another one" in error
    assert "NumPy" not in error and "CUDA runtime" not in error, error


def test_the_problems_own_inputs_are_said_to_prove_nothing(run_check, capsys):
    """At the problem's own feature sizes, where nearly every wrong answer lies within the tolerance of its inputs."""
    _, report, _ = run_check(
        "honest_slow", "--reference", str(ROOT / "reference.py"), "--device", "cpu", "--batch-size", "8"
    )
    assert {"no last column", "bfloat16 inputs"} <= set(report["cases"][0]["lets_through"])
    assert "By themselves they prove nothing" in capsys.readouterr().out
    discriminating = next(case for case in report["cases"] if case["case"] == "wide")
    assert discriminating["lets_through"] == []


def test_rows_are_set_by_the_constant_or_cut_and_repeated(tmp_path):
    with_constant = check.load_module(ROOT / "reference.py")
    assert check.draw_inputs(with_constant, 0, 5)[0].shape == (5, with_constant.input_size)
    assert with_constant.batch_size == 16384
    (tmp_path / "reference.py").write_text(SUM_REFERENCE.format(rows=4))
    without = check.load_module(tmp_path / "reference.py")
    whole = check.draw_inputs(without, 0)[0]
    assert torch.equal(check.draw_inputs(without, 0, 3)[0], whole[:3])
    assert torch.equal(check.draw_inputs(without, 0, 6)[0], torch.cat([whole, whole[:2]]))


@pytest.mark.parametrize("distribution", check.DISTRIBUTIONS, ids=lambda d: d.name)
def test_distributions_are_drawn_from_the_seed_alone(problem, distribution):
    module = check.load_module(problem / "reference.py")
    state = lambda seed: check.draw_model(module, distribution, seed).state_dict()
    first, again, other = state(3), state(3), state(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    x, same, another = (check.draw(module, distribution, seed)[0] for seed in (3, 3, 4))
    assert torch.equal(x, same) and not torch.equal(x, another)
    assert x.isfinite().all() and (distribution.inputs is None) == bool((x >= 0).all())


def test_special_values_must_be_in_the_same_places():
    inf, nan = float("inf"), float("nan")
    target = torch.tensor([1.0, inf, -inf, nan])
    assert check.tolerance_shares(target, target, 1e-4, 1e-4).tolist() == [0, 0, 0, 0]
    wrong = torch.tensor([nan, -inf, 1.0, 1.0])
    assert check.tolerance_shares(wrong, target, 1e-4, 1e-4).tolist() == [inf] * 4
    assert check.tolerance_shares(torch.tensor([1 + 2e-4]), torch.ones(1), 1e-4, 1e-4).item() == pytest.approx(
        1, rel=1e-3
    )


def test_float64_forgives_what_the_reference_itself_gets_wrong():
    exact = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    expected = torch.tensor([4e-4, 1.0, 2.0])  # 4 times the tolerance off
    truth = check.Truth(expected, exact, "float64", 1e-4, 1e-4)
    assert truth.limit == pytest.approx(6, rel=1e-3)
    assert truth.accepts(torch.tensor([-5e-4, 1.0, 2.0])) and not truth.accepts(torch.tensor([-7e-4, 1.0, 2.0]))
    assert not check.Truth(expected, exact, "reference", 1e-4, 1e-4).accepts(exact.float())


def test_what_reference_and_float64_disagree_on_is_not_judged():
    exact = torch.tensor([1e39, 1.0], dtype=torch.float64)
    truth = check.Truth(exact.float(), exact, "float64", 1e-4, 1e-4)  # float32: inf
    assert truth.accepts(torch.tensor([float("nan"), 1.0])) and not truth.accepts(torch.tensor([float("inf"), 2.0]))


@pytest.mark.gpu
@pytest.mark.parametrize("solution", REFUSED_ON_GPU)
def test_refuses_on_a_gpu(run_check, solution):
    """16384 rows: work long enough to be seen on another stream."""
    code, _, faults = run_check(solution, "--device", "cuda", "--batch-size", "16384")
    assert code == 1 and has(faults, REFUSED_ON_GPU[solution]), faults


@pytest.mark.gpu
@pytest.mark.parametrize("solution", ["honest_float64", "honest_slow"])
def test_accepts_on_a_gpu(run_check, solution):
    assert run_check(solution, "--device", "cuda")[::2] == (0, [])


@pytest.mark.gpu
def test_a_tf32_solution_is_accepted_under_high(problem, tmp_path):
    """In a process of its own: --precision stays set."""
    command = [sys.executable, str(ROOT / "check.py"), str(problem), "--solution", str(ZOO / "gpu_uses_tf32.py")]
    command += ["--device", "cuda", "--trials", "1", "--batch-size", "4096"]
    assert subprocess.run([*command, "--precision", "high"], timeout=300).returncode == 0
    assert subprocess.run([*command, "--precision", "highest"], timeout=300).returncode == 1


@pytest.mark.parametrize(
    "options",
    [
        ("--atol", "-1"),
        ("--rtol", "inf"),
        ("--atol", "nan"),
        ("--atol", "0", "--rtol", "0"),
        ("--batch-size", "0"),
        ("--seed", "-1"),
        ("--timeout", "inf"),
        ("--json", "/nowhere/report.json"),
        ("--json", "/"),
    ],
    ids=" ".join,
)
def test_options_that_make_no_sense_are_refused_before_anything_runs(options, capsys):
    with pytest.raises(SystemExit) as ended:
        check.main(options)
    assert ended.value.code == 2 and options[0] in capsys.readouterr().err


def test_a_tolerance_of_zero_where_the_result_is_zero_accepts_no_other_answer():
    zero = torch.zeros(3, dtype=torch.float64)
    truth = check.Truth(zero.float() + 1e-9, zero, "float64", 0.0, 1e-4)
    assert truth.accepts(zero) and not truth.accepts(zero + 1)


def test_a_reference_that_lacks_a_part_is_named(tmp_path, capsys):
    (tmp_path / "reference.py").write_text("class Model: ...\n")
    (tmp_path / "model_new.py").write_text("class ModelNew: ...\n")
    assert check.main([str(tmp_path), "--device", "cpu"]) == 2
    assert "reference.py must define get_inputs, get_init_inputs, and does not." in capsys.readouterr().err
