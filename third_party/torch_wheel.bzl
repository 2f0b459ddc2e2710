# SPDX-License-Identifier: Apache-2.0
"""Unpacks Python wheels (libtorch comes as one) into an external repository."""

def _fetch(ctx, requirement):
    pip = ["python3", "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", "wheels"]
    ctx.report_progress("downloading %s" % requirement)
    result = ctx.execute(pip + [requirement], timeout = 3600)
    if result.return_code:
        fail("could not download %s; is python3-pip installed, and an index configured?\n%s" % (requirement, result.stderr))

def _torch_wheel_impl(ctx):
    version = ctx.os.environ.get("SMP_LIBTORCH", ctx.attr.versions[0])
    if version not in ctx.attr.versions:
        fail("SMP_LIBTORCH is %s; expected one of %s" % (version, ", ".join(ctx.attr.versions)))
    for requirement in ["torch==" + version] + ctx.attr.requirements:
        _fetch(ctx, requirement)
    ctx.report_progress("unpacking")
    result = ctx.execute(["sh", "-c", "for w in wheels/*.whl; do python3 -m zipfile -e $w . || exit 1; done; rm -rf wheels"], timeout = 3600)
    if result.return_code:
        fail(result.stderr)
    ctx.symlink(ctx.attr.build_file, "BUILD.bazel")

torch_wheel = repository_rule(
    implementation = _torch_wheel_impl,
    environ = ["SMP_LIBTORCH"],
    attrs = {
        "versions": attr.string_list(doc = "of torch; the first, or the one that SMP_LIBTORCH names"),
        "requirements": attr.string_list(doc = "further pip requirements, one wheel each"),
        "build_file": attr.label(),
    },
)
