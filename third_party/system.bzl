# SPDX-License-Identifier: Apache-2.0
"""Finds the libraries of this system, wherever it keeps them; nothing is downloaded."""

def _ask(ctx, command, needed):
    """The output of a command; `needed` names the package that a user would install to have it."""
    if not ctx.which(command[0]):
        fail("%s was not found. Install %s." % (command[0], needed))
    result = ctx.execute(command)
    if result.return_code:
        fail("%s failed; is %s installed?\n%s" % (" ".join(command), needed, result.stderr))
    return result.stdout.strip()

def _includedir(ctx, package, needed):
    flags = _ask(ctx, ["pkg-config", "--cflags-only-I", "--keep-system-cflags", package], needed)
    return flags.split(" ")[0][len("-I"):]

def _system_libraries_impl(ctx):
    json = _includedir(ctx, "nlohmann_json", "nlohmann_json (Debian: nlohmann-json3-dev)")
    cli11 = _includedir(ctx, "CLI11", "CLI11 (Debian: libcli11-dev)")
    ctx.symlink(json + "/nlohmann", "json/nlohmann")
    ctx.symlink(cli11 + "/CLI", "cli11/CLI")
    mpi = "Open MPI with its headers (Debian: libopenmpi-dev)"
    includes = _ask(ctx, ["mpicc", "--showme:incdirs"], mpi).split(" ")
    for i, folder in enumerate(includes):
        ctx.symlink(folder, "mpi/%d" % i)
    libraries = _ask(ctx, ["mpicc", "--showme:libdirs"], mpi).split(" ")
    script = "import sysconfig; print(sysconfig.get_path('include'))"
    ctx.symlink(_ask(ctx, ["python3", "-c", script], "Python 3"), "python")
    ctx.template("BUILD.bazel", ctx.attr.build_file, {
        "%{mpi_includes}": repr(["mpi/%d" % i for i in range(len(includes))]),
        "%{mpi_linkopts}": repr(["-L" + folder for folder in libraries] + ["-lmpi"]),
    })

system_libraries = repository_rule(
    implementation = _system_libraries_impl,
    attrs = {"build_file": attr.label(allow_single_file = True)},
    environ = ["PATH", "PKG_CONFIG_PATH"],
    local = True,
    doc = "Open MPI, nlohmann_json, GoogleTest, CLI11, fmt, xxHash, zlib and Python's headers.",
)
