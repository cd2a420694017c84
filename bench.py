"""Is the solution faster, at what accuracy, and how far from what the hardware allows?

    python bench.py                                           the problem in this folder, at its own size
    python bench.py gemm_divide_sum_scaling --solution FILE   another problem, another solution
    python bench.py --reference FILE --solution FILE          a problem that is a single file, as KernelBench's are
    python bench.py --all --json F.json --plot F.png          both problems, training and batch sizes too
    python bench.py --gpus 2                                  throughput on one and on two GPUs
    python bench.py --build                                   the cold build of the extension
    python bench.py --readme                                  README.md's table and the pictures, from results/

Every solution is checked first (check.py) and not timed when it fails. Then each float32 precision gets a race:
the reference (`eager`), the reference under torch.compile (`compile`) and the solutions take turns, so that all of
them see the same clocks and temperatures. Only ratios from one race mean anything: the GPU slows down when hot.
Beside each time stands that contender's error against the reference evaluated in float64, on what it returned while
it was timed.

Exit code: 0, 1 when a solution was refused, 2 when the benchmark could not run.
"""

import argparse
import contextlib
import copy
import datetime
import functools
import hashlib
import importlib.util
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import check  # before torch: it silences what PyTorch says when it is imported

# isort: split
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parent
SECOND = ROOT / "gemm_divide_sum_scaling"

BUFFERS = 3  # input sets that the rounds go through, each rewritten before it is used again
SITTINGS = 4  # of a race, each in memory of its own: what two runs differ by is in part what two sittings do
# How much wider than a bootstrap over so few sittings an interval must be: sqrt(n / (n - 1)) by their variance, and by
# Student's quantile over the normal one.
WIDER = {1: 1.0, SITTINGS: math.sqrt(4 / 3) * 3.182 / 1.960}
ROUNDS = (3, 25)  # fewest and most rounds of a sitting; between them, what fits in:
SECONDS = {"main": 1.5, "sweep": 0.4}  # all sittings, their warm-ups (half as long again) not counted
TOLERANCE = {"float32": 1e-4, "float64": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}  # atol = rtol
STRAY = 1.5  # a solution may use this many times the share of the tolerance that the reference itself uses
HIDDEN = 0.1  # ms, and share of the time between events, by which work may outlast the end event more than eager's
SWEEP = [1, 4, 16, 64, 256, 1024, 4096, 8192, 16384, 32768, 65536]  # --all, up to four times the problem's own batch
MODES = "inference", "training"
AWKWARD = (  # --all, the first problem: not multiples of 8, narrow, wide, few rows, long sums, many outputs
    "batch:input_size:hidden_size:output_size="
    "16384:2047:4095:1023,16384:2049:4097:1025,16384:2048:4096:1000,16384:1000:1000:1000,16384:127:4096:1024,"
    "16384:2048:4096:7,16384:17:33:65,8191:2048:4096:1024,4095:8192:8191:8193,1000:3000:5000:7000,333:2048:4096:50257,"
    "65536:64:128:10,65536:256:512:10,4096:65536:128:10,41:55:9051:40667,32:2048:8192:50257,128:300:512:128256"
)
TRAINED = (  # --all, the first problem's training: fewer rows, narrow layers under many, many outputs
    "batch:input_size:hidden_size:output_size=64:2048:4096:1024,1024:2048:4096:1024,4096:2048:4096:1024,"
    "16384:1000:1000:1000,16384:127:4096:1024,65536:256:512:10,262144:64:128:10,4096:1024:1024:32000"
)
CPU_BATCH = 64  # without a GPU: small enough for two cores
CPU_CALLS, CPU_SECONDS = 5, 0.1  # on the CPU a round times a contender so often, or as often as fits in so long
BUILDS = 3  # cold builds of each kind
TURN, TURNS = 5, 10  # --gpus: steps in a turn, turns of each contender on each number of GPUs
STARTED = time.perf_counter()


class Unusable(Exception):
    """The benchmark cannot run; the message is one sentence that says what to do."""


def say(text):
    """Progress, on stderr: stdout holds the results only."""
    print(f"[{time.perf_counter() - STARTED:5.0f} s] {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# What is timed


class Problem:
    """A problem in KernelBench's form: a folder with a ``reference.py``, or such a file under any name.

    ``same_seed``: the solutions get no ``state_dict``, building them from the same seed makes their parameters alike.
    """

    def __init__(self, place, same_seed=False):
        self.place, self.same_seed = Path(place).resolve(), same_seed
        single = self.place.is_file()
        self.name = self.place.stem if single else self.place.name
        if self.place == ROOT:
            self.name = "gemm_sigmoid_logsumexp"
        path = self.place if single else self.place / "reference.py"
        if not path.is_file():
            raise Unusable(
                f"a problem is a file or a folder with a reference.py, {self.place} is neither; name another"
            )
        self.folder = path.parent
        try:
            self.reference = check.load_module(path)
            with torch.device("meta"):  # sizes without the data
                self.batch_size = check.row_count(check.draw_inputs(self.reference, seed=0))
        except Exception as error:
            raise Unusable(f"{path} must load and give inputs, and raises {check.one_line(error)}; mend it") from error

    def inputs(self, batch, seed, device, dtype):
        """The arguments of ``forward`` for ``batch`` rows, made on ``device``; floating-point ones in ``dtype``."""
        with torch.device(device):
            made = check.draw_inputs(self.reference, seed, batch)
        if not all(map(torch.is_tensor, made)):
            raise Unusable(f"get_inputs of {self.name} must give tensors alone here, and gives something else too")
        return [x.to(device, dtype if x.is_floating_point() else x.dtype) for x in made]

    def models(self, solutions, device, dtype):
        """``{"eager": Model, name: ModelNew, ...}`` on ``device`` in ``dtype``, all with the same parameters."""
        made = {}
        for name, cls in {"eager": self.reference.Model, **solutions}.items():
            torch.manual_seed(0)
            with torch.device(device):
                made[name] = cls(*self.reference.get_init_inputs()).to(device, dtype)
            if not self.same_seed:
                made[name].load_state_dict(made["eager"].state_dict())
        return made


@functools.cache
def solution_class(path):
    """``ModelNew`` of the file at ``path``, which is executed once."""
    return check.load_module(path).ModelNew


def make_step(model, mode, upstream):
    """What is timed: ``step(inputs) -> [output]``, or in training the gradients that parameters got, by name.

    ``upstream`` is the gradient that reaches the output, of its shape and dtype. As in training, ``inputs`` ask for no
    gradient.
    """
    parameters = [p for _, p in sorted(model.named_parameters()) if p.requires_grad]

    @torch.no_grad()
    def inference(inputs):
        return [model(*inputs)]

    def training(inputs):
        model.zero_grad(set_to_none=True)
        model(*inputs).backward(upstream)
        return [p.grad for p in parameters if p.grad is not None]

    return {"inference": inference, "training": training}[mode]


@contextlib.contextmanager
def float32_precision(name):
    """PyTorch's float32 matmul precision at ``name``, "highest" or "high", within; as it was found, after.

    Read from the new switch, because the old one raises where both spellings were used; written to the old one, which
    leaves both in agreement (torch.compile reads the old).
    """
    switches = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]
    found = [switch.fp32_precision for switch in switches]
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("medium" if found[1] == "bf16" else "high" if "tf32" in found else "highest")
        for switch, value in zip(switches, found, strict=True):
            switch.fp32_precision = value


