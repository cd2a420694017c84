"""The build block that the solutions share: compiling, caching, loading and what is said when that fails.

Most tests put the block under a toy source and a stub ``nvcc``, a script that notes each call and lets g++ compile. A
library of the toy answers a number, by which a test tells whose library was loaded.
"""

import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from torch.utils import cpp_extension

SOLUTIONS = ["model_new.py", "gemm_divide_sum_scaling/model_new.py", "gemm_divide_sum_scaling/model_collapsed.py"]
BLOCK = re.compile(r"^# --- build block.*?^# --- end of the build block ---$", re.MULTILINE | re.DOTALL)
IMPORTS = """
import contextlib, functools, glob, hashlib, importlib.util, itertools, os, platform, re, shutil, stat, subprocess
import sys, tempfile, time
import torch
"""
numbers = itertools.count(os.getpid() * 1000)  # no two libraries of one process may answer the same


def block():
    return BLOCK.search((ROOT / SOLUTIONS[1]).read_text())[0]


def toy(number, cpp="", cuda="", kernel="__global__ void kernel() {}"):
    """The text of a solution whose library answers ``number``. The stub compiles it with ``kernel=""``."""
    return (
        f"{IMPORTS}\nEXTENSION = 'toy'\n"
        f"CPP_SOURCE = r'''{cpp}\nextern \"C\" int answer() {{ return {number}; }}'''\n"
        f"CUDA_SOURCE = r'''{cuda}\n{kernel}'''\nCXX_FLAGS = ['-O1']\nNVCC_FLAGS = ['-O1']\n{block()}\n"
    )


OPERATOR = """
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>
void launch(const float* x, float* out, int64_t count, cudaStream_t stream);
at::Tensor on_gpu(const at::Tensor& x) {
  c10::cuda::CUDAGuard guard(x.device());
  at::Tensor out = at::empty_like(x);
  launch(x.const_data_ptr<float>(), out.mutable_data_ptr<float>(), x.numel(), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}
at::Tensor on_cpu(const at::Tensor& x) { return at::empty_like(x).copy_(x).mul_(FACTOR); }
at::Tensor shape(const at::Tensor& x) { return at::empty_like(x); }
TORCH_LIBRARY_FRAGMENT(EXTENSION_NAMESPACE, m) { m.def("scale(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(EXTENSION_NAMESPACE, CUDA, m) { m.impl("scale", on_gpu); }
TORCH_LIBRARY_IMPL(EXTENSION_NAMESPACE, CPU, m) { m.impl("scale", on_cpu); }
TORCH_LIBRARY_IMPL(EXTENSION_NAMESPACE, Meta, m) { m.impl("scale", shape); }
"""
KERNEL = """
#include <cstdint>
__global__ void kernel(const float* x, float* out, int64_t count) {
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) out[i] = FACTOR * x[i];
}
void launch(const float* x, float* out, int64_t count, cudaStream_t stream) {
  kernel<<<1, 256, 0, stream>>>(x, out, count);
}
"""


def scaling_toy(number):
    """The text of a solution with an operator, ``scale``, that multiplies by ``number``; for the real compiler."""
    cpp, kernel = (text.replace("FACTOR", f"{number}.0f") for text in (OPERATOR, KERNEL))
    return toy(number, cpp, kernel=kernel)


