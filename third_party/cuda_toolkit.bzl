# SPDX-License-Identifier: Apache-2.0
"""Finds the libraries of a CUDA build on this machine; nothing is downloaded."""

# The libraries that libtorch_cuda.so of the torch wheel in WORKSPACE is linked against, and CUDA's
# compiler, which it and optim/cuda load while a program runs.
_LIBRARIES = [
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcudnn.so.9",
    "libcufft.so.12",
    "libcufile.so.0",
    "libcurand.so.10",
    "libcusparse.so.12",
    "libcusparseLt.so.0",
    "libnccl.so.2",
    "libnvJitLink.so.13",
    "libnvrtc.so.13",
    "libnvshmem_host.so.3",
]

# Headers whose folders are told to the compiler.
_HEADERS = ["cuda_runtime_api.h", "nccl.h"]

_NOT_FOUND = """--config=cuda: cannot find %s.
Looked in %s.
Set CUDA_HOME to the CUDA 13 toolkit and SMP_CUDA_WHEELS to a folder into which pip has installed torch==2.11.0 or its nvidia wheels (site-packages), then build again. See docs/cuda.md."""

# A target that can be named anywhere and fails only where it is built.
_MISSING_BUILD = """load(":missing.bzl", "missing")
missing(name = "cuda", text = {text}, visibility = ["//visibility:public"])
"""

_MISSING_RULE = """def _impl(ctx):
    fail(ctx.attr.text)
missing = rule(implementation = _impl, attrs = {"text": attr.string()})
"""

# The libraries stay where they are: they find parts of themselves beside them, and are large.
_FOUND_BUILD = """cc_library(
    name = "cuda",
    srcs = ["lib/libc10_cuda.so", "lib/libtorch_cuda.so", "lib/libtorch_nvshmem.so"],
    hdrs = glob(["include*/**"]),
    includes = {includes},
    linkopts = {linkopts},
    visibility = ["//visibility:public"],
)
"""

def _wheel_folders(ctx):
    """The parents of the folders `nvidia`: the one named, and those of python3."""
    named = ctx.os.environ.get("SMP_CUDA_WHEELS", "")
    program = "import nvidia, os; print('\\n'.join(os.path.dirname(p) for p in nvidia.__path__))"
    asked = ctx.execute(["python3", "-c", program])
    found = asked.stdout.split("\n") if asked.return_code == 0 else []
    return [folder for folder in [named] + found if folder]

def _roots(ctx):
    """Folders with `include` and `lib` or `lib64`, in the order in which they count."""
    roots = [ctx.os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    roots = [ctx.path(root) for root in roots if root]
    for folder in _wheel_folders(ctx):
        nvidia = ctx.path(folder).get_child("nvidia")
        if nvidia.exists:
            roots += sorted(nvidia.readdir(), key = str)
    return roots

def _find(name, folders):
    for folder in folders:
        if folder.exists and folder.get_child(name).exists:
            return folder
    return None

def _cuda_toolkit_impl(ctx):
    roots = _roots(ctx)
    libraries = [root.get_child(lib) for root in roots for lib in ["lib64", "lib"]]
    libraries.append(ctx.path("/usr/lib/x86_64-linux-gnu"))
    headers = [root.get_child("include") for root in roots] + [ctx.path("/usr/include")]
    found = {name: _find(name, libraries) for name in _LIBRARIES}
    found.update({name: _find(name, headers) for name in _HEADERS})
    missing = [name for name in found if not found[name]]
    if missing:
        looked = ", ".join([str(folder) for folder in libraries + headers if folder.exists])
        text = _NOT_FOUND % (", ".join(missing), looked)
        ctx.file("missing.bzl", _MISSING_RULE)
        ctx.file("BUILD.bazel", _MISSING_BUILD.format(text = repr(text)))
        return
    includes = []
    for name in _HEADERS:
        includes.append("include_" + name[:-2])
        ctx.symlink(found[name], includes[-1])
    linkopts = []
    for name in _LIBRARIES:
        folder = str(found[name])
        linkopts += ["-L" + folder, "-l:" + name, "-Wl,-rpath," + folder]
    torch = ctx.path(ctx.attr.libtorch).dirname.get_child("torch").get_child("lib")
    for name in ["libc10_cuda.so", "libtorch_cuda.so", "libtorch_nvshmem.so"]:
        ctx.symlink(torch.get_child(name), "lib/" + name)
    ctx.file("BUILD.bazel", _FOUND_BUILD.format(includes = repr(includes), linkopts = repr(linkopts)))

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit_impl,
    attrs = {"libtorch": attr.label(doc = "the BUILD file of the unpacked torch wheel")},
    environ = ["CUDA_HOME", "SMP_CUDA_WHEELS"],
    local = True,
    doc = "The CUDA libraries of this machine and the CUDA part of libtorch, as @cuda.",
)