def verify(problem, path, oracle, device, batch, precision):
    """Run check.py on the solution at ``path``: None when it is right, otherwise its first fault and how to see all."""
    seen = os.path.relpath  # a report that is kept says nothing of the machine that it was made on
    command = [seen(check.__file__)]
    if problem.place.is_file():
        command += ["--reference", seen(problem.place)]
    elif problem.place != ROOT:  # check.py's default as well
        command += [seen(problem.place)]
    command += ["--solution", seen(path), "--device", device, "--batch-size", str(batch), "--precision", precision]
    command += ["--oracle", oracle] if oracle else []
    command += ["--same-seed"] if problem.same_seed else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "check.json"
        done = subprocess.run([sys.executable, *command, "--json", str(report)], capture_output=True, text=True)
        if done.returncode == 0:
            return None
        found = json.loads(report.read_text()) if report.exists() else {}
    faults = [f"{case['case']}: {fault}" for case in found.get("cases", []) for fault in case["faults"]]
    faults += [*found.get("faults", []), *filter(None, [found.get("why")])]
    faults += done.stderr.strip().splitlines()[-1:] or ["no output"]  # the first, where check.py itself broke down
    by_hand = shlex.join(["python", *command])
    return f"check.py exited {done.returncode}: {faults[0].rstrip('.')}. To repeat it: {by_hand}"


# ---------------------------------------------------------------------------------------------------------------------
# Errors and ratios


def error(pairs, tolerance, training):
    """Error of ``[(outputs, float64 outputs), ...]``: ``rms_error``, ``max_error``, ``max_tolerance_share``.

    The tolerance of an element is ``tolerance * (1 + abs(exact))``. In training each gradient, and so its error, is
    in units of the exact gradient's root mean square: gradients have no natural size. NaN in, NaN out.
    """
    squares, largest, shares, count = [], [], [], 0
    for outputs, exacts in pairs:
        if len(outputs) != len(exacts):
            raise ValueError(f"must give {len(exacts)} {'gradients' if training else 'outputs'}, gives {len(outputs)}")
        for output, exact in zip(outputs, exacts, strict=True):
            if output.shape != exact.shape:
                raise ValueError(f"output must have shape {tuple(exact.shape)}, got {tuple(output.shape)}")
            unit = exact.square().mean().sqrt() if training else 1.0
            difference = (output.double() - exact).abs() / unit
            squares.append(difference.square().sum())
            largest.append(difference.max())
            shares.append((difference / (tolerance * (1 + (exact / unit).abs()))).max())
            count += exact.numel()
    return {
        "rms_error": (torch.stack(squares).sum() / count).sqrt().item(),
        "max_error": torch.stack(largest).max().item(),
        "max_tolerance_share": torch.stack(shares).max().item(),
    }


