"""Is a solution right? Compares it with its problem's reference, on inputs that tell right answers from wrong ones.

    python check.py [PROBLEM_DIR] [--solution FILE]

Exit code: 0, right; 1, wrong, as is a solution that raises, hangs or ends its process; 2, could not run, as without the
GPU that was asked for, or with a file, reference or solution, that raises when it is loaded or lacks its class.

PROBLEM_DIR holds `reference.py` (`Model`, `get_inputs`, `get_init_inputs`: KernelBench's form) and `model_new.py`
(`ModelNew`). The solution runs in a process of its own, which gets parameters and inputs and gives back outputs and
what was seen of its conduct. Expected values and the verdict stay here, in a process that never loads the solution.

The file reads in that order: problems and inputs, judging, the solution's process, the cases, the report.
"""

import argparse
import collections
import contextlib
import copy
import importlib.util
import io
import itertools
import json
import logging
import math
import operator
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# PyTorch complains of numpy, which nothing here needs, when it is imported, and of a CUDA compiler without a GPU.
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
logging.getLogger("torch.utils.cpp_extension").addFilter(lambda record: "No CUDA runtime" not in record.getMessage())

import torch  # noqa: E402

HERE = Path(__file__).resolve().parent
CPU_ROWS = 64  # the default size on a CPU: enough rows to tell TF32 from float32, few enough for seconds
FURTHER_CALLS = 20  # for what is right in its first calls only: about as many have gone before
SECONDS_FOR_CALLS = 3  # and no more of them than fit in this time
PERTURB = 0x80  # glibc fills freed memory with this byte, and new memory with its complement: 3.4e38 as a float32
REFERENCE_SLACK = 1.5  # where the reference itself strays beyond the tolerance, how much further a solution may

_module_numbers = itertools.count()


class CouldNotRun(Exception):
    """Nothing can be said about the solution; the message says what to do."""


class SolutionFailed(Exception):
    """The solution's process died or gave no answer; the message says how."""


def one_line(error, path=None):
    """What ``error`` says in one line, with the last line of the file at ``path`` that it came through, if any."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f" (line {lines[-1]} of {Path(path).name})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600].rstrip('.')}{where}"


# ---- Problems and their inputs --------------------------------------------------------------------------------------


def load_module(path):
    """The Python file at ``path`` as a module under a name of its own, so that two files called alike never meet.

    The file stands alone: its folder is not put on ``sys.path``. Whatever the file raises comes through.
    """
    path = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(f"{path.stem}_loaded_{next(_module_numbers)}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pickle, inspect and torch.compile look a class's module up there
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def constants(problem, values):
    """``problem`` (a module) with its constants set to ``values`` (name -> value) for a while."""
    before = {name: getattr(problem, name) for name in values}
    vars(problem).update(values)
    try:
        yield
    finally:
        vars(problem).update(before)


def batch_constants(problem):
    """The names of the integer constants of the module ``problem`` that give the batch size."""
    return [name for name, value in vars(problem).items() if "batch" in name.lower() and type(value) is int]


def row_count(inputs):
    """The leading dimension of the first tensor that has one; 1 without any."""
    return next((len(x) for x in inputs if isinstance(x, torch.Tensor) and x.dim() > 0), 1)


def draw_inputs(problem, seed, rows=None):
    """``problem.get_inputs()`` under ``seed``, on the CPU, with ``rows`` rows where that is given.

    Constants of the module whose name contains "batch" are set to ``rows``. In a module without one, the tensors that
    share the first one's leading dimension are cut to that many rows, or their rows are repeated.
    """
    torch.manual_seed(seed)
    with constants(problem, dict.fromkeys(batch_constants(problem) if rows else [], rows)):
        inputs = list(problem.get_inputs())
    found = row_count(inputs)
    if rows is None or rows == found:
        return inputs
    shares_rows = lambda x: isinstance(x, torch.Tensor) and x.dim() > 0 and len(x) == found
    return [x[torch.arange(rows) % found] if shares_rows(x) else x for x in inputs]


def float_parameters(model):
    """The floating-point parameters of ``model``, in order."""
    return [p for p in model.parameters() if p.is_floating_point()]


def weights(model):
    """Those with two or more dimensions: (out, in, ...) each."""
    return [p for p in float_parameters(model) if p.dim() > 1]


def quadruple(model):
    for parameter in float_parameters(model):
        parameter.mul_(4)


def widen(model):
    """Every weight ~ N(0, 1/fan_in), the last one 8 times that."""
    for weight in weights(model):
        factor = 8 if weight is weights(model)[-1] else 1
        weight.copy_(torch.randn(weight.shape) * factor / math.sqrt(weight[0].numel()))


def last_unit(model):
    """The last weight ~ N(0, 1)."""
    for weight in weights(model)[-1:]:
        weight.copy_(torch.randn(weight.shape))


@dataclass(frozen=True)
class Distribution:
    """One way to fill a problem: both functions draw from PyTorch's CPU generator; None leaves the problem's own."""

    name: str
    inputs: Callable | None = None  # a floating-point input -> another of the same shape
    parameters: Callable | None = None  # a model -> None, changes its parameters in place


DISTRIBUTIONS = (
    Distribution("own"),
    Distribution("heavy-tailed", lambda x: torch.randn_like(x).mul(3).exp() * torch.randn_like(x).sign()),
    Distribution("scaled", lambda x: 3 * torch.randn_like(x), quadruple),
    Distribution("wide", torch.randn_like, widen),
    Distribution("last weight N(0, 1)", torch.randn_like, last_unit),
)


def with_nan(parameter, _):
    """A weight with NaN for its first element; vectors as they are."""
    if parameter.dim() < 2:
        return parameter
    return torch.cat([parameter.new_full((1,), math.nan), parameter.reshape(-1)[1:]]).view_as(parameter)


def in_another_order(parameter, _):
    """The elements of ``parameter`` in the other order, but for the first and the last: its sums stay as they are."""
    flat = parameter.reshape(-1)
    return torch.cat([flat[:1], flat[1:-1].flip(0), flat[1:][-1:]]).view_as(parameter)


# Of a parameter, and whether it is the last vector. As ramps, vectors count, and their last elements for most; the last
# one lowered, results are negative where nothing forbids it.
NEW_VALUES = {
    "vectors as ramps": lambda p, _: torch.linspace(-3, 3, len(p)) if p.dim() == 1 else p,
    "weights in another order": in_another_order,
    "last vector lowered": lambda p, last: p - 120 if last else p,
    "NaN in each weight": with_nan,
}


@torch.no_grad()
def draw_model(problem, distribution, seed, device="cpu"):
    """``problem.Model`` with the parameters that ``distribution`` gives it under ``seed``, on ``device``."""
    torch.manual_seed(seed)
    model = problem.Model(*problem.get_init_inputs())
    if distribution.parameters:
        distribution.parameters(model)
    return model.to(device)


def draw(problem, distribution, seed, rows=None, device="cpu"):
    """The arguments of the problem's ``forward`` under ``distribution`` and ``seed``, on ``device``."""
    inputs = draw_inputs(problem, seed, rows)
    if distribution.inputs:
        inputs = each_float(inputs, distribution.inputs)
    return to_device(inputs, device)