class Workshop:
    """A folder with a stub compiler and a cache, both chosen by the environment, and solutions executed as text."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.cache, self.log = folder, folder / "not yet" / "cache", folder / "calls"
        self.number = next(numbers)
        self.environment = {
            "TORCH_EXTENSIONS_DIR": str(self.cache),
            "TORCH_CUDA_ARCH_LIST": "9.0",
            "CUDA_HOME": str(folder / "cuda"),
        }
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        for name in ("CC", "CXX", "CUDA_PATH", "PYTORCH_NVCC"):
            monkeypatch.delenv(name, raising=False)
        self.log.touch()
        self.stub_nvcc()

    def stub_nvcc(self, release=torch.version.cuda or "13.0", instead="", home="cuda"):
        """Writes the compiler; ``instead`` are lines of shell that it runs before it compiles, or does not."""
        nvcc = self.folder / home / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True, exist_ok=True)
        script = f"""\
            #!/bin/sh
            case "$*" in
              *--version*) echo "Cuda compilation tools, release {release}, V{release}.1"; exit 0;;
              *--dryrun*) exit 0;;
            esac
            echo "{nvcc}" >> "{self.log}"
            {instead}
            while [ $# -gt 0 ]; do
              case "$1" in -c) source="$2";; -o) object="$2";; esac
              shift
            done
            exec g++ -x c++ -fPIC -c "$source" -o "$object"
            """
        nvcc.write_text(textwrap.dedent(script))
        nvcc.chmod(0o755)
        return nvcc

    def compiled(self):
        """How often the stub compiled."""
        return len(self.log.read_text().splitlines())

    def run(self, text=None):
        """The solution's namespace, as KernelBench makes it: no ``__file__``."""
        namespace = {}
        exec(compile(text or self.text(), "<string>", "exec"), namespace)
        return SimpleNamespace(**namespace, globals=namespace)

    def text(self, number=None, **sources):
        return toy(self.number if number is None else number, kernel="", **sources)

    def answer(self, name):
        return ctypes.CDLL(str(self.library(name))).answer()

    def library(self, name):
        return self.cache / name / f"{name}.so"

    def start(self, text, **environment):
        """A process of its own that builds ``text`` and prints the number."""
        file = self.folder / f"solution_{next(numbers)}.py"
        program = (
            "import sys, ctypes, os\nn = {}\nexec(open(sys.argv[1]).read(), n)\nname = n['build']()\n"
            "print(ctypes.CDLL(f\"{os.environ['TORCH_EXTENSIONS_DIR']}/{name}/{name}.so\").answer())"
        )
        file.write_text(text)
        return subprocess.Popen(
            [sys.executable, "-c", program, str(file)],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


@pytest.fixture
def shop(tmp_path, monkeypatch):
    return Workshop(tmp_path, monkeypatch)


def first_line(error):
    return str(error.value).splitlines()[0]


def test_block_is_the_same_in_all_solutions():
    blocks = [BLOCK.search((ROOT / solution).read_text())[0] for solution in SOLUTIONS]
    assert len(set(blocks)) == 1


# ---- Building, once -----------------------------------------------------------------------------------------------


def test_nothing_is_compiled_on_import(shop, capfd):
    shop.run()
    assert shop.compiled() == 0 and not shop.cache.exists() and capfd.readouterr() == ("", "")


def test_first_build_says_so_once(shop, capfd):
    solution = shop.run()
    name = solution.build()
    told = capfd.readouterr()
    assert shop.answer(name) == shop.number
    assert told.out == "" and told.err.count("\n") == 1 and f"{shop.cache}/{name}" in told.err
    assert solution.build() == name
    assert shop.compiled() == 1 and capfd.readouterr() == ("", "")
    assert [path.name for path in shop.library(name).parent.iterdir()] == [f"{name}.so"]


def test_text_run_again_builds_nothing_even_without_the_cache(shop):
    name = shop.run().build()
    shutil.rmtree(shop.cache)
    assert shop.run().build() == name
    assert shop.run(f"print\n# moved down\n{shop.text()}").build() == name
    assert shop.compiled() == 1


def test_a_library_that_is_there_is_loaded_by_another_process(shop):
    shop.run().build()
    out, err = shop.start(shop.text(), CUDA_HOME="/nonexistent").communicate(timeout=60)
    assert out == f"{shop.number}\n", err
    assert shop.compiled() == 1


def test_changed_source_or_flags_or_pytorch_or_architectures_get_their_own_library(shop, monkeypatch):
    names = [shop.run().build()]
    other = next(numbers)
    names.append(shop.run(shop.text(other)).build())
    names.append(shop.run(shop.text(cuda="// a comment")).build())
    names.append(shop.run(shop.text().replace("['-O1']", "['-O2']")).build())
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    names.append(shop.run().build())
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    names.append(shop.run().build())
    assert len(set(names)) == len(names) == shop.compiled()
    assert [shop.answer(name) for name in names] == [shop.number, other] + [shop.number] * 4


def test_pytorch_is_left_as_it_was(shop, monkeypatch):
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    before = dict(os.environ), cpp_extension.TORCH_LIB_PATH, os.getcwd()
    shop.run().build()
    shop.stub_nvcc(instead="exit 1")
    with pytest.raises(RuntimeError):
        shop.run(shop.text(next(numbers))).build()
    assert cpp_extension.CUDA_HOME is None and (dict(os.environ), cpp_extension.TORCH_LIB_PATH, os.getcwd()) == before


# ---- Several at once, and what was killed ----------------------------------------------------------------------------


def test_what_a_killed_build_left_is_neither_loaded_nor_waited_for(shop):
    name = shop.run().build()
    number = next(numbers)
    left = shop.run(shop.text(number))
    other = left.build()
    torch.ops.loaded_libraries = {path for path in torch.ops.loaded_libraries if other not in path}
    folder = shop.library(other).parent
    shop.library(other).unlink()
    (folder / "build-killed").mkdir()
    for leftover in ("lock", "build-killed/lock", f"build-killed/{other}.so", "build-killed/build.ninja"):
        (folder / leftover).write_text("half a li")
    assert left.build() == other and shop.answer(other) == number
    assert not (folder / "build-killed").exists() and shop.answer(name) == shop.number


def test_build_goes_on_after_the_one_before_was_killed(shop):
    shop.stub_nvcc(instead=f'[ -e "{shop.folder}/go" ] || sleep 60')
    process = shop.start(shop.text())
    try:
        while not shop.compiled():
            assert process.poll() is None
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)  # the compiler lives on
        process.wait()
        (shop.folder / "go").touch()
        start = time.monotonic()
        assert shop.answer(shop.run().build()) == shop.number
        assert time.monotonic() - start < 20
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_waiting_names_the_lock(shop, capfd):
    solution = shop.run()
    solution.globals["time"] = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 20))
    shop.cache.mkdir(parents=True)
    with open(shop.cache / "build.flock", "a") as holder, contextlib.ExitStack() as ended:
        fcntl.flock(holder, fcntl.LOCK_EX)
        builder = threading.Thread(target=solution.build)
        builder.start()
        ended.callback(builder.join)
        time.sleep(0.6)
        assert builder.is_alive() and shop.compiled() == 0
        fcntl.flock(holder, fcntl.LOCK_UN)
    assert shop.compiled() == 1
    assert [line for line in capfd.readouterr().err.splitlines() if f"{shop.cache}/build.flock" in line]