def speedup(baseline, times, sittings=1):
    """Ratio of the medians of two lists of times from the same rounds, and its 95 % interval ``(ratio, low, high)``.

    Bootstrap over the sittings, of as many rounds each, that follow each other in the lists, and within each over runs
    of up to five neighbouring rounds: clocks drift, so neighbours are not independent, nor are a sitting's rounds. The
    interval's ends are then moved away from the ratio, by the factor ``WIDER`` of its logarithm.
    """
    both = torch.tensor([baseline, times], dtype=torch.float64).unflatten(1, (sittings, -1))  # (2, sittings, rounds)
    rounds, generator = both.shape[2], torch.Generator().manual_seed(0)
    run = max(1, min(5, rounds // 4))
    sat = torch.randint(sittings, (2000, sittings, 1), generator=generator)
    starts = torch.randint(rounds, (2000, sittings, math.ceil(rounds / run), 1), generator=generator)
    picks = ((starts + torch.arange(run)) % rounds).flatten(2)[:, :, :rounds]  # (2000, sittings, rounds)
    medians = both[:, sat, picks].flatten(2).quantile(0.5, dim=-1)  # (2, 2000)
    ends = (medians[0] / medians[1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    ratio = statistics.median(baseline) / statistics.median(times)
    return ratio, *(ratio * (end / ratio) ** WIDER[sittings] for end in ends)


# ---------------------------------------------------------------------------------------------------------------------
# The clock


def cuda_clock():
    """``clock(step) -> (what it returned, ms between CUDA events, ms of wall time)`` on the current GPU.

    The L2 cache is flushed before, by writing 16 times its size, and the step is issued meanwhile: the events time the
    GPU, as in a program that keeps it busy, not the host on the way to the first launch, which on a slow host takes
    longer than the GPU takes to write four times its L2 cache. The host waits before and after both, for the whole GPU:
    wall time, less the flush, covers work left on another stream, which the events miss.
    """
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    flush = torch.empty(16 * l2, dtype=torch.uint8, device="cuda")
    before, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))

    def clock(step):
        torch.cuda.synchronize()
        began = time.perf_counter()
        before.record()
        flush.zero_()
        start.record()
        outputs = step()
        end.record()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - began) * 1e3
        return outputs, start.elapsed_time(end), wall - before.elapsed_time(start)

    return clock


def cpu_clock(step):
    """``(what it returned last, ms of wall time, the same)`` by torch.utils.benchmark, which warms up with two calls.

    The time is the best of a few: a program that takes one core stops a short step for many times as long as it lasts.
    """
    kept, ms, began = [], math.inf, time.perf_counter()
    timer = Timer("kept[:] = [step()]", globals={"kept": kept, "step": step}, num_threads=torch.get_num_threads())
    for _ in range(CPU_CALLS):
        ms = min(ms, timer.timeit(1).mean * 1e3)
        if time.perf_counter() - began > CPU_SECONDS:
            break
    return kept[0], ms, ms


@functools.cache
def nvml():
    """``(pynvml, handle of the current GPU)``, or None where nvidia-ml-py is not installed or the driver refuses."""
    if not importlib.util.find_spec("pynvml"):
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as reason:
        say(f"no clocks and power: {reason}")
        return None


def gauge():
    """One reading ``(SM clock in MHz, power in W, bits of what holds the clock down)``, or None."""
    if not nvml():
        return None
    pynvml, handle = nvml()
    try:
        return (
            pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        )
    except pynvml.NVMLError:
        return None


THROTTLE = {0x04: "power cap", 0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}


class Race(NamedTuple):
    """What ``race`` saw: lists over rounds by contender, the last outputs on each buffer, the gauge's readings."""

    ms: dict
    wall: dict
    kept: dict
    readings: list


def race(steps, buffers, refill, clock, rounds, seen=None):
    """Time every step of ``{name: step}`` once in each round, in an order that changes from round to round.

    Round ``r`` runs on ``buffers[r % BUFFERS]``, which ``refill(r)`` has given new content. Between rounds the GPU's
    gauge is read. What is ``seen`` is added to what an earlier sitting saw.
    """
    names = list(steps)
    seen = seen or Race({name: [] for name in names}, {name: [] for name in names}, {name: {} for name in names}, [])
    for r in range(rounds):
        inputs = buffers[r % BUFFERS]
        for x, fresh in zip(inputs, refill(r), strict=True):
            x.copy_(fresh)
        shift = r % len(names)
        order = names[shift:] + names[:shift]
        for name in order if r // len(names) % 2 == 0 else reversed(order):  # each follows each, in the long run
            outputs, ms, wall = clock(functools.partial(steps[name], inputs))
            seen.ms[name].append(ms)
            seen.wall[name].append(wall)
            seen.kept[name][r % BUFFERS] = outputs
        reading = gauge() if buffers[0][0].is_cuda else None
        if reading:
            seen.readings.append(reading)
    return seen


def outlasting(ms, wall):
    """By how many ms a contender's work outlasts its end event: the lower quartile over the faster half of its rounds.

    The faster half makes the median: who hides work to lower it does so in all of these rounds. Other programs' work is
    tolerated in up to three quarters of them.
    """
    median = statistics.median(ms)
    return statistics.quantiles(w - m for m, w in zip(ms, wall, strict=True) if m <= median)[0]


def measure_ceilings(kinds):
    """What the GPU allows: ``{kind: TFLOP/s of a large product, "copy": GB/s read and written}``.

    The kinds are "float32", "tf32", "float16", "bfloat16" (these two accumulate in float32) and "float64".
    """
    clock, n, found = cuda_clock(), 8192, {}
    for kind in sorted(kinds):
        with float32_precision("high" if kind == "tf32" else "highest"):
            dtype = torch.float32 if kind == "tf32" else getattr(torch, kind)
            a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
            ms = statistics.median(clock(lambda a=a, b=b: a @ b)[1] for _ in range(15))
            found[kind] = 2 * n**3 / ms / 1e9
    source = torch.randn(n * n * 4, device="cuda")  # 1 GiB
    target = torch.empty_like(source)
    ms = statistics.median(clock(lambda: target.copy_(source))[1] for _ in range(15))
    found["copy"] = 2 * source.nbytes / ms / 1e6
    return found


def gemm_kind(contender, precision, dtype):
    """The kind of product that bounds a contender: PyTorch's own; for a solution float16's, the fastest for float32."""
    if dtype != "float32":
        return dtype
    if contender not in ("eager", "compile"):
        return "float16"
    return "tf32" if precision == "high" else "float32"


# ---------------------------------------------------------------------------------------------------------------------
# One setting: problem, precision, dtype, batch, mode


def peak_extra_mib(model, step, inputs):
    """MiB that one step takes beyond what is allocated before it, its outputs included; None on the CPU."""
    if not inputs[0].is_cuda:
        return None
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(inputs)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def make_row(setting, name, seen, counts, ceilings):
    """One contender's row of the report; ``counts`` holds ``flops`` as written in the reference and ``least_bytes``."""
    times = seen.ms[name]
    ms = statistics.median(times)
    p20, _, _, p80 = statistics.quantiles(times, n=5)
    ratio, low, high = speedup(seen.ms["eager"], times, SITTINGS)
    kind = gemm_kind(name, setting["precision"], setting["dtype"]) if ceilings else None
    tflops, gb_per_s = counts["flops"] / ms / 1e9, counts["least_bytes"] / ms / 1e6
    row = {**setting, "contender": name, "rounds": len(times)}
    row |= {"ms_median": ms, "ms_p20": p20, "ms_p80": p80, "ms_wall": statistics.median(seen.wall[name])}
    row |= {"speedup_vs_eager": ratio, "speedup_low": low, "speedup_high": high}
    row |= {"tflops": tflops, "gemm_kind": kind, "ceiling_share": tflops / ceilings[kind] if kind else None}
    row |= {"gb_per_s": gb_per_s, "copy_share": gb_per_s / ceilings["copy"] if kind else None}
    if seen.readings:
        clocks, watts, bits = zip(*seen.readings, strict=True)
        throttled = [text for bit, text in THROTTLE.items() if any(bit & b for b in bits)]
        row |= {"clock_mhz": statistics.median(clocks), "power_w": statistics.median(watts), "throttled": throttled}
    return row


def measure(problem, solutions, setting, device, ceilings):
    """Race the contenders at one setting; ``(rows, refused)``, two lists of dicts for the report.

    ``setting`` holds ``problem``, ``precision``, ``dtype``, ``batch``, ``mode`` and ``sweep``. In a sweep the race is
    shorter, and torch.compile, which takes longer to compile than all the rest, stays out. A contender that raises,
    that is wrong before the race or during it, or whose work outlasts its end event, is refused with the reason.
    ``ceilings`` is what ``measure_ceilings`` found, and empty on the CPU.
    """
    training, dtype = setting["mode"] == "training", getattr(torch, setting["dtype"])

    def refill(seed):
        return problem.inputs(setting["batch"], seed, device, dtype)

    buffers = [refill(seed) for seed in range(BUFFERS)]
    models = problem.models(solutions, device, dtype)
    oracle = copy.deepcopy(models["eager"]).double()
    if not setting["sweep"]:
        torch.compiler.reset()  # what was compiled for another precision
        eager = models.pop("eager")
        models = {"eager": eager, "compile": torch.compile(copy.deepcopy(eager)), **models}
    with torch.no_grad():
        upstream = torch.randn_like(models["eager"](*buffers[0]))
    steps = {name: make_step(model, setting["mode"], upstream) for name, model in models.items()}
    exact_step = make_step(oracle, setting["mode"], upstream.double())

    def exact(inputs):
        return exact_step([x.double() if x.is_floating_point() else x for x in inputs])

    def judge(pairs):
        return error(pairs, TOLERANCE[setting["dtype"]], training)

    refused = []

    def refuse(name, reason):
        say(f"{name} is not timed: {reason}")
        refused.append({**setting, "contender": name, "reason": reason})
        steps.pop(name)

    # Right at this size? check.py has looked at one batch size only. The first call also compiles and warms up.
    truth = exact(buffers[0])
    eager_share = judge([(steps["eager"](buffers[0]), truth)])["max_tolerance_share"]
    if not math.isfinite(eager_share):
        raise Unusable(f"the reference must return finite numbers, and does not at {setting}; choose another dtype")

    def allowed(name, eager_share):
        """The largest share of the tolerance; torch.compile is a baseline, so that its error only has to be finite."""
        return sys.float_info.max if name == "compile" else max(1.0, STRAY * eager_share)

    for name in [name for name in models if name != "eager"]:
        try:
            share = judge([(steps[name](buffers[0]), truth)])["max_tolerance_share"]
        except Exception as reason:  # a compiler or somebody's solution: anything may come
            refuse(name, f"{type(reason).__name__}: {str(reason).strip().partition(chr(10))[0]}")
            continue
        if not share <= (limit := allowed(name, eager_share)):
            refuse(name, f"its error is {share:.3g} of the tolerance, at most {limit:.3g} is allowed")

    with FlopCounterMode(display=False) as counter:
        outputs = steps["eager"](buffers[0])
    least_bytes = sum(x.nbytes for x in [*buffers[0], *models["eager"].parameters(), *outputs])
    counts = {"flops": counter.get_total_flops(), "least_bytes": least_bytes}
    memory = {name: peak_extra_mib(models[name], step, buffers[0]) for name, step in steps.items()}

    clock = cuda_clock() if device == "cuda" else cpu_clock
    began = time.perf_counter()
    race(steps, buffers, refill, clock, BUFFERS)
    fitting = SECONDS["sweep" if setting["sweep"] else "main"] * BUFFERS / (time.perf_counter() - began) / SITTINGS
    rounds = round(min(max(fitting, ROUNDS[0]), ROUNDS[1]))
    seen = None
    for _ in range(SITTINGS):
        buffers.clear()
        if device == "cuda":
            torch.cuda.empty_cache()
        buffers += [refill(seed) for seed in range(BUFFERS)]
        race(steps, buffers, refill, clock, rounds // 2)  # warms up; no pause between it and the sitting
        seen = race(steps, buffers, refill, clock, rounds, seen)

    truths = [exact(inputs) for inputs in buffers]
    found = {name: judge([(seen.kept[name][i], truths[i]) for i in range(BUFFERS)]) for name in steps}
    lag = {name: outlasting(seen.ms[name], seen.wall[name]) for name in steps}
    rows = []
    for name in list(steps):
        row = make_row(setting, name, seen, counts, ceilings)
        row |= {**found[name], "peak_extra_mib": memory[name]}
        share, limit = row["max_tolerance_share"], allowed(name, found["eager"]["max_tolerance_share"])
        if not share <= limit:
            refuse(name, f"while timed, its error was {share:.3g} of the tolerance, at most {limit:.3g} is allowed")
        elif lag[name] - lag["eager"] > HIDDEN * (1 + row["ms_median"]):
            refuse(name, f"it outlasts its end event by {lag[name]:.3g} ms: work on another stream, or other programs")
        else:
            rows.append(row)
    return rows, refused


# ---------------------------------------------------------------------------------------------------------------------
# Several GPUs


def throughput(problem, paths, precision, dtype, batch, device, gpus):
    """Rows per second of eager and the solutions, with ``batch`` rows on each of 1, 2, 4, ... ``gpus`` GPUs.

    One process per GPU is started here. ``(rows, refused)``, two lists of dicts for the report.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (gpus, folder, problem.place, paths, precision, dtype, batch, device)
        torch.multiprocessing.spawn(throughput_process, arguments, nprocs=gpus)
        return json.loads((Path(folder) / "found.json").read_text())


def throughput_process(rank, gpus, folder, place, paths, precision, dtype, batch, device):
    """One of ``gpus`` processes; the first writes ``found.json`` into ``folder``."""
    if device == "cuda":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    else:
        torch.set_num_threads(1)
        device = torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=gpus)
    groups = {n: dist.new_group(range(n)) for n in sorted({2**k for k in range(gpus.bit_length())} | {gpus})}
    problem, solutions = Problem(place), {name: solution_class(path) for name, path in paths.items()}
    setting = {"problem": problem.name, "precision": precision, "dtype": dtype, "batch_per_gpu": batch}
    found = []
    for mode in MODES:
        with float32_precision(precision):
            found.append(measure_throughput(rank, groups, problem, solutions, {**setting, "mode": mode}, device))
    if rank == 0:
        rows, refused = ([entry for part in parts for entry in part] for parts in zip(*found, strict=True))
        (Path(folder) / "found.json").write_text(json.dumps([rows, refused]))
    dist.destroy_process_group()


def measure_throughput(rank, groups, problem, solutions, setting, device):
    """Race the contenders on the first ``n`` GPUs for each of ``groups``, ``{n: process group}``, all taking turns.

    Every GPU has its own rows. Inference gathers the outputs on all of them; in training DistributedDataParallel
    averages the gradients. A turn lasts from a barrier until the slowest process is done. ``(rows, refused)``.
    """
    batch, mode, dtype = setting["batch_per_gpu"], setting["mode"], getattr(torch, setting["dtype"])
    inputs = problem.inputs(batch, rank, device, dtype)
    models = problem.models(solutions, device, dtype)
    with torch.no_grad():
        upstream = torch.randn_like(models["eager"](*inputs))
    oracle = copy.deepcopy(models["eager"]).double()
    exact = make_step(oracle, mode, upstream.double())([x.double() if x.is_floating_point() else x for x in inputs])
    world = max(groups)
    if mode == "training":
        for gradient in exact:
            dist.all_reduce(gradient)
            gradient /= world

    def distributed_step(model, n):
        if mode == "training":
            ids = [device] if device.type == "cuda" else None
            parallel = DistributedDataParallel(copy.deepcopy(model), device_ids=ids, process_group=groups[n])
            return make_step(parallel, mode, upstream)
        step, everyones = make_step(model, mode, upstream), [torch.empty_like(upstream) for _ in range(n)]

        def gathered_step(inputs):
            outputs = step(inputs)
            dist.all_gather(everyones, outputs[0], group=groups[n])
            return outputs

        return gathered_step

    entries = [(name, n) for n in groups for name in models]
    steps = {(name, n): distributed_step(models[name], n) for name, n in entries if rank < n}
    rates, errors = {entry: [] for entry in entries}, {}
    for turn in range(-1, TURNS):  # the first warms up
        for name, n in entries:
            dist.barrier(device_ids=[rank] if device.type == "cuda" else None)
            if rank >= n:
                continue
            began = time.perf_counter()
            for _ in range(TURN):
                outputs = steps[name, n](inputs)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = torch.tensor(time.perf_counter() - began, device=device)
            dist.all_reduce(seconds, dist.ReduceOp.MAX, group=groups[n])
            if turn >= 0:
                rates[name, n].append(n * batch * TURN / seconds.item())
            if n == world and turn == TURNS - 1:
                found = error([(outputs, exact)], TOLERANCE[setting["dtype"]], mode == "training")
                worst = torch.tensor(list(found.values()), device=device).nan_to_num(nan=math.inf)
                dist.all_reduce(worst, dist.ReduceOp.MAX)
                errors[name] = dict(zip(found, worst.tolist(), strict=True))

    rows, refused = [], []
    limit = max(1.0, STRAY * errors["eager"]["max_tolerance_share"])  # every process is in the largest group
    for (name, n), seen in rates.items() if rank == 0 else []:
        share, rate = errors[name]["max_tolerance_share"], statistics.median(seen)
        if not share <= limit:
            reason = f"on {world} GPUs its error was {share:.3g} of the tolerance, at most {limit:.3g} is allowed"
            refused.append({**setting, "contender": name, "gpus": n, "reason": reason})
            continue
        p20, _, _, p80 = statistics.quantiles(seen, n=5)
        row = {**setting, "contender": name, "gpus": n, "rows_per_s": rate}
        row |= {"rows_per_s_p20": p20, "rows_per_s_p80": p80}
        row |= {"efficiency": rate / n / statistics.median(rates[name, 1])}
        row |= {"speedup_vs_eager": rate / statistics.median(rates["eager", n])}
        rows.append(row | (errors[name] if n == world else {}))
    return rows, refused


# ---------------------------------------------------------------------------------------------------------------------
# The cold build

EMPTY_BUILD = """
import time
import torch
began = time.perf_counter()
from torch.utils.cpp_extension import load_inline
source = "#include <torch/extension.h>\\nvoid empty() {}"
load_inline(name="empty", cpp_sources="void empty();", cuda_sources=source, functions=["empty"])
print(time.perf_counter() - began)
"""
SOLUTION_BUILD = """
import sys
import time
import torch
sys.path.insert(0, sys.argv[1])
import check
module = check.load_module(sys.argv[2])
began = time.perf_counter()
module.build()
print(time.perf_counter() - began)
"""


def measure_build(problem, path):
    """Seconds to build and load ``path``'s extension in an empty cache, against an empty extension, taking turns."""
    if not (torch.cuda.is_available() or os.environ.get("TORCH_CUDA_ARCH_LIST")):
        raise Unusable('--build needs a GPU or TORCH_CUDA_ARCH_LIST, has neither here; set it, to "9.0" for instance')
    import ninja  # not on PATH where the virtual environment is not activated

    import model_new

    try:
        nvcc = Path(model_new._find_nvcc())
    except RuntimeError as reason:
        raise Unusable(str(reason)) from None
    # PyTorch looks for a CUDA toolkit only, our solutions also for the pip packages: their compiler and their headers.
    folders = [Path(folder) for folder in model_new._pip_folders()]
    headers = [path for pattern in model_new._PIP_HEADERS for folder in folders for path in folder.glob(pattern)]
    headers = filter(None, [*map(str, headers), os.environ.get("CPLUS_INCLUDE_PATH")])
    toolkit = {"CUDA_HOME": str(nvcc.parent.parent), "CPLUS_INCLUDE_PATH": os.pathsep.join(headers)}
    builds = {"empty": ([EMPTY_BUILD], toolkit), path.stem: ([SOLUTION_BUILD, ROOT, path], {})}
    seconds = {name: [] for name in builds}
    for turn in range(BUILDS):
        for name, (arguments, needed) in builds.items():
            say(f"build {turn + 1} of {BUILDS}: {name}")
            with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as links:
                # PyTorch links with -lcudart, which a toolkit from PyPI cannot serve, and has it loaded already.
                (Path(links) / "libcudart.so").write_text("/* nothing to link */\n")
                places = {"TORCH_EXTENSIONS_DIR": cache, "PATH": f"{ninja.BIN_DIR}{os.pathsep}{os.environ['PATH']}"}
                places |= {"LIBRARY_PATH": f"{links}{os.pathsep}{os.environ.get('LIBRARY_PATH', '')}"}
                command = [sys.executable, "-c", *map(str, arguments)]
                done = subprocess.run(command, capture_output=True, text=True, env=os.environ | needed | places)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                raise Unusable(
                    f"the build of {name} must succeed and exited {done.returncode}; mend what it says above"
                )
            seconds[name].append(float(done.stdout.split()[-1]))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    share = median[path.stem] / median["empty"]
    place = {"problem": problem.name, "solution": path.stem, "cpus": os.cpu_count()}
    return {**place, "seconds": seconds, "share_of_empty": share}


def build_line(build):
    """One sentence about a cold build."""
    seconds = {name: statistics.median(values) for name, values in build["seconds"].items()}
    return (
        f"Cold build of {build['problem']}'s {build['solution']} on {build['cpus']} CPU cores: "
        f"{seconds[build['solution']]:.1f} s, {build['share_of_empty']:.2f} times the {seconds['empty']:.1f} s "
        "of an empty function with torch/extension.h."
    )


# ---------------------------------------------------------------------------------------------------------------------
# Output


def shown(value, form="{:.3g}"):
    """A number as text; "-" for one that was not measured."""
    return "-" if value is None else form.format(value)


COLUMNS = {
    "contender": lambda row: row["contender"],
    "ms": lambda row: shown(row["ms_median"], "{:.4g}"),
    "20 %": lambda row: shown(row["ms_p20"], "{:.4g}"),
    "80 %": lambda row: shown(row["ms_p80"], "{:.4g}"),
    "wall ms": lambda row: shown(row["ms_wall"], "{:.4g}"),
    "speed-up": lambda row: shown(row["speedup_vs_eager"], "{:.2f}"),
    "95 % interval": lambda row: f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}",
    "rms error": lambda row: shown(row["rms_error"], "{:.1e}"),
    "max error": lambda row: shown(row["max_error"], "{:.1e}"),
    "of tolerance": lambda row: shown(row["max_tolerance_share"]),
    "TFLOP/s": lambda row: shown(row["tflops"], "{:.4g}"),
    "of the ceiling": lambda row: shown(row["ceiling_share"], f"{{:.0%}} {row['gemm_kind']}"),
    "GB/s": lambda row: shown(row["gb_per_s"], "{:.0f}"),
    "of a copy": lambda row: shown(row["copy_share"], "{:.0%}"),
    "extra MiB": lambda row: shown(row["peak_extra_mib"], "{:.0f}"),
}
THROUGHPUT_COLUMNS = {
    "mode": lambda row: row["mode"],
    "precision": lambda row: row["precision"],
    "contender": lambda row: row["contender"],
    "GPUs": lambda row: str(row["gpus"]),
    "rows/s": lambda row: f"{row['rows_per_s']:,.0f}",
    "efficiency": lambda row: f"{row['efficiency']:.0%}",
    "speed-up": lambda row: shown(row["speedup_vs_eager"], "{:.2f}"),
    "rms error": lambda row: shown(row.get("rms_error"), "{:.1e}"),
    "of tolerance": lambda row: shown(row.get("max_tolerance_share")),
}


def print_table(columns, rows):
    """An aligned table for people: ``{title: row -> text}`` of ``rows``, without the columns that nothing is in."""
    columns = [[title, *map(form, rows)] for title, form in columns.items()]
    columns = [column for column in columns if set(column[1:]) != {shown(None)}]
    widths = [max(map(len, column)) for column in columns]
    for first, *others in zip(*columns, strict=True):
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))
    print(flush=True)