def each_float(inputs, change):
    """``inputs`` with ``change`` applied to the floating-point tensors."""
    return [change(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]


def to_device(inputs, device):
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs]


def with_other_strides(x):
    """The values of ``x`` in the order of memory that its first and last dimension have when they are swapped."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x


def with_special_rows(x):
    """``x`` with NaN, +inf, -inf, both infinities, the largest float, a subnormal and zeros in a row each."""
    rows = x.flatten(1) if x.dim() > 1 else x[:, None]  # (rows, features)
    rows = rows.clone()
    largest = torch.finfo(x.dtype).max
    middle = rows.shape[1] // 2
    for row, value in enumerate([math.nan, math.inf, -math.inf, largest, torch.finfo(x.dtype).tiny / 8]):
        rows[row : row + 1, middle] = value
    rows[5:6, 0], rows[5:6, -1] = math.inf, -math.inf
    rows[6:7] = 0
    rows[7:8] = math.inf
    return rows.reshape(x.shape)


@contextlib.contextmanager
def eval_mode(*models):
    """``models`` in eval mode for a while."""
    before = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, training in zip(models, before, strict=True):
            model.train(training)


# ---- Judging --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model, inputs, dtype=None):
    """``model(*inputs)``, or the same evaluated in ``dtype`` by a copy of the model."""
    if dtype is not None:
        model, inputs = copy.deepcopy(model).to(dtype), each_float(inputs, lambda x: x.to(dtype))
    return model(*inputs)


def tolerance_shares(candidate, target, atol, rtol):
    """Elementwise ``|candidate - target| / (atol + rtol |target|)``, float64.

    0 where both are the same NaN or infinity, infinite where only one is.
    """
    candidate, target = candidate.double(), target.double()
    same = (candidate == target) | (candidate.isnan() & target.isnan())
    share = (candidate - target).abs() / (atol + rtol * target.abs())
    return share.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0)


def largest(values):
    """The largest element as a float, 0 for an empty tensor."""
    return values.max().item() if values.numel() else 0.0


def errors(candidate, target, where):
    """(rms, largest) of ``candidate - target`` over the elements ``where`` an answer is known and finite."""
    error = (candidate.double() - target.double()).abs()[(where & target.isfinite()).expand_as(candidate)]
    error = error.nan_to_num(nan=math.inf, posinf=math.inf)  # no answer is as wrong as an answer can be
    return error.square().mean().sqrt().item() if error.numel() else 0.0, largest(error)


class Truth:
    """What is known of the right answer, and the rule that judges by it.

    ``expected`` is the reference's own output, ``exact`` its float64 evaluation. By the reference: within the
    tolerance. By float64: within the tolerance, or no further off than ``REFERENCE_SLACK`` times the reference's own
    largest share; elements that the two put in different classes (finite, NaN, +inf, -inf) are nowhere defined.
    """

    def __init__(self, expected, exact, judged_by, atol, rtol):
        self.expected, self.exact, self.judged_by = expected, exact, judged_by
        self.atol, self.rtol = atol, rtol
        classes = [torch.stack([t.isnan(), t == math.inf, t == -math.inf]) for t in (expected, exact)]
        self.defined = (classes[0] == classes[1]).all(0)
        self.limit = 1.0
        if judged_by == "float64":
            shares = self.shares(expected)  # infinite where the tolerance is 0, as it may be where the result is
            self.limit = max(1.0, REFERENCE_SLACK * largest(shares[shares.isfinite()]))

    def shares(self, candidate):
        """The share of the tolerance that each element uses, by the rule."""
        if self.judged_by == "reference":
            return self.strict_shares(candidate)
        return self.float64_shares(candidate)

    def strict_shares(self, candidate):
        shares = tolerance_shares(candidate, self.expected, self.atol, self.rtol)
        return shares if self.judged_by == "reference" else shares.masked_fill(~self.defined, 0)

    def float64_shares(self, candidate):
        return tolerance_shares(candidate, self.exact, self.atol, self.rtol).masked_fill(~self.defined, 0)

    def accepts(self, candidate):
        return largest(self.shares(candidate)) <= self.limit

    def errors(self, candidate):
        """(rms, largest) error of ``candidate`` against float64."""
        return errors(candidate, self.exact, self.defined)


def wrong_answers(model, inputs, expected):
    """Controls: answers (name -> tensor like ``expected``) that a useful comparison refuses."""
    finite = expected[expected.isfinite()].double()
    fill = lambda value: expected.clone().fill_(value)
    answers = {"zeros": fill(0)}
    if finite.numel():
        answers |= {"a constant": fill(finite[0].item()), "the mean": fill(finite.mean().item())}
    if expected.dim():
        answers |= {"shuffled": expected.roll(1, 0), "no last row": expected.clone()}
        answers["no last row"][-1:] = 0
    answers["no last column"] = evaluate(model, each_float(inputs, without_last_column))
    answers["bfloat16 inputs"] = evaluate(model, each_float(inputs, lambda x: x.bfloat16().to(x.dtype)))
    # What equals the reference's answer (a shuffled single row) is no wrong answer.
    return {name: answer for name, answer in answers.items() if not torch.equal(answer, expected)}


def without_last_column(x):
    return torch.cat([x[..., :-1], torch.zeros_like(x[..., -1:])], -1) if x.dim() else x


@contextlib.contextmanager
def cuda_matmul_precision(precision):
    """PyTorch's float32 switch for CUDA matrix products at "ieee" or "tf32" for a while."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def round_to_tf32(x):
    """``x`` with the 10 explicit mantissa bits that TF32 keeps, where it is float32."""
    if x.dtype != torch.float32:
        return x
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@torch.no_grad()
def evaluate_in_tf32(model, inputs):
    """``model(*inputs)`` with TF32 products: on a GPU the real ones, on a CPU the float32 ones of rounded operands."""
    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs):
        with cuda_matmul_precision("tf32"):
            return model(*inputs)
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.copy_(round_to_tf32(parameter))
    return rounded(*each_float(inputs, round_to_tf32))


ACCURACY = (
    "more exact than the reference",
    "as exact as float32",
    "less exact than float32, more than TF32",
    "behaves like TF32",
    "like float16/bfloat16",
    "less exact than bfloat16",
    "wrong",
)  # from best to worst


