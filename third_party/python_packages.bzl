# SPDX-License-Identifier: Apache-2.0
"""Unpacks Python packages into an external repository, for the Python that fetches them."""

def _python_packages_impl(ctx):
    pip = ["python3", "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--no-compile", "--target", "packages"]
    ctx.report_progress("installing %d Python packages" % len(ctx.attr.requirements))
    result = ctx.execute(pip + ctx.attr.requirements, timeout = 3600)
    if result.return_code:
        fail("could not install %s; is python3-pip installed, and an index configured?\n%s" % (", ".join(ctx.attr.requirements), result.stderr))

    # Names the folder for tests, which put it into Python's path as it is.
    ctx.file("packages/folder")
    ctx.file("BUILD.bazel", 'exports_files(["packages/folder"])\n')

python_packages = repository_rule(
    implementation = _python_packages_impl,
    attrs = {"requirements": attr.string_list(doc = "for pip, with versions")},
)