def markdown_table(columns, rows):
    """The same table for README.md, as lines."""
    cells = [list(columns), ["---"] * len(columns), *([form(row) for form in columns.values()] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in cells]


def print_race(setting, rows):
    """One race's table, under a line that names its setting."""
    state = ""
    if rows and "clock_mhz" in rows[0]:
        state = f", {rows[0]['clock_mhz']:.0f} MHz, {rows[0]['power_w']:.0f} W"
        state += f", held down by {' and '.join(rows[0]['throttled'])}" if rows[0]["throttled"] else ""
    sizes = ", ".join(f"{name} {size}" for name, size in {"batch": setting["batch"], **setting["sizes"]}.items())
    print(
        f"{setting['problem']}, {setting['mode']}, {sizes}, {setting['dtype']}, "
        f'float32 matmul precision "{setting["precision"]}" for all, {rows[0]["rounds"]} rounds{state}'
    )
    print_table(COLUMNS, rows)


def print_refused(refused):
    for refusal in refused:
        where = f'{refusal["problem"]}, {refusal["contender"]}, "{refusal["precision"]}"'
        print(f"not timed: {where}: {refusal['reason']}\n", flush=True)


def environment(device):
    """What the numbers were measured with."""
    cuda = device == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpus": torch.cuda.device_count(),
        "driver": nvml()[0].nvmlSystemGetDriverVersion() if cuda and nvml() else None,
        "pytorch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "l2_mib": torch.cuda.get_device_properties(0).L2_cache_size / 2**20 if cuda else None,
        "threads": torch.get_num_threads(),
    }


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def save(report, path):
    """Write the report whole or not at all; called after every race, so that an interrupted run keeps its rows."""
    if path:
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
        draft.replace(path)


