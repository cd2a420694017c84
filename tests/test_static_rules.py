"""KernelBench's static rules, written from their description: what a solution's text may not hold, and what it must.

The rules look at the text, so that a word in a docstring or in a C block comment counts; what follows "#" or "//" on a
line does not.
"""

import re

import pytest
from conftest import ROOT

SOLUTIONS = ["model_new.py", "gemm_divide_sum_scaling/model_new.py", "gemm_divide_sum_scaling/model_collapsed.py"]
FORBIDDEN = {
    "try block": r"\btry\s*:",
    "except clause": r"\bexcept\b",
    "pass": r"\bpass\b",
    "threads": r"\bthreading\b|\b_thread\b",
    "processes": r"\bmultiprocessing\b",
    "futures": r"\bconcurrent\b",
    "tensor subclass": r"class\s+\w+\s*\([^)]*\bTensor\b|_make_subclass|__torch_function__|__torch_dispatch__",
    "side stream": r"cuda\.Stream\s*\(|wait_stream|record_stream|cudaStreamCreate|getStreamFromPool",
    "place of the file": r"__file__",
    "timer replaced": r"cuda\.Event|elapsed_time|perf_counter",
}
REQUIRED = {"kernel": r"__global__\s+void", "PyTorch's inline compiler": r"load_inline\s*\("}


def violations(text):
    """The names of the rules that the text of a solution breaks."""
    text = "\n".join(re.split(r"#|//", line)[0] for line in text.splitlines())
    return [name for name, pattern in FORBIDDEN.items() if re.search(pattern, text)] + [
        name for name, pattern in REQUIRED.items() if not re.search(pattern, text)
    ]


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_solution_keeps_the_rules(solution):
    assert violations((ROOT / solution).read_text()) == []


@pytest.mark.parametrize(
    "line, rule",
    [
        ("    try:", "try block"),
        ("    except OSError:", "except clause"),
        ('"""In one pass."""', "pass"),
        ("/* two-pass */", "pass"),
        ("import threading", "threads"),
        ("from multiprocessing import Pool", "processes"),
        ("import concurrent.futures", "futures"),
        ("class Fast(torch.Tensor):", "tensor subclass"),
        ("s = torch.cuda.Stream()", "side stream"),
        ("os.path.dirname(__file__)", "place of the file"),
    ],
)
def test_rules_reject(line, rule):
    text = (ROOT / SOLUTIONS[0]).read_text()
    assert violations(f"{text}\n{line}\n") == [rule]


def test_rules_want_a_kernel_and_its_compiler():
    assert violations("import torch\n# __global__ void k(), load_inline(\n") == list(REQUIRED)


@pytest.mark.parametrize("solution", SOLUTIONS)
def test_solution_is_ascii(solution):
    """PyTorch writes sources in the locale's encoding, so that another letter would fail where that is ASCII."""
    assert (ROOT / solution).read_text(encoding="utf-8").isascii()
