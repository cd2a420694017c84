"""The second problem with the product as PyTorch makes it, and one kernel for divide, sum and scale.

The result is the reference's to the last bit, and so are the gradients. An exact sum of the same product would fail the
check in one trial of three: a float32 sum of 8192 terms of this size is off by about 4e-4, whoever makes it, and an
output near zero is allowed 1e-4. So the product is the reference's call, under the same precision switch, and the sum
is PyTorch's own reduction, a template in the headers that it comes with, which is given what to do with an element
(halve it) and with a finished sum (scale it). The order of the additions, which depends on the shape, the GPU and the
version of PyTorch, is then that of the installed PyTorch, whichever it is.

One file that stands alone: the CUDA source is compiled on first use. What the kernels do not cover (tensors on the
CPU, other dtypes than float32, autocast, other than two dimensions) is done by PyTorch's own operations.
"""

import contextlib
import functools
import glob
import hashlib
import importlib.util
import itertools
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time

import torch
from torch import nn

EXTENSION = "divide_sum_scale"

CUDA_SOURCE = r"""
#include <ATen/native/cuda/Reduce.cuh>

#include <cstdint>

// What PyTorch's reduction asks of an operation, here as for its own sums but for two places: each element is halved
// before it is added, and a finished sum is scaled. (A sum of parts, where there are more elements than 32 bits can
// index, goes through `combine` alone until it is finished.)
struct DivideSumScale {
  float scale;

  // Halving rounds where the result is subnormal, so that it must not become part of a fused multiply-add.
  __device__ float reduce(float sum, float element, int64_t) const { return combine(sum, __fmul_rn(element, 0.5f)); }
  __device__ float combine(float a, float b) const { return a + b; }
  __device__ float project(float sum) const { return sum * scale; }
  __device__ float warp_shfl_down(float sum, int offset) const { return WARP_SHFL_DOWN(sum, offset); }
  static __device__ float translate_idx(float sum, int64_t) { return sum; }
};

// product (rows, width) float32, not empty, out (rows, 1) float32: out[r] = scale * sum_h(product[r, h] / 2).
// Reads 4 * rows * width bytes, once.
void launch_divide_sum_scale(const at::TensorBase& product, at::TensorBase& out, float scale) {
  at::TensorIterator iterator = at::TensorIterator::reduce_op(out, product);
  at::native::gpu_reduce_kernel<float, float>(iterator, DivideSumScale{scale});
}

template <int N> struct Vector;
template <> struct Vector<1> { using type = float; };
template <> struct Vector<4> { using type = float4; };

// grad (rows) float32, `stride` elements apart, out (rows, width) float32: out[r, h] = grad[r] * scale / 2.
// Writes 4 * rows * width bytes. A block takes a row at a time, a thread N adjacent elements at a time.
template <int N>
__global__ void __launch_bounds__(256)
spread_kernel(const float* grad, int64_t stride, float* out, int64_t rows, int64_t width, float scale) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const float value = grad[row * stride] * scale / 2;
    float values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = value;
    for (int64_t first = threadIdx.x * N; first < width; first += blockDim.x * N)
      *reinterpret_cast<typename Vector<N>::type*>(out + row * width + first) =
          *reinterpret_cast<typename Vector<N>::type*>(values);
  }
}

void launch_spread(const float* grad, int64_t stride, float* out, int64_t rows, int64_t width, float scale,
                   cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(rows < 0x7fffffff ? rows : 0x7fffffff);
  const auto kernel = width % 4 ? spread_kernel<1> : spread_kernel<4>;
  kernel<<<blocks, 256, 0, stream>>>(grad, stride, out, rows, width, scale);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}
"""