def test_eight_processes_with_two_sources_compile_twice(shop):
    sources = {number: shop.text(number) for number in (next(numbers), next(numbers))}
    processes = [(number, shop.start(text)) for number, text in sources.items() for _ in range(4)]
    for number, process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert int(out) == number
    assert shop.compiled() == 2


def test_four_threads_with_two_sources_compile_twice(shop, monkeypatch):
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    sources = [shop.number, next(numbers)] * 2
    built, barrier = {}, threading.Barrier(4)

    def build(place, number):
        solution = shop.run(shop.text(number))
        barrier.wait()
        built[place] = solution.build()

    threads = [threading.Thread(target=build, args=argument) for argument in enumerate(sources)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [shop.answer(built[place]) for place in range(4)] == sources
    assert shop.compiled() == 2 and cpp_extension.CUDA_HOME is None


# ---- Compilers, missing and failing --------------------------------------------------------------------------------


def test_compiler_that_fails_is_quoted_and_forgiven(shop):
    complaint = "#error -- unsupported GNU version! gcc versions later than 15 are not supported!"
    shop.stub_nvcc(instead=f"echo 'In file included from here:'; echo '{complaint}'; exit 1")
    solution = shop.run()
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            solution.build()
        assert complaint.rstrip("!") in first_line(error) and "CUDA_HOME" in first_line(error)
        assert len(str(error.value).splitlines()) < 25 and error.value.__suppress_context__
    shop.stub_nvcc()
    assert shop.answer(solution.build()) == shop.number


def test_compiler_that_cannot_even_say_its_version_is_quoted(shop):
    nvcc = shop.stub_nvcc()
    nvcc.write_text("#!/bin/sh\necho unsupported GNU version\nexit 1\n")
    processes = [shop.start(shop.text()) for _ in range(2)]
    for process in processes:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert (
            "RuntimeError: " in err and "unsupported GNU version" in err.partition("RuntimeError: ")[2].split("\n")[0]
        )
    shop.stub_nvcc()
    assert shop.answer(shop.run().build()) == shop.number


def hide_usual_toolkit(monkeypatch):
    """Lets /usr/local/cuda look as if it held no compiler, whatever this machine has there."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda name, mode: name != "/usr/local/cuda/bin/nvcc" and access(name, mode))


def test_compilers_are_searched_for_in_the_order_written_down(shop, monkeypatch):
    path, toolkit = shop.stub_nvcc(home="path"), shop.stub_nvcc(home="cuda")
    pip = shop.stub_nvcc(home="site/nvidia/cu13")
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    solution = shop.run()
    assert solution._find_nvcc() == str(toolkit)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("CUDA_PATH", str(toolkit.parent.parent))
    assert solution._find_nvcc() == str(toolkit)
    monkeypatch.delenv("CUDA_PATH")
    assert solution._find_nvcc() == str(path)
    path.unlink()
    solution.globals["_pip_folders"] = lambda: [str(pip.parent.parent.parent)]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    hide_usual_toolkit(monkeypatch)
    assert solution._find_nvcc() == str(pip)
    pip.unlink()
    with pytest.raises(RuntimeError, match=r"nvcc, and there is none on PATH.*CUDA_HOME.*pip install \"cuda-toolkit\["):
        solution._find_nvcc()


def test_cuda_home_without_a_compiler_is_an_error(shop, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    with pytest.raises(RuntimeError, match="nvcc, and there is none at /nonexistent/bin/nvcc"):
        shop.run().build()


def test_another_major_version_is_refused_before_compiling_and_another_minor_taken(shop):
    major = int(torch.version.cuda.split(".")[0])
    shop.stub_nvcc(release=f"{major - 1}.4")
    with pytest.raises(RuntimeError) as error:
        shop.run().build()
    assert f"release {major - 1}.4" in first_line(error) and f"CUDA {torch.version.cuda}" in first_line(error)
    assert shop.compiled() == 0
    shop.stub_nvcc(release=f"{major}.99")
    assert shop.answer(shop.run().build()) == shop.number


def test_another_major_version_on_path_is_passed_over(shop, monkeypatch):
    major = int(torch.version.cuda.split(".")[0])
    path, pip = shop.stub_nvcc(release=f"{major - 1}.4", home="path"), shop.stub_nvcc(home="site/nvidia/cu13")
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    hide_usual_toolkit(monkeypatch)
    solution = shop.run()
    solution.globals["_pip_folders"] = lambda: [str(pip.parent.parent.parent)]
    assert solution._find_nvcc() == str(pip)
    pip.unlink()
    with pytest.raises(RuntimeError, match=rf"{path} is release {major - 1}\.4, but .*CUDA_HOME.*pip install"):
        solution._find_nvcc()


def test_no_host_compiler_is_an_error(shop, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"no-such-compiler is not on PATH: apt-get install g\+\+"):
        shop.run().build()


def only_on_path(shop, monkeypatch, *tools):
    """Makes a PATH that holds these tools alone."""
    (shop.folder / "tools").mkdir()
    for tool in tools:
        (shop.folder / "tools" / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(shop.folder / "tools"))


def test_ninja_of_a_virtual_environment_that_is_not_active(shop, monkeypatch):
    only_on_path(shop, monkeypatch, "sh", "g++", "c++", "as", "ld", "which")
    assert shop.answer(shop.run().build()) == shop.number
    assert os.environ["PATH"] == str(shop.folder / "tools")


def test_no_ninja_is_an_error(shop, monkeypatch):
    only_on_path(shop, monkeypatch, "sh", "g++", "c++")
    find_spec = shop.run().importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ninja" else find_spec(name))
    with pytest.raises(RuntimeError, match="pip install ninja"):
        shop.run().build()


# ---- Architectures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [None, "", "native"])
def test_no_gpu_and_no_list_is_an_error(shop, monkeypatch, listed):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if listed is None:
        monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    else:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    with pytest.raises(RuntimeError, match=r"no GPU is visible.*export TORCH_CUDA_ARCH_LIST=9\.0"):
        shop.run().build()


def test_nonsense_in_the_list_is_an_error(shop, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "nonsense")
    with pytest.raises(RuntimeError, match=r"TORCH_CUDA_ARCH_LIST cannot be used: .*nonsense.*Unset it"):
        shop.run().build()


def test_visible_gpus_decide_without_a_list(shop, monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(9, 0), (8, 0)][index])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    flags = " ".join(shop.run()._architectures())
    assert "code=sm_80" in flags and "code=sm_90" in flags


@pytest.mark.parametrize(
    "listed, capability, runs",
    [
        ("9.0", (9, 0), True),
        ("9.0", (9, 1), True),  # machine code runs on later ones of the same major version
        ("9.0", (8, 9), False),
        ("9.0", (10, 0), False),
        ("8.0", (9, 0), False),
        ("8.0+PTX", (9, 0), True),  # PTX runs on all later ones
        ("9.0+PTX", (8, 0), False),
        ("9.0a", (9, 0), True),  # with a suffix, on that one alone
        ("9.0a+PTX", (10, 0), False),
        ("8.0;12.0", (9, 0), False),
        ("8.0 9.0", (9, 0), True),
        ("Hopper", (9, 0), True),
    ],
)
def test_what_the_list_covers(shop, monkeypatch, listed, capability, runs):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    assert shop.run()._runs_on(capability) is runs


def test_gpu_that_the_list_leaves_out_is_an_error_before_anything_is_built(shop, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    with pytest.raises(RuntimeError, match=r"^TORCH_CUDA_ARCH_LIST=8\.0 leaves out GPU 3 \(NVIDIA H200\).*add 9\.0"):
        shop.run().extension(3)
    assert shop.compiled() == 0


def test_pytorch_without_cuda_is_an_error(shop, monkeypatch):
    solution = shop.run()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match="needs PyTorch for CUDA on Linux"):
        solution.build()


# ---- Folders -------------------------------------------------------------------------------------------------------


def test_chosen_folder_that_cannot_be_written_is_an_error(shop, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/proc/none")  # not even root can
    with pytest.raises(RuntimeError, match="cannot write its library to /proc/none: export TORCH_EXTENSIONS_DIR="):
        shop.run().build()


@pytest.fixture
def homeless(shop, monkeypatch):
    """No TORCH_EXTENSIONS_DIR and no home to write to; returns the private folder to use instead."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    monkeypatch.setattr("tempfile.tempdir", str(shop.folder))
    shop.cache = shop.folder / f"torch_extensions_{os.getuid()}"
    return shop.cache


def test_private_folder_where_home_cannot_be_written(shop, homeless):
    assert shop.answer(shop.run().build()) == shop.number
    assert homeless.stat().st_mode & 0o077 == 0


def test_private_folder_where_there_is_no_home(shop, homeless, monkeypatch):
    monkeypatch.chdir(shop.folder)
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: os.path.realpath("~/.cache/torch_extensions"))
    assert shop.answer(shop.run().build()) == shop.number
    assert not Path("~").exists()


