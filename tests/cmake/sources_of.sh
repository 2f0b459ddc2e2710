# SPDX-License-Identifier: Apache-2.0
# Sourced by adopt.sh and adopt_cuda.sh.

# sources_of FOLDER: of each object on stdin the folder at the top and the name of its source. An object
# of Bazel's may be that of a unit in FOLDER, which includes several sources (bazel/unity.bzl).
sources_of() {
  local object
  while read -r object; do
    case $object in
      *_unit_*.pic.o)
        sed 's/^#include "//; s/\.cc"$/.pic.o/' \
          "$1/$(sed -E 's|_objs/[^/]+/||; s/\.pic\.o$/.cc/' <<<"$object")"
        ;;
      *) echo "$object" ;;
    esac
  done | sed -E 's|.*smp_objects\.dir/||; s|/.*/|/|; s/(\.pic|\.cc)\.o$//' | sort
}