CPP_SOURCE = r"""
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

void launch_divide_sum_scale(const at::TensorBase& product, at::TensorBase& out, float scale);
void launch_spread(const float* grad, int64_t stride, float* out, int64_t rows, int64_t width, float scale,
                   cudaStream_t);

at::Tensor summed_shape(const at::Tensor& product, double scale) {
  TORCH_CHECK(product.dim() == 2 && product.scalar_type() == at::kFloat,
              "divide_sum_scale: product must be a float32 matrix, got ", product.scalar_type(), " ",
              product.sym_sizes());
  return at::empty_symint({product.sym_size(0), 1}, product.options());
}

at::Tensor divide_sum_scale(const at::Tensor& product, double scale) {
  const c10::cuda::CUDAGuard guard(product.device());
  at::Tensor out = summed_shape(product, scale);
  if (product.numel())
    launch_divide_sum_scale(product, out, static_cast<float>(scale));
  else
    out.fill_(0 * scale);
  return out;
}

at::Tensor spread_shape(const at::Tensor& grad, c10::SymInt width, double scale) {
  TORCH_CHECK(grad.dim() == 2 && grad.sym_size(1) == 1 && grad.scalar_type() == at::kFloat,
              "spread: grad must be a float32 column, got ", grad.scalar_type(), " ", grad.sym_sizes());
  return at::empty_symint({grad.sym_size(0), width}, grad.options());
}

at::Tensor spread(const at::Tensor& grad, c10::SymInt width, double scale) {
  const c10::cuda::CUDAGuard guard(grad.device());
  at::Tensor out = spread_shape(grad, width, scale);
  if (out.numel())
    launch_spread(grad.const_data_ptr<float>(), grad.stride(0), out.mutable_data_ptr<float>(), out.size(0),
                  out.size(1), static_cast<float>(scale), c10::cuda::getCurrentCUDAStream());
  return out;
}

TORCH_LIBRARY_FRAGMENT(EXTENSION_NAMESPACE, m) {
  m.def("divide_sum_scale(Tensor product, float scale) -> Tensor");
  m.def("spread(Tensor grad, SymInt width, float scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(EXTENSION_NAMESPACE, CUDA, m) {
  m.impl("divide_sum_scale", divide_sum_scale);
  m.impl("spread", spread);
}
TORCH_LIBRARY_IMPL(EXTENSION_NAMESPACE, Meta, m) {
  m.impl("divide_sum_scale", summed_shape);
  m.impl("spread", spread_shape);
}
"""

CXX_FLAGS = ["-O2"]
NVCC_FLAGS = ["-O3"]

# --- build block: the same text in every solution of this project (tests/test_build.py compares them) ---

# nvcc's package asks for nvvm and crt of any version; their extras pin them to its own, without which ptxas fails.
_TOOLKIT = f'pip install "cuda-toolkit[nvcc,nvvm,crt,cccl]=={torch.version.cuda}.*"'


# A compiler that brings its C++ library as an archive must not mix that with PyTorch's: a number in a message crashed.
_LINK_FLAGS = ["-Wl,--exclude-libs,ALL"]


class _Explain(contextlib.AbstractContextManager):
    """Turns an error raised inside into one RuntimeError: what failed, the cause in its own words, and what to do."""

    def __init__(self, what, advice):
        self.what, self.advice = what, advice

    def __exit__(self, kind, error, trace):
        if not isinstance(error, Exception):
            return
        # A failed build carries all that ninja printed: "FAILED: target", the command, then what the compiler printed.
        _, failed, output = str(error).partition("FAILED: ")
        output = re.split(r"\n\[\d+/|\nninja: ", output)[0].split("\n", 2)[-1] if failed else str(error)
        lines = [line.strip() for line in output.splitlines() if line.strip()] or [kind.__name__]
        cause = next((line for line in lines if re.search("error|fatal", line, re.IGNORECASE)), lines[0])
        more = lines[:20] if len(lines) > 1 else []
        raise RuntimeError("\n".join([f"{self.what}: {cause.rstrip('.')}. {self.advice}.", *more])) from None


@functools.cache
def _architectures():
    """nvcc's flags for TORCH_CUDA_ARCH_LIST or, where it is unset, for the GPUs that are visible."""
    from torch.utils import cpp_extension

    if torch.version.cuda is None or sys.platform != "linux":
        raise RuntimeError(
            f"{EXTENSION} needs PyTorch for CUDA on Linux, this is PyTorch {torch.__version__} on {sys.platform}: "
            "keep the tensors on the CPU, or install such a PyTorch from https://pytorch.org."
        )
    if os.environ.get("TORCH_CUDA_ARCH_LIST", "native") in ("", "native") and torch.cuda.device_count() == 0:
        raise RuntimeError(
            f"{EXTENSION} cannot tell what to compile for, as no GPU is visible: name the compute capability, "
            "e.g. export TORCH_CUDA_ARCH_LIST=9.0 for an H100 or H200."
        )
    with _Explain(
        "TORCH_CUDA_ARCH_LIST cannot be used", "Unset it to compile for the visible GPUs, or set it like 9.0"
    ):
        return tuple(cpp_extension._get_cuda_arch_flags())