@pytest.mark.parametrize("fault", ["others may write", "a link", "another's"])
def test_private_folder_that_is_not_private_is_refused(shop, homeless, monkeypatch, fault):
    homeless.mkdir(mode=0o700)
    if fault == "others may write":
        homeless.chmod(0o777)
    elif fault == "a link":
        homeless.rename(shop.folder / "elsewhere")
        homeless.symlink_to(shop.folder / "elsewhere")
    else:
        other = os.getuid() + 1
        homeless.rename(shop.folder / f"torch_extensions_{other}")
        monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(RuntimeError, match=r"cannot write its library.*export TORCH_EXTENSIONS_DIR="):
        shop.run().build()


def test_library_built_ahead_is_loaded_from_a_folder_that_cannot_be_written(shop):
    name = shop.run().build()
    torch.ops.loaded_libraries = {path for path in torch.ops.loaded_libraries if name not in path}
    solution = shop.run()
    solution.globals["_writable"] = lambda *_: False
    assert solution.build() == name and shop.compiled() == 1


def test_no_room_is_an_error(shop, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
    with pytest.raises(RuntimeError, match=r"needs 64 MiB in .*make room, or export TORCH_EXTENSIONS_DIR="):
        shop.run().build()
    assert shop.compiled() == 0


def test_library_that_cannot_be_loaded_is_an_error(shop):
    name = shop.run().build()
    torch.ops.loaded_libraries = {path for path in torch.ops.loaded_libraries if name not in path}
    library = shop.library(name)
    library.unlink()
    library.write_text("for another machine")
    with pytest.raises(RuntimeError, match=rf"^{library} cannot be loaded: .*Remove it"):
        shop.run().build()


def test_folder_of_the_users_own_module_is_not_touched(shop, monkeypatch):
    """An extension named like a module of the user's does not take its place."""
    name = shop.run().build()
    assert name not in sys.modules and not any(str(shop.cache) in entry for entry in sys.path)


def test_compiler_that_brings_its_library_as_an_archive(shop, monkeypatch):
    """PyTorch's libstdc++ and that one stay apart: else numbers vanish from messages, or the process crashes."""
    compiler = shop.folder / "g++"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -static-libstdc++\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    fails = """
        #include <ATen/core/Tensor.h>
        #include <torch/library.h>
        at::Tensor fail(const at::Tensor& x) { TORCH_CHECK(false, x.dim(), " of ", x.sizes(), " at ", 0.5); }
        TORCH_LIBRARY_FRAGMENT(EXTENSION_NAMESPACE, m) { m.def("fail(Tensor x) -> Tensor", fail); }
    """
    name = shop.run(shop.text(cpp=fails)).build()
    with pytest.raises(RuntimeError, match=r"^2 of \[3, 17\] at 0\.5"):
        getattr(torch.ops, name).fail(torch.ones(3, 17))


# ---- The real compiler ---------------------------------------------------------------------------------------------


@pytest.fixture
def real(shop, monkeypatch):
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    if not torch.cuda.device_count():
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    return shop


@pytest.mark.nvcc
def test_compiler_behind_a_script_anywhere(real, monkeypatch):
    """The toolkit's own headers are found all the same."""
    nvcc = real.folder / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f'#!/bin/sh\nexec {real.run()._find_nvcc()} "$@"\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{nvcc.parent}:{os.environ['PATH']}")
    solution = real.run(toy(real.number, cpp="#include <cuda_runtime.h>"))
    assert solution._find_nvcc() == str(nvcc)
    assert real.answer(solution.build()) == real.number


@pytest.mark.nvcc
def test_headers_that_the_toolkit_lacks_come_from_the_pip_packages(real):
    if not any(any(Path(folder).glob("*/include/cublas_v2.h")) for folder in real.run()._pip_folders()):
        pytest.skip("this PyTorch did not come with the pip packages of CUDA")
    include = "#include <cublas_v2.h>\n#include <cusparse.h>\n#include <cuda_fp16.h>\n"
    assert real.answer(real.run(toy(real.number, cpp=include, cuda=include)).build()) == real.number


@pytest.mark.nvcc
@pytest.mark.parametrize("where", ["cpp", "cuda"])
def test_missing_header_is_named_with_its_package(real, where):
    with pytest.raises(RuntimeError) as error:
        real.run(toy(real.number, **{where: "#include <nv/absent>"})).build()
    assert "nv/absent" in first_line(error) and 'pip install "cuda-toolkit[nvcc,nvvm,crt,cccl]' in first_line(error)


FIRST_USE = """
import sys, torch
torch.cuda.get_device_capability = lambda index: (9, 0)  # the operator runs on the CPU
text, changed = (open(path, encoding="utf-8").read() for path in sys.argv[1:])
x = torch.arange(5.0)
namespaces = {}

def module(text):
    namespace = {}
    exec(text, namespace)
    namespaces[text] = namespace

    class Module(torch.nn.Module):
        def forward(self, x):
            return namespace["extension"](0).scale(x) + 1

    return Module()

first = module(text)
compiled = torch.compile(first, fullgraph=True, backend="aot_eager")  # compiles before it was ever built
assert torch.equal(compiled(x), 3 * x + 1), compiled(x)
again, other = module("import os\\n" + text), module(changed)
for expected, model in ((3, first), (3, again), (5, other), (3, first)):
    assert torch.equal(model(x), expected * x + 1), (expected, model(x))
    for strict in (False, True):
        program = torch.export.export(model, (x,), strict=strict)
        assert torch.equal(program.module()(x), expected * x + 1), (expected, strict)
torch._dynamo.reset()
varied = torch.compile(other, fullgraph=True, backend="aot_eager", dynamic=True)
for count in (7, 3, 1, 0):
    assert torch.equal(varied(torch.ones(count)), torch.full((count,), 6.0))
print("all as expected")
"""


@pytest.mark.nvcc
def test_first_use_by_compile_and_export_and_two_versions_in_one_process_under_odd_names(real):
    """A folder with spaces and other letters, in a locale that has only ASCII, and the real headers."""
    folder = real.folder / "a b \u00fc"
    folder.mkdir()
    (folder / "text.py").write_text(scaling_toy(3))
    (folder / "changed.py").write_text(scaling_toy(5))
    environment = {"TORCH_EXTENSIONS_DIR": str(folder / "c d \u00e9"), "TORCH_CUDA_ARCH_LIST": "9.0"}
    environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", FIRST_USE, str(folder / "text.py"), str(folder / "changed.py")],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "all as expected\n" and result.stderr.count("compiling for CUDA") == 2


# ---- On a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("listed", [None, "8.0+PTX"])
def test_operator_runs_on_the_gpu(real, monkeypatch, listed):
    if listed:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    x = torch.arange(1000.0, device="cuda")
    assert torch.equal(real.run(scaling_toy(3)).extension(x.device.index).scale(x), 3 * x)


@pytest.mark.gpu
def test_gpu_that_the_list_leaves_out_gets_an_error_and_stays_usable(real, monkeypatch):
    major, _ = torch.cuda.get_device_capability(0)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0" if major > 8 else "9.0")
    with pytest.raises(RuntimeError, match="leaves out GPU 0"):
        real.run(scaling_toy(3)).extension(0)
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.gpu
def test_first_build_inside_graph_capture_leaves_the_process_usable(real):
    """Compiling takes no GPU work, so that the first call ever may stand in a capture."""
    solution, x = real.run(scaling_toy(7)), torch.arange(8.0, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = solution.extension(0).scale(x)
    graph.replay()
    assert torch.equal(out, 7 * x)
