"""ModelNew in DDP and FSDP2, two processes over gloo on the CPU or NCCL on two GPUs; and two GPUs in one process."""

import copy
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import check_close_to_largest, check_match, make_input, make_pair
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

SIZES = {"plain": (12, 33, 65, 17), "split": (4096, 1000, 1025, 1023)}  # batch of both ranks, input, hidden, output
BACKENDS = [
    pytest.param(("gloo", "plain", "highest"), id="gloo"),
    *(
        pytest.param(("nccl", form, mode), id=f"nccl-{form}-{mode}", marks=pytest.mark.multigpu)
        for form, mode in itertools.product(SIZES, ("highest", "high"))
    ),
]


KINDS = "DDP", "FSDP2", "FSDP2 of each linear", "FSDP2 in bfloat16"


def train(module, parts):
    """One step of SGD for each x, on the mean over its rows."""
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    for x in parts:
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()


def wrap(kind, module, mesh):
    if kind == "DDP":
        return nn.parallel.DistributedDataParallel(module)
    if kind == "FSDP2 of each linear":
        fully_shard(module.linear1, mesh=mesh), fully_shard(module.linear2, mesh=mesh)
    policy = MixedPrecisionPolicy(torch.bfloat16) if kind == "FSDP2 in bfloat16" else MixedPrecisionPolicy()
    return fully_shard(module, mesh=mesh, mp_policy=policy)


def rank_of_two(rank, backend, form, mode, folder):
    """One of two processes: trains on its half of each batch, wrapped in each way; rank 0 writes what came of it."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(mode)
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh(device.split(":")[0], (2,))
    batch, *sizes = SIZES[form]
    whole = lambda t: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().cpu()
    found = {}
    for kind in KINDS:
        _, module = make_pair(*sizes, device=device)
        wrapped = wrap(kind, module, mesh)
        train(wrapped, [make_input(batch, sizes[0], seed=s).chunk(2)[rank].to(device) for s in range(3)])
        found[kind] = {name: (whole(p), whole(p.grad)) for name, p in module.named_parameters()}
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # on the usual way out a thread of gloo's, still there, has been seen to abort the process


@pytest.fixture(scope="module", params=BACKENDS)
def trained(request, tmp_path_factory):
    """By name: parameters after three steps in one process, with their gradients; and the same by kind, in two."""
    backend, form, mode = request.param
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(rank_of_two, (backend, form, mode, str(folder)), 2)
    batch, *sizes = SIZES[form]
    device = "cuda:0" if backend == "nccl" else "cpu"
    alone, _ = make_pair(*sizes, device=device)
    train(alone, [make_input(batch, sizes[0], seed=s).to(device) for s in range(3)])
    expected = {name: (p.detach().cpu(), p.grad.cpu()) for name, p in alone.named_parameters()}
    return expected, torch.load(folder / "found.pt"), 1e-4 if mode == "highest" else 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one(trained, kind):
    """On different data each: the gradients are the mean's, and three steps give the weights that one process gets."""
    expected, found, tolerance = trained
    if "bfloat16" in kind:
        tolerance = 3e-2
    for name, (parameter, gradient) in expected.items():
        check_match(found[kind][name][0], parameter, tolerance)
        check_close_to_largest(found[kind][name][1], gradient, tolerance)


# ---- Two GPUs of one process -----------------------------------------------------------------------------------------

either_form = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def memory_taken(index):
    free, total = torch.cuda.mem_get_info(index)
    return total - free


@pytest.mark.multigpu
@either_form
def test_current_device_is_another(sizes):
    """Module and input on cuda:1, cuda:0 current, forward and backward; then moved to cuda:0, and back."""
    batch, *rest = sizes
    reference, new = make_pair(*rest, device="cuda:1")
    x = make_input(batch, rest[0], "cuda:1")
    reference(x).sum().backward()
    torch.cuda.synchronize(0)
    before = torch.cuda.memory_allocated(0), memory_taken(0)
    check_match(new(x), reference(x))
    new(x).sum().backward()
    torch.cuda.synchronize(1)
    assert (torch.cuda.memory_allocated(0), memory_taken(0)) == before
    assert torch.cuda.current_device() == 0
    for device in "cuda:0", "cuda:1":
        new.to(device), reference.to(device)
        new.zero_grad(), reference.zero_grad()
        moved = x.to(device)
        check_match(new(moved), reference(moved))
        new(moved).sum().backward(), reference(moved).sum().backward()
        for ours, theirs in zip(new.parameters(), reference.parameters(), strict=True):
            check_close_to_largest(ours.grad, theirs.grad)
    assert torch.cuda.current_device() == 0


@pytest.mark.multigpu
def test_x_on_another_gpu_than_the_parameters():
    _, new = make_pair(33, 65, 17, device="cuda:1")
    with pytest.raises(RuntimeError, match=r"x must be on cuda:1.*on cuda:0"):
        new(make_input(5, 33, "cuda:0"))
    new.linear2.to("cuda:0")
    with pytest.raises(RuntimeError, match="device"):
        new(make_input(5, 33, "cuda:1"))
    torch.cuda.synchronize(0), torch.cuda.synchronize(1)


@pytest.mark.multigpu
@either_form
def test_two_gpus_by_turns_and_by_threads(sizes):
    batch, *rest = sizes
    reference, new = make_pair(*rest)
    x = make_input(batch, rest[0])
    modules = [(copy.deepcopy(new).to(device), x.to(device)) for device in ("cuda:0", "cuda:1")]
    expected = copy.deepcopy(reference).to("cuda:0")(x.to("cuda:0")).detach().cpu()
    for _ in range(10):
        for module, own in modules:
            check_match(module(own).detach().cpu(), expected)
    together = threading.Barrier(2)

    def work(pair):
        together.wait()
        module, own = pair
        return [module(own).detach() for _ in range(50)]

    with ThreadPoolExecutor(2) as pool:
        for outs in pool.map(work, modules):
            for out in outs:
                check_match(out.cpu(), expected)