def _runs_on(capability):
    """Whether what is compiled, machine code or PTX, runs on a GPU of this compute capability (major, minor)."""
    for kind, number, only in re.findall(r"code=(sm|compute)_(\d+)([a-z]?)", " ".join(_architectures())):
        built = divmod(int(number), 10)
        newer = built < capability and (kind == "compute" or built[0] == capability[0])
        if built == capability or (newer and not only):
            return True
    return False


_PIP_HEADERS = ("*/include", "*/include/cccl")  # in the folders below


def _pip_folders():
    """The site-packages/nvidia folders: CUDA's libraries, headers and, with cuda-toolkit[nvcc], its compiler."""
    found = importlib.util.find_spec("nvidia")
    return list(found.submodule_search_locations or ()) if found else []


def _find_nvcc():
    """The path of nvcc, of PyTorch's CUDA major version.

    The first such of: CUDA_HOME, CUDA_PATH (where set, nothing else is tried), PATH, /usr/local/cuda, the pip packages.
    """
    cuda, major = torch.version.cuda, torch.version.cuda.split(".")[0]
    advice = f"Set CUDA_HOME to a CUDA {major} toolkit"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    packaged = [path for folder in _pip_folders() for path in glob.glob(f"{glob.escape(folder)}/*/bin/nvcc")]
    places = [f"{home}/bin/nvcc"] if home else [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc", *packaged]
    other = []
    # Each once: PATH's may be that of /usr/local/cuda.
    for nvcc in dict.fromkeys(os.path.abspath(place) for place in places if place and os.access(place, os.X_OK)):
        with _Explain(f"{nvcc} does not work", advice):
            command = [nvcc, "--version"]
            run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
            release = re.search(r"release (\d+)\.\d+", run.stdout)
            if not release:
                raise RuntimeError(run.stdout)
        if release[1] == major:
            return nvcc
        other.append(f"{nvcc} is {release[0]}")
    if not home:  # which would keep the pip packages from being seen
        advice += f", or: {_TOOLKIT}"
    if other:
        raise RuntimeError(f"{', '.join(other)}, but PyTorch {torch.__version__} is of CUDA {cuda}. {advice}.")
    where = f"at {places[0]}" if home else "on PATH, in /usr/local/cuda/bin or among the pip packages"
    raise RuntimeError(f"{EXTENSION} needs the CUDA compiler, nvcc, and there is none {where}. {advice}.")


def _find_ninja():
    """The path of ninja, on PATH or in the ninja package; also sees to it that there is a host compiler."""
    for tool in (os.environ.get("CXX", "c++"), os.environ.get("CC", "g++")):
        if not shutil.which(tool):
            raise RuntimeError(f"{EXTENSION} needs a C++ compiler, and {tool} is not on PATH: apt-get install g++")
    package = importlib.util.find_spec("ninja")
    ninja = shutil.which("ninja") or (package and shutil.which("ninja", path=importlib.import_module("ninja").BIN_DIR))
    if not ninja:
        raise RuntimeError(f"{EXTENSION} is built by ninja, which is not on PATH: pip install ninja")
    return ninja


def _writable(folder, mode=0o777):
    with contextlib.suppress(OSError):
        os.makedirs(folder, mode, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    return False


def _cache(name):
    """The folder of all builds: TORCH_EXTENSIONS_DIR, else PyTorch's default, else one of this user's own."""
    from torch.utils import cpp_extension

    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = os.path.abspath(chosen or cpp_extension.get_default_build_root())
    homeless = not chosen and "~" in folder.split(os.sep)  # no HOME: PyTorch means a folder of that name
    if os.path.exists(f"{folder}/{name}/{name}.so") or (not homeless and _writable(folder)):
        return folder
    own = os.path.join(tempfile.gettempdir(), f"torch_extensions_{os.getuid()}")
    if not chosen and _writable(own, 0o700):
        found = os.lstat(own)  # /tmp is everyone's: what another user can write must not be loaded
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return own
    raise RuntimeError(
        f"{EXTENSION} cannot write its library to {folder}{'' if chosen else ' or ' + own}: "
        "export TORCH_EXTENSIONS_DIR=a folder that you can write."
    )


@contextlib.contextmanager
def _lock(path):
    """Holds the file `path` locked; the kernel ends that when the holder dies, however it dies."""
    import fcntl

    with open(path, "a") as file:
        for attempt in itertools.count():
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if attempt == 25:
                print(f"{EXTENSION}: waiting for a build that holds the lock {path}", file=sys.stderr, flush=True)
            time.sleep(0.2)
        yield


def _compile(name, library, nvcc, ninja):
    """Compiles, loads, and moves the library to its place when it is whole.

    The paths that PyTorch writes into its build file lead through links in a folder with a plain name, so that spaces
    and non-ASCII letters in the real ones do no harm.
    """
    from torch.utils import cpp_extension

    folder = os.path.dirname(library)
    os.makedirs(folder, exist_ok=True)
    for left in glob.glob(f"{glob.escape(folder)}/build-*"):  # by builds that were killed
        shutil.rmtree(left, ignore_errors=True)
    dry = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], stderr=subprocess.PIPE, errors="replace")
    include = re.search(r'INCLUDES="-I(.*?)"', dry.stderr)  # nvcc may be a script, or a link, anywhere
    with (
        contextlib.ExitStack() as undo,
        tempfile.TemporaryDirectory(dir="/tmp" if os.access("/tmp", os.W_OK) else None) as links,
        tempfile.TemporaryDirectory(prefix="build-", dir=folder) as build,
    ):
        os.makedirs(f"{links}/cuda/lib64")
        os.symlink(build, f"{links}/build")
        os.symlink(os.path.dirname(nvcc), f"{links}/cuda/bin")
        os.symlink(include[1] if include else f"{os.path.dirname(nvcc)}/../include", f"{links}/cuda/include")
        os.symlink(f"{torch.__path__[0]}/lib", f"{links}/torch")
        # PyTorch links with -lcudart, a name that the pip packages lack. Nothing need be linked: libc10_cuda brings it.
        with open(f"{links}/cuda/lib64/libcudart.so", "w") as script:
            script.write("/* an empty linker script */\n")
        headers = []  # The pip packages' complete a toolkit that lacks cuBLAS's or others; they are searched last.
        for number, packages in enumerate(_pip_folders()):
            os.symlink(packages, f"{links}/pip{number}")
            for pattern in _PIP_HEADERS:
                headers += [f"-idirafter,{path}" for path in glob.glob(f"{links}/pip{number}/{pattern}")]
        for attribute, value in (("CUDA_HOME", f"{links}/cuda"), ("TORCH_LIB_PATH", f"{links}/torch")):
            undo.callback(setattr, cpp_extension, attribute, getattr(cpp_extension, attribute))
            setattr(cpp_extension, attribute, value)
        if not shutil.which("ninja"):
            undo.callback(os.environ.__setitem__, "PATH", os.environ["PATH"])
            os.environ["PATH"] += os.pathsep + os.path.dirname(ninja)
        define = f"-DEXTENSION_NAMESPACE={name}"
        cpp_extension.load_inline(
            name=name,
            cpp_sources=CPP_SOURCE,
            cuda_sources=CUDA_SOURCE,
            extra_cflags=[define, *CXX_FLAGS, *(flag.replace(",", " ", 1) for flag in headers)],
            extra_cuda_cflags=[define, *NVCC_FLAGS, *_architectures(), *(f"-Xcompiler {flag}" for flag in headers)],
            extra_ldflags=[*_LINK_FLAGS],  # PyTorch adds to it
            build_directory=f"{links}/build",
            is_python_module=False,
            no_implicit_headers=True,
        )
        os.replace(glob.glob(f"{glob.escape(build)}/*.so")[0], library)