def accuracy_in_words(error, model, inputs, truth):
    """One of ``ACCURACY`` for an rms ``error``: beside the reference's own, and what it makes of other precisions."""
    if math.isinf(error):  # NaN or an infinity where a number is wanted
        return ACCURACY[-1]

    def bounds():  # lazily: the less exact evaluations are of interest for few solutions
        rms = lambda output: truth.errors(output)[0]
        yield rms(truth.expected) / 2 or -1.0  # nothing is more exact than exact
        with cuda_matmul_precision("ieee"):
            float32 = rms(evaluate(model, inputs))
        # What lies within three units in the last place of the output is float32 too, however lucky the reference was.
        float32 = max(2 * float32, 3 * 2**-23 * rms(torch.zeros_like(truth.exact)))
        yield float32
        tf32, bfloat16 = rms(evaluate_in_tf32(model, inputs)), rms(evaluate(model, inputs, torch.bfloat16))
        if tf32 < float32:  # no matrix products, so the switch changes nothing: TF32 has 3 bits more than bfloat16
            tf32 = bfloat16 / 8
        yield from (tf32 / 2, 2 * tf32, 2 * bfloat16, math.inf)

    return next(words for words, bound in zip(ACCURACY[:-1], bounds(), strict=True) if error <= bound)


# ---- The solution's process: what runs beside the solution, and knows no expected value ------------------------------


def send(stream, message):
    """Write ``message``, anything that torch.save takes, to a binary stream, behind its length in bytes."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    stream.write(len(buffer.getbuffer()).to_bytes(8, "little"))
    stream.write(buffer.getbuffer())
    stream.flush()


def receive(stream, weights_only):
    """What ``send`` wrote; with ``weights_only`` no code of the sender's runs. Raises EOFError at the stream's end."""
    length = int.from_bytes(stream.read(8), "little")
    message = stream.read(length)
    if not length or len(message) < length:
        raise EOFError
    return torch.load(io.BytesIO(message), weights_only=weights_only)


def packed(tensor):
    """A copy of the elements of ``tensor`` in order, (elements): ``contiguous`` leaves a lone element its stride."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor).view(-1)


def same_bits(a, b):
    alike = (a.shape, a.dtype) == (b.shape, b.dtype)
    return alike and torch.equal(packed(a).view(torch.uint8), packed(b).view(torch.uint8))


def storage(tensor):
    """The address of the memory that ``tensor`` lies in; None for an empty one."""
    return tensor.untyped_storage().data_ptr() or None


def settings():
    """PyTorch's global settings, name -> value, as far as they decide results or belong to the caller."""
    values = {
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the float32 precision": torch.backends.fp32_precision,
        "the float32 precision of CUDA matrix products": torch.backends.cuda.matmul.fp32_precision,
        "the float32 precision of cuDNN": torch.backends.cudnn.fp32_precision,
        "the float32 precision of cuDNN's convolutions": torch.backends.cudnn.conv.fp32_precision,
        "the float32 precision of CPU matrix products": torch.backends.mkldnn.matmul.fp32_precision,
        "reduced-precision sums in float16": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "reduced-precision sums in bfloat16": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "autocast on the CPU": torch.is_autocast_enabled("cpu"),
        "autocast on CUDA": torch.is_autocast_enabled("cuda"),
        "the number of threads": torch.get_num_threads(),
    }
    if torch.cuda.is_initialized():
        values["the current CUDA device"] = torch.cuda.current_device()
        values["the current CUDA stream"] = torch.cuda.current_stream().cuda_stream
    return values