def draw_bars(speed, errors, rows):
    """Speed-up by mode and precision, with its interval and the time in ms, and beside it the error."""
    settings = list(dict.fromkeys((row["mode"], row["precision"]) for row in rows))
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    width = 0.8 / len(contenders)
    for i, name in enumerate(contenders):
        own = [row for row in rows if row["contender"] == name]
        places = [settings.index((row["mode"], row["precision"])) + (i + 0.5) * width - 0.4 for row in own]
        ratios = [row["speedup_vs_eager"] for row in own]
        below = [max(0, row["speedup_vs_eager"] - row["speedup_low"]) for row in own]
        above = [max(0, row["speedup_high"] - row["speedup_vs_eager"]) for row in own]
        bars = speed.bar(places, ratios, width, yerr=[below, above], capsize=2, label=name)
        speed.bar_label(bars, [f" {row['ms_median']:.3g} ms" for row in own], rotation=90, fontsize=8, padding=2)
        errors.bar(places, [row["rms_error"] for row in own], width, label=name)
    for axis in (speed, errors):
        axis.set_xticks(range(len(settings)), [f'{mode}\n"{precision}"' for mode, precision in settings])
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    speed.set_title(f"{rows[0]['problem']}, batch {rows[0]['batch']}")
    speed.set_ylabel("speed-up over eager")
    speed.margins(y=0.25)
    errors.set_title("what it costs (training: relative error of the gradients)")
    errors.set_ylabel("rms error against float64")
    errors.set_yscale("log")
    errors.margins(y=0.2)
    errors.legend(fontsize=8)