def build():
    """Compiles the extension, unless that was done before, and loads it; returns the name of its operators' namespace.

    Needs no GPU where TORCH_CUDA_ARCH_LIST says what to compile for. The name carries a digest of all that decides the
    content, so that no version is ever taken for another, on disk or in this process.
    Raises RuntimeError, whose first line says what is wrong and what to do.
    """
    flags = CXX_FLAGS, NVCC_FLAGS, _architectures(), _LINK_FLAGS
    content = CPP_SOURCE, CUDA_SOURCE, flags, torch.version.cuda, torch.__version__, platform.machine()
    name = f"{EXTENSION}_{hashlib.sha256(repr(content).encode()).hexdigest()[:16]}"
    loaded = lambda: any(name in path for path in tuple(torch.ops.loaded_libraries))
    if loaded():  # by an earlier run of this text
        return name
    cache = _cache(name)
    library = f"{cache}/{name}/{name}.so"
    if not os.path.exists(library):
        nvcc, ninja = _find_nvcc(), _find_ninja()
        if shutil.disk_usage(cache).free < 64 << 20:
            raise RuntimeError(
                f"{EXTENSION} needs 64 MiB in {cache}: make room, or export TORCH_EXTENSIONS_DIR=elsewhere"
            )
        print(f"{EXTENSION}: compiling for CUDA, once, into {cache}/{name}", file=sys.stderr, flush=True)
        advice = (
            f"CUDA_HOME, CC and CXX choose other compilers than {nvcc} and g++, "
            f"TORCH_CUDA_ARCH_LIST other architectures; for a missing header: {_TOOLKIT}"
        )
        # One lock for all builds of this project, since they set variables of PyTorch's for a while.
        with _Explain(f"{EXTENSION} could not be built", advice), _lock(f"{cache}/build.flock"):
            if not os.path.exists(library):
                _compile(name, library, nvcc, ninja)
    if not loaded():
        with _Explain(f"{library} cannot be loaded", "Remove it to have it built anew"):
            torch.ops.load_library(library)
    return name