def generator_states():
    states = [torch.get_rng_state(), random.getstate()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return str([s.tolist() if isinstance(s, torch.Tensor) else s for s in states])


def public_functions():
    """(owner, name) -> function, for what a check or a benchmark calls and a solution has no business replacing."""
    owners = (torch, torch.Tensor, torch.cuda, torch.cuda.Event, torch.testing, torch.nn.functional, time)
    found = {}
    for owner in owners:
        for namespace in reversed(getattr(owner, "__mro__", [owner])):  # a class: what it inherits, then its own
            found |= {(owner.__name__, name): value for name, value in vars(namespace).items() if callable(value)}
    return found


def is_from_pytorch(function):
    """Whether ``function`` is written in Python in PyTorch's own files, which wrap some functions when first needed."""
    return getattr(getattr(function, "__code__", None), "co_filename", "").startswith(os.path.dirname(torch.__file__))


def empty_slice(x):
    """Memory for ``x`` within a larger tensor: rows lie further apart, and the first element is not at the start."""
    if x.dim() == 0:
        return torch.empty_like(x)
    return x.new_empty(*x.shape[:-1], 2 * x.shape[-1] + 1)[..., 1 : 1 + x.shape[-1]]


class Stage:
    """The solution and what is seen of its conduct, in the process that runs it."""

    def __init__(self, device):
        self.device = torch.empty(0, device=device).device  # with its index; starts CUDA
        self.values = self.inputs = []  # the arguments as they should be, and as the solution was given them
        self.held = collections.deque(maxlen=4)  # the last outputs, each with a copy of it
        self.settings, self.functions = settings(), public_functions()

    def answer(self, request):
        """What the parent asks for, in this order: load, build, state, scale, inputs, and as many calls as it says."""
        reply, faults = {}, []
        generators = generator_states()
        try:
            if "load" in request:
                reply |= self.load(request["load"])
            if "build" in request:
                torch.manual_seed(request["seed"])
                self.model = self.module.ModelNew(*request["build"]).to(self.device)
            if "state" in request:
                self.model.load_state_dict(request["state"])
            if "scale" in request:
                self.scale_parameters(request["scale"], request["factor"])
            if "inputs" in request:
                self.values = to_device(request["inputs"], self.device)
            outputs, deadline = [], time.monotonic() + SECONDS_FOR_CALLS
            with eval_mode(*[self.model] if request.get("eval") else []):
                while len(outputs) < request.get("calls", 0) and not (outputs and time.monotonic() > deadline):
                    outputs.append(self.call(request, faults))
            if outputs and None not in outputs:
                reply["outputs"] = outputs
            if request.get("buffers"):
                reply["buffers"] = {name: buffer.cpu() for name, buffer in self.model.named_buffers()}
        except BaseException as error:  # SystemExit and KeyboardInterrupt are a solution's errors too
            reply["error"] = one_line(error, self.path)
        if "build" not in request and generator_states() != generators:
            faults.append("It changed the state of a global random number generator.")
        faults += self.changed_globals()
        return {"faults": list(dict.fromkeys(faults)), **reply}

    def load(self, path):
        """Load the solution's file. {"unusable": why} where it raises or holds no ModelNew: then there is no solution.

        SystemExit comes through: ending the process is something that a solution does.
        """
        self.path = str(Path(path).resolve())
        try:
            self.module = load_module(path)
        except Exception as error:
            return {"unusable": f"cannot be loaded: {one_line(error, self.path)}"}
        return {} if hasattr(self.module, "ModelNew") else {"unusable": "must define a class ModelNew, and does not"}

    @torch.no_grad()
    def scale_parameters(self, how, factor):
        """Multiply every floating-point parameter by ``factor``, in one of the ways that people change weights."""
        parameters = float_parameters(self.model)
        if how == "load_state_dict":
            names = {name for name, p in self.model.named_parameters() if p.is_floating_point()}
            state = self.model.state_dict()
            self.model.load_state_dict({name: v * factor if name in names else v for name, v in state.items()})
        for parameter in parameters:
            if how == ".data.mul_":
                parameter.data.mul_(factor)
            elif how == ".data =":
                parameter.data = parameter.data * factor
            elif how == "copy_":
                parameter.copy_(parameter * factor)

    def call(self, request, faults):
        """One call as a careless caller makes it; its output (on the CPU) as it stood when the call returned.

        None when what came back is no plain tensor. On CUDA nothing is synchronised between writing the inputs, the
        call and reading the output, unless ``request["synchronise"]``: the stream's order alone must make it right.
        """
        cuda = self.device.type == "cuda"
        if "inputs" in request and not request.get("same_storage"):
            empty = empty_slice if request.get("sliced") else torch.empty_like
            self.inputs = [empty(v) if isinstance(v, torch.Tensor) else v for v in self.values]
        tensors = [(x, v) for x, v in zip(self.inputs, self.values, strict=True) if isinstance(v, torch.Tensor)]
        threads = set(threading.enumerate())
        if cuda:
            for x, _ in tensors:  # who reads an input before the caller's stream has written it reads NaN
                torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).fill_(0xFF)
            self.poison_freed_memory()
            torch.cuda.synchronize()
            if not request.get("synchronise"):
                torch.cuda._sleep(5_000_000)  # about 3 ms, in which the host can issue the copy, the call and the read
        for x, v in tensors:
            x.data.copy_(v)  # .data: the version counter, which a cache might trust, stays as it was
        if cuda and request.get("synchronise"):
            torch.cuda.synchronize()

        parameters, mode = list(self.model.parameters()), getattr(self.model, "training", None)
        copies = [(p, p.requires_grad, p.detach().clone()) for p in parameters if not torch.nn.parameter.is_lazy(p)]
        with torch.no_grad():
            output = self.model(*self.inputs)
            if type(output) is not torch.Tensor:
                faults.append(f"It returned a {type(output).__name__} where a plain torch.Tensor is wanted.")
                return None
            at_return = output.clone()

        if cuda:
            torch.cuda.synchronize()
        else:
            for thread in set(threading.enumerate()) - threads:
                thread.join(1)
            time.sleep(0.005)  # for threads that Python does not know; what counts is the value at return
        if output.device != self.device:
            faults.append(f"Its output lies on {output.device}, the inputs on {self.device}.")
        if not same_bits(at_return, output):
            faults.append("Its output still changed after the call had returned: work was left running elsewhere.")
        if any(not same_bits(x, v) or x.requires_grad != v.requires_grad for x, v in tensors):
            faults.append("It changed its inputs in place.")
        now = list(self.model.parameters())
        kept = len(parameters) == len(now) and all(map(operator.is_, parameters, now))
        if not kept or any(p.requires_grad != asked or not same_bits(p.detach(), v) for p, asked, v in copies):
            faults.append("It changed its parameters.")
        if getattr(self.model, "training", None) != mode:
            faults.append("It switched itself between training and evaluation.")
        if storage(output) in {storage(x) for x, _ in tensors} - {None}:
            faults.append("Its output shares memory with an input.")
        if storage(output) in {storage(p) for p in now} - {None}:
            faults.append("Its output shares memory with a parameter.")
        if unwritten := self.unwritten(at_return):
            faults.append(f"It left {unwritten} of {output.numel()} elements of its output unwritten.")
        handed_out = {storage(earlier) for earlier, _ in self.held} - {None}
        if storage(output) in handed_out or not all(same_bits(*pair) for pair in self.held):
            faults.append("It rewrote or handed out again an earlier output, which the caller still held.")
        self.held.append((output, at_return))
        return at_return.cpu()

    def poison_freed_memory(self):
        """Leave nothing but NaN in the CUDA allocator's free blocks. (On the CPU, MALLOC_PERTURB_ does its part.)"""
        used = sum(t.nbytes for t in [*self.model.parameters(), *self.inputs] if isinstance(t, torch.Tensor))
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        blocks = [2**20] * 64 + [min(8 * used + 2**26, free // 4)]  # small requests have a pool of their own
        for block in [torch.empty(size, dtype=torch.uint8, device=self.device) for size in blocks]:
            block.fill_(0xFF)

    def unwritten(self, output):
        """How many elements of a floating-point ``output`` still hold what freed memory was filled with."""
        if not output.is_floating_point() or output.element_size() < 4:
            return 0  # a short pattern may well be a value
        elements = packed(output)[:, None].view(torch.uint8)  # (elements, bytes)
        patterns = [0xFF] if self.device.type == "cuda" else [PERTURB, PERTURB ^ 0xFF]
        return sum((elements == pattern).all(1).sum().item() for pattern in patterns)

    def changed_globals(self):
        """A sentence for every global setting or public function that is not what it was the last time."""
        now, functions = settings(), public_functions()
        changed = [
            f"It changed {name} from {self.settings[name]} to {value}."
            for name, value in now.items()
            if value != self.settings.get(name, value)
        ]
        changed += [
            f"It replaced {'.'.join(key)} by a function of its own."
            for key, function in functions.items()
            if function is not self.functions.get(key, function) and not is_from_pytorch(function)
        ]
        self.settings, self.functions = now, functions
        return changed


def solution_process(descriptor):
    """Answer the parent's requests on the socket with that file descriptor until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    stream = socket.socket(fileno=descriptor).makefile("rwb")
    start = receive(stream, weights_only=True)
    if start["precision"]:
        torch.set_float32_matmul_precision(start["precision"])
    stage = Stage(start["device"])
    send(stream, {"faults": []})
    with contextlib.suppress(EOFError):
        while True:
            send(stream, stage.answer(receive(stream, weights_only=False)))  # any argument of Model may come


# ---- The parent's side of it ----------------------------------------------------------------------------------------


class Solution:
    """The solution in its process. Every answer is plain data: no code of the solution's runs here."""

    def __init__(self, device, precision, timeout):
        self.timeout = max(timeout, 60)  # for it to start: PyTorch is imported meanwhile
        self.socket, theirs = socket.socketpair()
        self.stream = self.socket.makefile("rwb")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--solution-process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a solution prints is no part of the report
            start_new_session=True,  # so that what it starts can be ended with it
            env=os.environ | ({"MALLOC_PERTURB_": str(PERTURB)} if device == "cpu" else {}),
        )
        theirs.close()
        try:
            self.ask(device=device, precision=precision)
        except SolutionFailed as failure:
            raise CouldNotRun(f"The process for the solution did not start: {failure}") from None
        self.timeout = timeout

    def ask(self, **request):
        """The process's answer to ``request``, a dict. Raises SolutionFailed when there is none in time."""
        seen = []  # when the time is over: how the process had ended by then, if it had

        def give_up():
            seen.append(self.process.poll())
            self.kill()
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # a helper of its that got away may hold the other end

        watchdog = threading.Timer(self.timeout, give_up)
        watchdog.start()
        try:
            send(self.stream, request)
            reply = receive(self.stream, weights_only=True)
            if not all(isinstance(fault, str) for fault in reply["faults"]):
                raise TypeError
            if not all(isinstance(output, torch.Tensor) for output in reply.get("outputs", [])):
                raise TypeError
            return reply
        except Exception as error:  # what comes from there may be anything
            watchdog.cancel()
            if seen == [None]:
                raise SolutionFailed(f"it gave no answer within {self.timeout:g} s (--timeout)") from None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            code = seen[0] if seen else self.process.poll()
            if code is None:
                raise SolutionFailed(f"it spoilt the pipe to this process ({type(error).__name__})") from None
            names = {s.value: s.name for s in signal.Signals}
            how = f"was killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"exited with code {code}"
            raise SolutionFailed(f"its process {how}") from None
        finally:
            watchdog.cancel()

    def kill(self):
        """End the process and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self):
        self.kill()
        self.process.wait()
        with contextlib.suppress(OSError):  # what it never read
            self.stream.close()
        self.socket.close()


# ---- The cases ------------------------------------------------------------------------------------------------------


class Check:
    """One check of one solution: the cases in order, each printed and kept as a record (a dict) in ``cases``."""

    def __init__(self, options, problem, device, rows):
        self.options, self.problem, self.device, self.rows = options, problem, device, rows
        self.cases, self.notes, self.faults = [], [], []
        self.carried = None  # the distribution whose parameters the solution has now
        self.last = None  # (expected, output) of the case before
        self.known = []  # the first values of parameters and inputs under each distribution, which fills them whole

    def run(self, solution):
        """All the cases. Raises SolutionFailed when the solution's process dies, CouldNotRun when there is no case."""
        self.solution = solution
        options, seed = self.options, self.options.seed
        own, *others = DISTRIBUTIONS
        try:
            draw_model(self.problem, own, seed)
            self.anew = {"build": self.problem.get_init_inputs(), "seed": seed}
        except Exception as error:
            raise CouldNotRun(f"The reference cannot be built: {one_line(error)}") from error
        if not (self.tell(load=str(options.solution)) and self.tell(**self.anew)):
            return
        for trial in range(options.trials):
            judged_by = "float64" if options.oracle else "reference"
            if not self.distribution(own, f"own, trial {trial + 1}", seed + trial, judged_by, accuracy=trial == 0):
                return
        for distribution in others:
            scaled, wide = (distribution.name == name for name in ("scaled", "wide"))
            if scaled and self.carry(distribution):  # tells rows and parameters apart
                self.sizes(distribution)
            if wide and self.carry(distribution):  # tells wrong answers apart best
                self.evaluation(distribution)
            if not self.distribution(distribution, distribution.name, seed, accuracy=True, buffers=wide):
                continue
            if scaled:
                self.changes()
            if wide:
                self.strides()
        self.odd_features(others[-1])

    def use(self, model):
        """Let ``model`` be the reference from here on, and a float64 copy of it the oracle."""
        self.model, self.oracle = model, copy.deepcopy(model).double()

    def tell(self, **request):
        """Ask for something other than a call. False, and a fault, where the solution raised."""
        reply = self.solution.ask(**request)
        if "unusable" in reply:
            raise CouldNotRun(f"{self.options.solution} {reply['unusable']}")
        self.faults += reply["faults"]
        if "error" not in reply:
            return True
        did = {"load": "loaded", "build": "built", "state": "given the reference's parameters"}[next(iter(request))]
        advice = "; with --same-seed, a solution with a layout of its own needs no copy" if "state" in request else ""
        self.faults.append(f"When it was {did}, it raised {reply['error']}{advice}.")
        return False

    def distribution(self, distribution, name, seed, judged_by="float64", accuracy=False, buffers=False):
        """A case under ``distribution``. False without one: its parameters are not taken, or its values known."""
        if not self.carry(distribution):
            return False
        try:
            inputs = draw(self.problem, distribution, seed, self.rows, self.device)
        except Exception as error:
            raise CouldNotRun(f"{self.rows} rows of inputs cannot be made: {one_line(error)}") from error
        tensors = [v for v in (*self.model.parameters(), *inputs) if isinstance(v, torch.Tensor)]
        values = [v.reshape(-1)[:1000].tolist() for v in tensors]
        if distribution.name != "own" and values in self.known:  # as without parameters that it would change
            self.notes.append(f"{name}: left out, as its parameters and inputs here are those of an earlier case.")
            return False
        self.known.append(values)
        self.case(name, inputs, judged_by, accuracy, buffers=buffers)
        return True

    def carry(self, distribution):
        """Give reference and solution the parameters of ``distribution``. False when the solution did not take them."""
        if self.carried is None or self.carried.parameters is not distribution.parameters:
            parameters = DISTRIBUTIONS[0] if self.options.same_seed else distribution
            self.use(draw_model(self.problem, parameters, self.options.seed, self.device))
            if not self.options.same_seed and not self.tell(**self.state()):
                return False
        self.carried = distribution
        return True

    def state(self):
        """The part of a request that gives the solution the reference's parameters."""
        return {} if self.options.same_seed else {"state": cpu_state(self.model)}

    def sizes(self, distribution):
        """Odd row counts, many calls, special values."""
        inputs = lambda rows, n=0: draw(self.problem, distribution, self.options.seed + n, rows, self.device)
        some = random.Random(self.options.seed).randrange(4, 128)
        for rows in sorted({1, 2, 3, some, 129, 1025, self.rows - 1} - {0}):
            if rows <= max(self.rows, 129):
                self.case("odd rows", inputs(rows))
        self.case("further calls", inputs(3, 1), calls=FURTHER_CALLS)
        special = inputs(self.rows)
        first = next((i for i, x in enumerate(special) if isinstance(x, torch.Tensor) and x.is_floating_point()), None)
        if first is not None and special[first].dim():
            special[first] = with_special_rows(special[first])
            self.case("NaN and infinite rows", special)

    def evaluation(self, distribution):
        """A case in eval mode, for parameters that have just been carried over.

        Running statistics, which decide there, are then alike: later on, each side has had other calls.
        """
        inputs = draw(self.problem, distribution, self.options.seed, self.rows, self.device)
        with eval_mode(self.model, self.oracle):
            self.case("eval mode", inputs, eval=True, **(self.anew if self.options.same_seed else {}))

    def strides(self):
        """The case before again, with the same inputs in another order of memory, where they have one."""
        same, turned = self.inputs, each_float(self.inputs, with_other_strides)
        if any(isinstance(x, torch.Tensor) and not x.is_contiguous() for x in turned):
            self.case("non-contiguous inputs", turned)
        self.case("slices of larger inputs", same, sliced=True)

    def changes(self):
        """The case before again, with inputs and then parameters changed: what is kept from it gets these wrong."""
        # The sum and the first element stay: a cache that looks at those only is no better than one that looks at none.
        turned = each_float(self.inputs, lambda x: torch.cat([x[:1], x[1:].flip(0)]) if x.dim() else x)
        self.case("same memory, new values", turned, same_storage=True)
        if self.options.same_seed:
            self.notes.append(
                "Under --same-seed the parameters stay as the seed makes them: their changes are not tried."
            )
            return
        if not float_parameters(self.model):
            self.notes.append("There are no floating-point parameters: their changes are not tried.")
            return
        ramps, *others = NEW_VALUES
        self.new_values(ramps)
        for how, factor in ((".data.mul_", 0.5), ("copy_", 0.75), ("load_state_dict", 1.25), (".data =", 0.625)):
            with torch.no_grad():
                for parameter in float_parameters(self.model):
                    parameter.mul_(factor)
            self.oracle.load_state_dict(self.model.state_dict())  # faster than a new copy
            self.case(f"weights by {how}", scale=how, factor=factor)
        for name in others:
            self.new_values(name)
        self.carried = None

    def new_values(self, name):
        """The case before again, with the parameters that ``NEW_VALUES[name]`` gives, if they are others."""
        parameters = float_parameters(self.model)
        before = [p.detach().clone() for p in parameters]
        vectors = [p for p in parameters if p.dim() == 1]
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(NEW_VALUES[name](parameter, bool(vectors) and parameter is vectors[-1]))
        if not all(map(same_bits, before, map(torch.Tensor.detach, parameters))):
            self.oracle.load_state_dict(self.model.state_dict())
            self.case(name, **self.state())

    def odd_features(self, distribution):
        """Other sizes than the problem's, all odd, where the module has constants for them. A clear refusal will do."""
        problem, seed = self.problem, self.options.seed
        sizes = {k: v // 16 | 1 for k, v in vars(problem).items() if type(v) is int and v >= 16}
        sizes |= dict.fromkeys(batch_constants(problem), 33)
        usual = problem.get_init_inputs()
        with constants(problem, sizes):
            init_inputs = problem.get_init_inputs()
            if init_inputs == usual:
                return
            try:
                parameters = DISTRIBUTIONS[0] if self.options.same_seed else distribution
                self.use(draw_model(problem, parameters, seed, self.device))
                inputs = draw(problem, distribution, seed, 33, self.device)
            except Exception as error:
                self.notes.append(f"odd features: left out, the reference raises {one_line(error)}")
                return
        self.case("odd features", inputs, may_refuse=True, build=init_inputs, seed=seed, **self.state())

    def truth(self, inputs, judged_by="float64"):
        exact = evaluate(self.oracle, each_float(inputs, torch.Tensor.double))
        return Truth(evaluate(self.model, inputs), exact, judged_by, self.options.atol, self.options.rtol)

    def is_right(self, truth, **request):
        """Whether ``truth`` accepts what the solution answers to one more call."""
        output = self.solution.ask(calls=1, **request).get("outputs", [None])[0]
        return output is not None and output.shape == truth.expected.shape and truth.accepts(output.to(self.device))

    def case(self, name, inputs=None, judged_by="float64", accuracy=False, may_refuse=False, **request):
        """One case: the reference's and the solution's answer to ``inputs`` (None: those of the case before)."""
        if inputs is not None:
            self.inputs = inputs
            request["inputs"] = to_device(inputs, "cpu")
        try:
            truth = self.truth(self.inputs, judged_by)
        except Exception as error:
            if not self.cases:
                why = f"does not run on {self.rows} rows (--batch-size sets that), as it is and in float64"
                raise CouldNotRun(f"The reference {why}: {one_line(error)}") from error
            self.notes.append(f"{name}: left out, the reference raises {one_line(error)}")
            return
        reply = self.solution.ask(**{"calls": 1, **request})
        if may_refuse and "error" in reply and "CUDA error" not in reply["error"]:
            self.notes.append(f"{name}: refused, which is no wrong answer: {reply['error']}")
            return
        record = {"case": name, "rows": row_count(self.inputs), "judged_by": judged_by, "faults": reply["faults"]}
        if "error" in reply:
            record["faults"].append(f"It raised {reply['error']}.")
        elif "outputs" in reply:
            record["faults"] += self.stray_buffers(reply.get("buffers", {}))  # before judging calls the reference again
            self.judge(record, truth, reply["outputs"], accuracy, request)
        record["passed"] = not record["faults"]
        if not self.cases:
            print_row(heading for heading, _, _ in COLUMNS)
        self.cases.append(record)
        print_case(record)

    def judge(self, record, truth, outputs, accuracy, request):
        """Fill ``record`` with what the ``outputs`` (one per call, alike) are worth by ``truth``."""
        expected, exact = truth.expected, truth.exact
        for attribute in ("shape", "dtype"):
            came, wanted = ({getattr(t, attribute) for t in ts} for ts in (outputs, [expected]))
            if came != wanted:
                record["faults"].append(f"Its output has {attribute} {listed(came)}, wanted {listed(wanted)}.")
        usual = expected.dtype, torch.float64, torch.float32, torch.float16, torch.bfloat16  # what can be compared
        if any(o.shape != expected.shape or o.dtype not in usual for o in outputs):
            return
        if len({o.dtype for o in outputs}) > 1:
            outputs = [o.double() for o in outputs]
        output = torch.stack(outputs).to(self.device) if len(outputs) > 1 else outputs[0].to(self.device)
        shares, strict = truth.shares(output), truth.strict_shares(output)
        wrong = shares > truth.limit
        reference_rms, reference_max = truth.errors(expected)
        solution_rms, solution_max = truth.errors(output)
        target = expected if truth.judged_by == "reference" else exact
        record |= {
            "max_error": errors(output, target, truth.defined)[1],
            "max_share": largest(shares),
            "limit": truth.limit,
            "strict_max_share": largest(strict),
            "reference_rms": reference_rms,
            "reference_max": reference_max,
            "solution_rms": solution_rms,
            "solution_max": solution_max,
            "calls": len(outputs),
            "elements": output.numel(),
            "wrong": wrong.sum().item(),
            "strict_wrong": (strict > 1).sum().item(),
            "solution_off": (truth.float64_shares(output) > 1).sum().item(),
            "reference_off": (truth.float64_shares(expected) > 1).sum().item() * len(outputs),
            "lets_through": [n for n, a in self.controls(expected).items() if truth.accepts(a)],
        }
        if accuracy:
            record["accuracy"] = accuracy_in_words(solution_rms, self.model, self.inputs, truth)
        if record["wrong"]:
            record["faults"].append(f"{record['wrong']} of {output.numel()} elements are off beyond the tolerance.")
            record["mismatches"] = [
                {
                    "index": index,
                    "solution": output[tuple(index)].item(),
                    "reference": expected.expand_as(output)[tuple(index)].item(),
                    "float64": exact.expand_as(output)[tuple(index)].item(),
                    "share": shares[tuple(index)].item(),
                }
                for index in wrong.nonzero()[:5].tolist()
            ]
            record["faults"] += self.reasons(truth, output, request)
        self.last = expected, output

    def stray_buffers(self, buffers):
        """A sentence when those of a solution's ``buffers`` that the reference saves too have other values there."""
        exact, saved = dict(self.oracle.named_buffers()), self.model.state_dict()

        def right(came, expected, exact):
            if came.shape != expected.shape or not expected.is_floating_point():
                return came.tolist() == expected.tolist()
            truth = Truth(expected, exact, "float64", self.options.atol, self.options.rtol)
            return truth.accepts(came.to(self.device))

        both = buffers.keys() & exact.keys() & saved.keys()
        if names := [name for name in both if not right(buffers[name], saved[name], exact[name])]:
            yield f"After the call its buffers are not what the reference's are: {listed(names)}."

    def controls(self, expected):
        """The wrong answers that this case should refuse, an answer kept from the case before among them."""
        answers = wrong_answers(self.model, self.inputs, expected)
        if self.last and self.last[0].shape == expected.shape and not torch.equal(self.last[0], expected):
            answers["the last answer"] = self.last[0]
        return answers

    def reasons(self, truth, output, request):
        """Sentences that say why ``output``, the answer to ``request``, may be wrong, if that can be found out."""
        expected = truth.expected
        if output.dim() > expected.dim():
            first = (truth.shares(output).flatten(1) > truth.limit).any(1).nonzero()[0].item()
            yield f"The first wrong one of these {len(output)} equal calls is number {first + 1}."
            return
        again = (  # which is a fault only where another result is due
            self.last
            and self.last[1].shape == output.shape
            and torch.equal(self.last[1], output)
            and not truth.accepts(self.last[0])
        )
        if again and not {"scale", "state"} & request.keys():
            yield "It gave the result of the case before again: results are kept from one call to the next."
            return
        if truth.judged_by == "float64" and not torch.equal(output.isnan(), expected.isnan()):
            count = (output.isnan() != expected.isnan()).sum().item()
            yield f"{count} elements are NaN in one of solution and reference only."
        mode = {"eval": request.get("eval", False)}
        if self.device == "cuda" and self.is_right(truth, **mode, synchronise=True):
            yield "It is right only when the GPU is synchronised first: it does not follow the caller's stream."
        elif self.is_right(truth, **mode):
            yield "It is right when it is asked once more: its answers to one call differ."
        elif self.cases and self.cases[-1]["passed"] and self.is_right(truth, **mode, **self.anew, **self.state()):
            yield (
                "It is right when it is built anew with these parameters: "
                f"it keeps {'a result or ' if again else ''}something derived from its weights, or of earlier calls."
            )


def cpu_state(model):
    return {name: value.cpu() for name, value in model.state_dict().items()}


def listed(things):
    return ", ".join(sorted(str(tuple(t) if isinstance(t, torch.Size) else t) for t in things))


# ---- The report -----------------------------------------------------------------------------------------------------

COLUMNS = (  # heading, width, record -> text
    ("case", -26, lambda r: r["case"]),
    ("rows", 6, lambda r: str(r["rows"])),
    ("judged by", -9, lambda r: r["judged_by"]),
    ("max error", 9, lambda r: f"{r['max_error']:.1e}"),
    ("share", 9, lambda r: f"{r['max_share']:.3g}"),
    ("limit", 6, lambda r: f"{r['limit']:.3g}"),
    ("strict", 9, lambda r: f"{r['strict_max_share']:.3g}"),
    ("ref. rms", 8, lambda r: f"{r['reference_rms']:.1e}"),
    ("sol. rms", 8, lambda r: f"{r['solution_rms']:.1e}"),
    ("", -5, lambda r: "right" if r["passed"] else "WRONG"),
    ("also accepts", 0, lambda r: ", ".join(r.get("lets_through", []))),
)
LEGEND = """\
share: largest share of the tolerance used, against what the case is judged by; strict: against the float32 reference.
rms: error against float64. also accepts: wrong answers that these inputs do not tell from right ones."""


def print_row(cells):
    aligned = [t.ljust(-w) if w <= 0 else t.rjust(w) for t, (_, w, _) in zip(cells, COLUMNS, strict=True)]
    print("  ".join(aligned).rstrip(), flush=True)


def print_case(record):
    """The line of a case; without an output that could be judged, most of it stays empty."""
    known = [column[0] for column in COLUMNS] if "max_error" in record else ("case", "rows", "judged by", "")
    print_row(text(record) if heading in known else "-" for heading, _, text in COLUMNS)


def reasons_in_short(cases):
    """Why ``cases`` failed: each fault once, with the first case that has it and the number of others.

    Faults that differ in nothing but their numbers are one.
    """
    found = {}  # the fault without numbers -> the fault and every record that has it
    for record in cases:
        for fault in record["faults"] + ([who_is_off(record)] if record.get("wrong") else []):
            found.setdefault(re.sub(r"0x\w+|\d+", "#", fault), (fault, []))[1].append(record)
    for fault, records in found.values():
        first, others = records[0], len({id(record) for record in records}) - 1
        yield f"{first['case']}{f' and {others} more' if others else ''}: {fault}"
        for m in first["mismatches"] if first.get("wrong") and fault == who_is_off(first) else []:
            values = f"solution {m['solution']:.9g}, reference {m['reference']:.9g}, float64 {m['float64']:.9g}"
            yield f"    at {tuple(m['index'])}: {values}, {m['share']:.3g} of the tolerance"


def who_is_off(record):
    """Which of solution and reference strays, by the float64 evaluation, in a sentence."""
    solution, reference, n = record["solution_off"], record["reference_off"], record["elements"]
    verdict = "both are off" if solution or reference else "neither is off"
    if solution < reference / 4:
        verdict = "it is the reference that is off"
    elif reference < solution / 4:
        verdict = "it is the solution that is off"
    return (
        f"Solution and float32 reference differ beyond the tolerance in {record['strict_wrong']} of {n} elements. "
        f"By float64, {solution} of the solution's and {reference} of the reference's are off beyond it: {verdict}."
    )


def summary(check):
    """The sentences under the table."""
    yield from reasons_in_short(check.cases)
    judged = [r for r in check.cases if "max_error" in r]
    own = [r for r in judged if r["case"].startswith("own") and r["lets_through"]]
    accepted = lambda records: sorted(set.intersection(*(set(r["lets_through"]) for r in records)))
    if own and accepted(own):
        yield f"The problem's own inputs also accept: {', '.join(accepted(own))}. By themselves they prove nothing."
    if judged and accepted(judged):
        yield f"No case here refuses: {', '.join(accepted(judged))}. This check proves nothing against those."
    if disputed := [r for r in judged if r["passed"] and r["strict_wrong"]]:
        worst = max(disputed, key=lambda r: r["strict_wrong"])
        yield f"Passed by float64 alone: {len(disputed)} of the cases, as '{worst['case']}'. {who_is_off(worst)}"
    if any(r["wrong"] and r["judged_by"] == "reference" and r["solution_off"] < r["reference_off"] / 4 for r in judged):
        yield "The solution is nearer to the truth than the reference that it failed against: see --oracle float64."
    yield from check.notes
    if words := [r for r in judged if "accuracy" in r]:
        ratio = lambda r: (
            r["solution_rms"] / r["reference_rms"] if r["reference_rms"] else (math.inf if r["solution_rms"] else 1.0)
        )
        worst = max(words, key=lambda r: (ACCURACY.index(r["accuracy"]), ratio(r)))
        faulty = check.faults or not all(r["passed"] for r in check.cases)
        where = " where it is right" if faulty and not worst["wrong"] else ""
        times = f"{ratio(worst):.2g} times the reference's error in '{worst['case']}'"
        yield f"Accuracy{where}: {worst['accuracy']} ({times})."
    yield from dict.fromkeys(check.faults)


def json_ready(value):
    """``value`` with what JSON has no word for (NaN, infinities, complex numbers) as text."""
    if isinstance(value, dict):
        return {k: json_ready(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(v) for v in value]
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


def parse(arguments):
    parser = argparse.ArgumentParser(description="Is a solution right? Exit code 0: right, 1: wrong, 2: could not run.")
    parser.add_argument(
        "problem_dir", nargs="?", type=Path, default=HERE, metavar="PROBLEM_DIR", help="default: the folder of check.py"
    )
    parser.add_argument("--solution", type=Path, help="default: PROBLEM_DIR/model_new.py")
    parser.add_argument("--reference", type=Path, help="default: PROBLEM_DIR/reference.py")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--precision", choices=["highest", "high"], help="PyTorch's float32 switch, for both sides")
    parser.add_argument("--trials", type=int, default=5, help="on the problem's own inputs (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and inputs (default: 0)")
    parser.add_argument("--batch-size", type=int, help=f"default: the problem's, on a CPU at most {CPU_ROWS}")
    parser.add_argument("--atol", type=float, default=1e-4, help="absolute tolerance (default: 1e-4)")
    parser.add_argument("--rtol", type=float, default=1e-4, help="relative tolerance (default: 1e-4)")
    parser.add_argument("--oracle", choices=["float64"], help="judge the problem's own inputs by float64 too")
    parser.add_argument("--same-seed", action="store_true", help="build both from one seed, copy no state_dict")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one answer (default: 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, for machines")
    options = parser.parse_args(arguments)
    options.solution = options.solution or options.problem_dir / "model_new.py"
    options.reference = options.reference or options.problem_dir / "reference.py"
    if options.trials < 1 or (options.batch_size is not None and options.batch_size < 1):
        parser.error("--trials and --batch-size want at least 1")
    if not (0 <= options.atol < math.inf and 0 <= options.rtol < math.inf and options.atol + options.rtol > 0):
        parser.error("--atol and --rtol want finite numbers, none below 0 and not both 0")
    if not (0 <= options.seed < 2**63 and 0 < options.timeout < 1e6):
        parser.error("--seed wants a number from 0 to 2**63 - 1, --timeout one above 0 and below a million")
    if options.json and (options.json.is_dir() or not options.json.resolve().parent.is_dir()):
        parser.error(f"--json wants a file in a folder that exists, which {options.json} is not")
    return options


def check(options, report):
    """Check the solution that ``options`` names; what is found goes to ``report`` and, for people, to stdout."""
    for path in (options.reference, options.solution):
        if not path.is_file():
            raise CouldNotRun(
                f"There is no file {path.absolute()}: name a problem's folder, or --reference and --solution."
            )
        if path.suffix != ".py":
            raise CouldNotRun(f"{path} must be a Python file, whose name ends in .py.")
    try:
        problem = load_module(options.reference)
        if lacking := [name for name in ("Model", "get_inputs", "get_init_inputs") if not hasattr(problem, name)]:
            raise CouldNotRun(f"{options.reference} must define {', '.join(lacking)}, and does not.")
        natural = row_count(draw_inputs(problem, options.seed))
    except CouldNotRun:
        raise
    except Exception as error:
        raise CouldNotRun(f"{options.reference} cannot be loaded: {one_line(error)}") from error
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise CouldNotRun("PyTorch finds no GPU here: use --device cpu.")
    if options.precision:
        torch.set_float32_matmul_precision(options.precision)
    precision = torch.backends.cuda.matmul.fp32_precision
    rows = options.batch_size or (natural if device == "cuda" else min(natural, CPU_ROWS))
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    report |= {
        "environment": {"device": where, "torch": torch.__version__, "cuda": torch.version.cuda},
        "precision": "high" if precision == "tf32" else "highest",
        "rows": rows,
        "rows_of_the_problem": natural,
    }
    print(f"{options.solution} against {options.reference} on {where}, PyTorch {torch.__version__}")
    print(
        f"{rows} rows{f' of the {natural} of the problem' if rows != natural else ''}, "
        f'float32 matrix products at "{report["precision"]}" ({"--precision" if options.precision else "as set"}), '
        f"atol {options.atol:g}, rtol {options.rtol:g}"
    )
    not_tested = ["On the CPU: a solution's GPU kernels do not run here."] if device == "cpu" else []
    print(*not_tested, "", sep="\n")
    run = Check(options, problem, device, rows)
    solution = Solution(device, options.precision, options.timeout)
    try:
        run.run(solution)
    except SolutionFailed as failure:
        place = f"after the case '{run.cases[-1]['case']}'" if run.cases else "before the first case"
        run.faults.append(f"The solution did not survive: {failure}, {place}.")
    finally:
        solution.close()
        report |= {"cases": run.cases, "faults": run.faults, "notes": not_tested + run.notes}
    failed = [r for r in run.cases if not r["passed"]]
    report["verdict"] = "wrong" if failed or run.faults else "right"
    if run.cases:
        print(f"\n{LEGEND}")
    for sentence in summary(run):
        print(sentence)
    counts = f"{len(run.cases) - len(failed)} of {len(run.cases)} cases right{', but see above' * bool(run.faults)}"
    print(f"{report['verdict'].upper()}: {counts if run.cases else 'it came to no case'}.")


def main(arguments=None):
    """The command line; gives the exit code."""
    options = parse(arguments)
    for stream in sys.stdout, sys.stderr:  # what a solution says may be anything
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    # Paths as seen from the current folder: a report that is kept says nothing of the machine that it was made on.
    seen = lambda value: os.path.relpath(value) if isinstance(value, Path) else value
    report = {"options": {name: seen(value) for name, value in vars(options).items()}}
    started = time.monotonic()
    try:
        check(options, report)
    except CouldNotRun as error:
        report |= {"verdict": "could not run", "why": str(error)}
        print(f"COULD NOT RUN: {error}", file=sys.stderr)
    report["seconds"] = time.monotonic() - started
    if options.json:
        options.json.write_text(json.dumps(json_ready(report), indent=1) + "\n")
    return {"right": 0, "wrong": 1}.get(report["verdict"], 2)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--solution-process"]:
        solution_process(int(sys.argv[2]))
    else:
        sys.exit(main())