def draw_batches(axis, rows):
    """Speed-up of the solutions' inference against batch size, with its interval."""
    for name, precision in dict.fromkeys((row["contender"], row["precision"]) for row in rows):
        own = [row for row in rows if (row["contender"], row["precision"]) == (name, precision)]
        own.sort(key=lambda row: row["batch"])
        batches = [row["batch"] for row in own]
        axis.plot(batches, [row["speedup_vs_eager"] for row in own], marker=".", label=f'{name}, "{precision}"')
        low, high = ([row[end] for row in own] for end in ("speedup_low", "speedup_high"))
        axis.fill_between(batches, low, high, alpha=0.25)
    axis.axhline(1, color="grey", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_title("inference, by batch size")
    axis.set_xlabel("batch size")
    axis.set_ylabel("speed-up over eager")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def draw(report, path):
    """A picture of the report's rows, one line of axes for each problem."""
    from matplotlib.figure import Figure

    problems = list(dict.fromkeys(row["problem"] for row in report["rows"]))
    figure = Figure(figsize=(16, 4.5 * len(problems) + 0.5), layout="constrained")
    for axes, problem in zip(figure.subplots(len(problems), 3, squeeze=False), problems, strict=True):
        own = [row for row in report["rows"] if row["problem"] == problem]
        draw_bars(axes[0], axes[1], [row for row in own if not row["sweep"]])
        draw_batches(axes[2], of_solutions(own))
    figure.suptitle(heading(report))
    figure.savefig(path, dpi=100)


def of_solutions(rows, mode="inference", sized=False):
    """What a sweep is about: the solutions' rows in this mode, at all batch sizes or, ``sized``, at other sizes."""
    telling = [row for row in rows if row["mode"] == mode and row["contender"] not in ("eager", "compile")]
    return [row for row in telling if bool(row.get("sizes")) == sized]


def heading(report):
    """One line: what a report was measured on, with what, when, and of which source."""
    env = report["environment"]
    where = f"{env['gpu']}, driver {env['driver'] or 'unknown'}" if env["gpu"] else f"CPU, {env['threads']} threads"
    versions = f"PyTorch {env['pytorch']}, CUDA {env['cuda']}"
    return f"{where}, {versions}, {env['date']}, model_new.py {report['source_sha256'][:12]}"


def ceilings_line(ceilings):
    """One sentence about what the shares in the tables are shares of."""
    if not ceilings:
        return "On a CPU no ceiling is measured."
    products = [f"{kind} {rate:.4g} TFLOP/s" for kind, rate in ceilings.items() if kind != "copy"]
    return (
        f"Ceilings in this run: a large product in {', in '.join(products)}, a large copy {ceilings['copy']:.4g} GB/s."
    )


BEGIN, END = "<!-- results -->\n", "<!-- /results -->\n"
SETTING_COLUMNS = {
    "problem": lambda row: row["problem"],
    "batch": lambda row: str(row["batch"]),
    "mode": lambda row: row["mode"],
    "precision": lambda row: row["precision"] if row["dtype"] == "float32" else row["dtype"],
}
LEGEND = (
    "Speed-up: over eager at the same precision in the same run, with its 95 % interval. Errors: against float64, "
    "with the largest share of the tolerance used; in training, of the gradients, each in units of its root mean "
    "square. Eager itself may stray by more than the tolerance, which shows as more than 1; a solution may then use "
    f"up to {STRAY} times as much. TFLOP/s: of the arithmetic as the reference writes it, as a share of a large "
    "product of the named kind: eager's own; for a solution float16, the fastest. Extra MiB: memory that a call takes "
    "at its peak."
)
TABLE_LEGEND = (
    "ms: the median of the rounds, beside it their 20 % and 80 % quantiles; wall ms: the same by the host's clock. "
    f"{LEGEND} GB/s: inputs, parameters and outputs, each once, as a share of a large copy."
)
README_TITLES = ["contender", "ms", "speed-up", "95 % interval", "rms error", "of tolerance"]
README_TITLES += ["TFLOP/s", "of the ceiling", "extra MiB"]


BATCH_SWEEP_TITLES = {title: itemgetter(title) for title in ("problem", "contender", "precision")}
SIZES_TITLES = {title: SETTING_COLUMNS[title] for title in ("problem", "batch")}
SIZES_TITLES |= {"sizes": lambda row: " -> ".join(map(str, row["sizes"].values()))}


def contender_of(row):
    return f'{row["contender"]}, "{row["precision"]}"'


def is_telling(row):
    """Whether README.md shows the row: inference, the first problem's training, its inference by torch.compile."""
    first, training = row["problem"] == "gemm_sigmoid_logsumexp", row["mode"] == "training"
    if row["contender"] == "compile":
        return first and not training
    return first or not training


def speedup_lines(rows, titles, column_of):
    """Speed-up over eager as markdown: a line for each set of what ``titles``, title -> row -> text, give of the rows.

    A column for each ``column_of(row)``.
    """
    lines = {}  # the texts of a line -> {column: speed-up}
    for row in rows:
        lines.setdefault(tuple(text(row) for text in titles.values()), {})[column_of(row)] = row["speedup_vs_eager"]
    columns = {title: lambda line, i=i: line[0][i] for i, title in enumerate(titles)}
    for column in dict.fromkeys(map(column_of, rows)):
        columns[column] = lambda line, column=column: shown(line[1].get(column), "{:.2f}")
    return markdown_table(columns, lines.items())


def readme_block(folder):
    """The text between README.md's markers, from the reports in ``folder``; empty while there are none."""
    lines = []
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        report = json.loads(path.read_text())
        if "source_sha256" not in report:  # another program's
            continue
        lines += [f"**{heading(report)}** (all of it: [{path.name}](results/{path.name}))", ""]
        main = [row for row in report["rows"] if not row["sweep"]]
        if main:
            lines += [LEGEND, ceilings_line(report["ceilings"]), ""]
            columns = SETTING_COLUMNS | {title: COLUMNS[title] for title in README_TITLES}
            lines += [*markdown_table(columns, filter(is_telling, main)), ""]
        if len(main) < len(report["rows"]):
            lines += ["Speed-up over eager, inference, by batch size:", ""]
            swept = sorted(of_solutions(report["rows"]), key=lambda row: row["batch"])
            lines += [*speedup_lines(swept, BATCH_SWEEP_TITLES, SETTING_COLUMNS["batch"]), ""]
        for mode in MODES:
            if sized := of_solutions(report["rows"], mode, sized=True):
                lines += [f"Speed-up over eager, {mode}, at other sizes:", ""]
                lines += [*speedup_lines(sized, SIZES_TITLES, contender_of), ""]
        if report["throughput"]:
            lines += [*markdown_table(THROUGHPUT_COLUMNS, report["throughput"]), ""]
        for build in report["builds"]:
            lines += [build_line(build), ""]
        if path.with_suffix(".png").exists():
            lines += [f"![{path.stem}](results/{path.stem}.png)", ""]
    return "\n".join(lines)


def rewrite_readme():
    """Draw the pictures of ``results/*.json`` again and put their table between README.md's markers."""
    folder, readme = ROOT / "results", ROOT / "README.md"
    drawable = importlib.util.find_spec("matplotlib")
    if not drawable:
        say("the pictures were left as they are, because matplotlib is not installed")
    for path in folder.glob("*.json") if drawable else []:
        report = json.loads(path.read_text())
        if report.get("rows") and "source_sha256" in report:
            draw(report, path.with_suffix(".png"))
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise Unusable(f"README.md must hold the lines {BEGIN.strip()} and {END.strip()}, and does not; put them in")
    readme.write_text(before + begin + readme_block(folder) + end + after)


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def positive(text):
    """A whole number of 1 and more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 and more, got {text}")
    return int(text)


def sweep_sizes(text):
    """``batch=1,16`` as ``[{"batch": 1}, {"batch": 16}]``; ``batch:input_size=1:33,16:65`` names two sizes of each."""
    names, equals, values = text.partition("=")
    names, values = names.split(":"), [value.split(":") for value in values.split(",")]
    if not equals or any(len(value) != len(names) for value in values):
        raise argparse.ArgumentTypeError(f"must be like batch=1,16 or batch:input_size=1:33,16:65, got {text}")
    return [dict(zip(names, map(positive, value), strict=True)) for value in values]


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "problem_dir", nargs="?", type=Path, default=ROOT, help="holds reference.py and model_new.py (default: here)"
    )
    where.add_argument("--reference", type=Path, metavar="FILE", help="the problem, where that is a single file")
    add(
        "--solution",
        nargs="+",
        type=Path,
        metavar="FILE",
        action="extend",
        help="what to time instead of the model_new.py in PROBLEM_DIR or beside --reference",
    )
    add("--same-seed", action="store_true", help="build all from one seed, copy no state_dict (inference only)")
    add("--oracle", choices=["float64"], help="check.py judges by the reference in float64, not in float32")
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    add("--batch-size", type=positive, metavar="N", help=f"default: the problem's own; on the CPU {CPU_BATCH}")
    add("--precision", choices=["highest", "high"], help="float32 matmul precision (default: both; on the CPU highest)")
    add("--dtype", choices=list(TOLERANCE), default="float32", help="of parameters and inputs (check.py uses float32)")
    add("--training", action="store_true", help="time forward and backward as well")
    add(
        "--sweep",
        type=sweep_sizes,
        metavar="batch=1,16,...",
        help="time these batch sizes as well, or other sizes that reference.py names, as in "
        "batch:input_size:hidden_size=1:33:65,16:33:65",
    )
    add("--all", action="store_true", help="both problems with all their solutions, training and a sweep")
    add(
        "--gpus", type=positive, metavar="N", help="measure throughput on up to N GPUs (with --device cpu: N processes)"
    )
    add("--build", action="store_true", help="measure the cold build of the extension")
    add("--readme", action="store_true", help="rewrite README.md's table and the pictures from results/*.json")
    add("--json", type=Path, metavar="FILE", help="write the results there, after every race")
    add("--plot", type=Path, metavar="FILE.png", help="draw the results there (needs matplotlib)")
    args = parser.parse_args(arguments)
    if args.same_seed and (args.training or args.all or args.gpus):
        parser.error("--same-seed goes with inference only: gradients of another layout cannot be compared")
    return args


def planned(args):
    """``[(problem, {path of a solution: oracle that check.py judges it by, or None}), ...]``."""
    if args.all:
        return [
            (Problem(ROOT), {ROOT / "model_new.py": None}),
            # The collapsed form is more exact than the float32 reference, so that cannot be its judge.
            (Problem(SECOND), {SECOND / "model_new.py": None, SECOND / "model_collapsed.py": "float64"}),
        ]
    if args.reference and not args.reference.is_file():
        raise Unusable(f"--reference must name a file, {args.reference} is none")
    problem = Problem(args.reference or args.problem_dir, args.same_seed)
    if args.reference and not args.solution and not (problem.folder / "model_new.py").is_file():
        raise Unusable(f"the solution is missing: no model_new.py lies beside {args.reference}; add --solution FILE")
    return [(problem, dict.fromkeys(args.solution or [problem.folder / "model_new.py"], args.oracle))]


def default_batch(problem, device):
    return problem.batch_size if device == "cuda" else min(problem.batch_size, CPU_BATCH)


def accepted_solutions(plan, precisions, device, batch, report):
    """``{(problem's name, precision): {contender: path}}`` of what check.py accepts; the rest goes into the report."""
    tasks = [
        (problem, path, oracle, device, batch or default_batch(problem, device), precision)
        for problem, paths in plan
        for path, oracle in paths.items()
        for precision in precisions
    ]
    say("check.py looks at the solutions")
    with ThreadPoolExecutor(3) as pool:  # three at a time: a good part of a check is Python starting and compiling
        reasons = list(pool.map(verify, *zip(*tasks, strict=True)))
    accepted = {(problem.name, precision): {} for problem, _ in plan for precision in precisions}
    for (problem, path, *_, precision), reason in zip(tasks, reasons, strict=True):
        if reason is None:
            accepted[problem.name, precision][path.stem] = path
        else:
            refusal = {"problem": problem.name, "precision": precision, "contender": path.stem, "reason": reason}
            report["refused"].append(refusal)
    print_refused(report["refused"])
    return accepted


def planned_races(args, plan, precisions, device):
    """``[(problem, setting), ...]``: each problem's own batch size first, then the sweeps."""
    own, swept = [], []
    modes = MODES if args.training or args.all else MODES[:1]
    for problem, _ in plan:
        batch = args.batch_size or default_batch(problem, device)
        sweeps = dict.fromkeys(modes, args.sweep or [])
        if args.all:
            batches = [{"batch": size} for size in SWEEP if size <= 4 * problem.batch_size]
            first = problem.folder == ROOT
            sweeps["inference"] = batches + (sweep_sizes(AWKWARD) if first else [])
            sweeps["training"] = sweep_sizes(TRAINED) if first else []
        others = [(mode, sizes) for mode, sweep in sweeps.items() for sizes in sweep if sizes != {"batch": batch}]
        for name in {name for _, sizes in others for name in sizes} - {"batch"}:
            if not isinstance(getattr(problem.reference, name, None), int):
                raise Unusable(
                    f"--sweep must name batch or a number in {problem.name}'s reference.py, and {name} is none"
                )
        for precision in precisions:
            setting = {"problem": problem.name, "precision": precision, "dtype": args.dtype, "sizes": {}}
            own += [(problem, {**setting, "batch": batch, "mode": mode, "sweep": False}) for mode in modes]
            for mode, sizes in others:
                named = {name: size for name, size in sizes.items() if name != "batch"}
                at = {"batch": sizes.get("batch", batch), "sizes": named}
                swept.append((problem, {**setting, **at, "mode": mode, "sweep": True}))
    return own + swept


def run(args):
    """Everything but the command line: measures, prints, writes; the exit code."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and torch.cuda.device_count() < (args.gpus or 1):
        seen = torch.cuda.device_count()
        raise Unusable(f"{args.gpus or 1} NVIDIA GPU(s) are needed, PyTorch sees {seen}; use --device cpu")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise Unusable("--plot needs matplotlib, which is not installed; type: pip install matplotlib")
    if args.readme:
        rewrite_readme()
        return 0
    for path in filter(None, (args.json, args.plot)):
        if path.is_dir():
            raise Unusable(f"{path} is a folder; name a file to write to")
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.plot and args.plot.suffix != ".png":
        raise Unusable(f"--plot writes a .png, {args.plot} is none; name another")
    plan = planned(args)
    paths = [path for _, solutions in plan for path in solutions]
    for path in paths:
        if not path.is_file():
            raise Unusable(f"the solution must be a file, {path} is none; name one with --solution FILE")
    for _, solutions in plan:
        names = ["eager", "compile", *(path.stem for path in solutions)]
        if len(set(names)) < len(names):
            raise Unusable(f"contenders are named by their files and must differ, got {names}; rename a file")
    for problem, _ in plan if args.training else []:
        if not any(p.requires_grad for p in problem.models({}, device, torch.float32)["eager"].parameters()):
            raise Unusable(f"--training needs parameters, and {problem.name}'s Model has none to train; leave it out")
    report = {
        "environment": environment(device),
        "source_sha256": digest(ROOT / "model_new.py"),
        "sources": {str(p.relative_to(ROOT) if p.is_relative_to(ROOT) else p.name): digest(p) for p in paths},
        "ceilings": {},
        "rows": [],
        "refused": [],
        "throughput": [],
        "builds": [],
    }
    if args.build:
        for problem, path in ((problem, path) for problem, solutions in plan for path in solutions):
            report["builds"].append(measure_build(problem, path))
            print(build_line(report["builds"][-1]), flush=True)
            save(report, args.json)
        return 0

    if args.precision:
        precisions = [args.precision]
    else:
        precisions = ["highest", "high"] if device == "cuda" and args.dtype == "float32" else ["highest"]
    if device == "cpu":
        print(
            "On the CPU: wall time, at a small batch size; the float32 precision switch means little here, and where "
            "others use the machine too, the intervals do not hold from one run to the next.\n"
        )
    accepted = accepted_solutions(plan, precisions, device, args.batch_size, report)
    if args.gpus:
        for problem, _ in plan:
            batch = args.batch_size or default_batch(problem, device)
            for precision in precisions:
                say(f'{problem.name}, "{precision}", batch {batch} on each of up to {args.gpus}')
                solutions = accepted[problem.name, precision]
                rows, refused = throughput(problem, solutions, precision, args.dtype, batch, device, args.gpus)
                report["throughput"] += rows
                report["refused"] += refused
                print_table(THROUGHPUT_COLUMNS, rows)
                print_refused(refused)
                save(report, args.json)
    else:
        if device == "cuda":
            kinds = {gemm_kind(name, p, args.dtype) for name in ("eager", "solution") for p in precisions}
            report["ceilings"] = measure_ceilings(kinds)
        for problem, setting in planned_races(args, plan, precisions, device):
            paths = accepted[problem.name, setting["precision"]]
            if not paths:
                continue
            say(", ".join(f"{key} {value}" for key, value in setting.items()))
            solutions = {name: solution_class(path) for name, path in paths.items()}
            with float32_precision(setting["precision"]), check.constants(problem.reference, setting["sizes"]):
                rows, refused = measure(problem, solutions, setting, device, report["ceilings"])
            first = not report["rows"]
            if first:
                print(f"{ceilings_line(report['ceilings'])}\n")
            print_race(setting, rows)
            if first:
                print(f"{TABLE_LEGEND}\n")
            print_refused(refused)
            report["rows"] += rows
            report["refused"] += refused
            save(report, args.json)
    save(report, args.json)
    if args.plot and report["rows"]:
        draw(report, args.plot)
    return 1 if any(refusal["contender"] != "compile" for refusal in report["refused"]) else 0


def main(arguments=None):
    args = parse(arguments)
    try:
        return run(args)
    except Unusable as reason:
        print(f"bench.py: {reason}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