_namespaces = {}  # CUDA device index -> the namespace whose operators run there


@torch.compiler.assume_constant_result  # torch.compile runs this at trace time; it can take a string from it
def _namespace(device):
    if device not in _namespaces:
        major, minor = torch.cuda.get_device_capability(device)
        if not _runs_on((major, minor)):
            raise RuntimeError(
                f"TORCH_CUDA_ARCH_LIST={os.environ.get('TORCH_CUDA_ARCH_LIST')} leaves out GPU {device} "
                f"({torch.cuda.get_device_name(device)}): unset it, or add {major}.{minor}."
            )
        _namespaces[device] = build()
    return _namespaces[device]


def extension(device):
    """The operators, `torch.ops.<namespace>`, built on first use, for the CUDA device of this index."""
    return getattr(torch.ops, _namespace(device))


# --- end of the build block ---


class _DivideSumScale(torch.autograd.Function):
    """``product`` (rows, width) -> (rows, 1)."""

    @staticmethod
    def forward(product, scale):
        return extension(product.device.index).divide_sum_scale.default(product, scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        product, ctx.scale = inputs
        ctx.shape = product.shape

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # create_graph=True: somebody will differentiate this
            return (grad * ctx.scale).expand(ctx.shape) / 2, None  # (rows, 1) -> (rows, width)
        return extension(grad.device.index).spread.default(grad, ctx.shape[1], ctx.scale), None


class ModelNew(nn.Module):
    """``out[r] = scaling_factor * sum_h((x @ W.T)[r, h] / 2)``, kept as a column; see ``reference.py``."""

    def __init__(self, input_size, hidden_size, scaling_factor):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden_size, input_size))
        self.scaling_factor = scaling_factor

    def forward(self, x):
        """``x`` (batch, input) -> (batch, 1)."""
        product = torch.matmul(x, self.weight.T)  # (batch, hidden)
        if (
            type(product) is torch.Tensor
            and product.is_cuda
            and product.dtype == torch.float32
            and product.dim() == 2
            and not torch._C._are_functorch_transforms_active()
            and torch.autograd.forward_ad._current_level < 0  # no tangents, which the operators do not have
        ):
            if product.requires_grad:
                return _DivideSumScale.apply(product, self.scaling_factor)
            return extension(product.device.index).divide_sum_scale.default(product, self.scaling_factor)
        return torch.sum(product / 2, dim=1, keepdim=True) * self.scaling_factor
