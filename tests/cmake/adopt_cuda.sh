#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Adopts the library for CUDA as a CMake project does, with torch's wheels and without nvcc: builds and
# installs it, then builds a program outside of the tree, which says on what it computes.
#
#     tests/cmake/adopt_cuda.sh WHEELS [--objects FOLDER] [--pretended LIBRARY]
#
# WHEELS is a site-packages with torch for CUDA. With --objects only the sources that need CUDA are
# compiled, and the other objects are those of Bazel, for example
# bazel-bin/tests/cmake/adopt_test.runfiles/smp. With --pretended the program also runs on the
# pretended CUDA runtime, bazel-bin/tests/cuda/pretended/libcuda.so.1. A machine with a GPU is expected
# to show it.
set -euo pipefail
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
objects="" pretended=""
wheels=$(realpath "${1:?expected the site-packages that has torch for CUDA}") && shift
while [ $# -gt 0 ]; do
  case $1 in
    --objects) objects=$(realpath "$2") && shift 2 ;;
    --pretended) pretended=$(realpath "$2") && shift 2 ;;
    *) echo "adopt_cuda.sh: unknown argument $1" >&2 && exit 2 ;;
  esac
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset CUDA_HOME LD_LIBRARY_PATH
PATH=$(tr : '\n' <<<"$PATH" | while read -r folder; do
  [ -e "$folder/nvcc" ] || echo "$folder"
done | paste -sd:)
export CMAKE_GENERATOR=Ninja

source "$source/tests/cmake/sources_of.sh"

# link_objects: compiles the sources that Bazel has not, and links them with Bazel's objects by CMake's
# command.
link_objects() {
  local link theirs ours missing
  link=$(ninja -C "$work/build" -t commands smp | grep -e ' -shared ')
  theirs=$(grep -oE '[^ ]*smp_objects\.dir/[^ ]*\.cc\.o' <<<"$link")
  ours=$(cd "$objects" && find . -name '*.pic.o' | sed 's|^\./||' | grep -vE '/no_(pinned|nccl|list)')
  mapfile -t missing < <(while read -r object; do
    grep -qxF "$(sources_of . <<<"$object")" < <(sources_of "$objects" <<<"$ours") || echo "$object"
  done <<<"$theirs")
  diff <(printf '%s\n' "$ours" "${missing[@]}" | sources_of "$objects") <(sources_of . <<<"$theirs") ||
    { echo "(<: compiled by Bazel only, >: by CMake only)" && return 1; }
  printf 'adopt_cuda.sh: compiles %s\n' "${missing[@]}"
  ninja -C "$work/build" "${missing[@]}"
  printf "$work/build/%s\n" "${missing[@]}" >"$work/objects"
  sed "s|^|$objects/|" <<<"$ours" >>"$work/objects"
  link=$(sed -E 's|[^ ]*smp_objects\.dir/[^ ]*\.o||g' <<<"$link")
  # CMake compiles xxHash into the library, Bazel links Debian's.
  (cd "$work/build" && bash -c "${link/ -o / @$work/objects -lxxhash -o }" &&
    bash -c "$(ninja -t commands smp | tail -1)") # which makes the links to it
}

# says TEXT COMMAND...: the command ends well and prints this.
says() {
  local got
  got=$("${@:2}") && [ "$got" = "$1" ] ||
    { printf 'adopt_cuda.sh: expected "%s", got "%s"\n' "$1" "$got" >&2 && return 1; }
}

torch=$wheels/torch
cmake -S "$source" -B "$work/build" -DSMP_CUDA=ON -DSMP_WERROR=ON \
  -DSMP_TOOLS=OFF -DCMAKE_PREFIX_PATH="$torch" -DCMAKE_INSTALL_PREFIX="$work/smp" \
  -DCMAKE_INSTALL_LIBDIR=lib >/dev/null
if [ -n "$objects" ]; then link_objects; else cmake --build "$work/build"; fi
cmake --install "$work/build" >/dev/null

cp -r "$source/examples/cmake" "$work/project"
cat >"$work/project/train.cc" <<'CC'
#include <smp/smp.h>
#include <torch/cuda.h>

#include <iostream>

int main() {
  smp::init();
  smp::set_device(smp::local_rank());
  std::cout << int{torch::cuda::device_count()} << " GPUs, on " << smp::device() << std::endl;
}
CC
cmake -S "$work/project" -B "$work/program" -DCMAKE_PREFIX_PATH="$work/smp;$torch" >/dev/null
cmake --build "$work/program"
program=$work/program/train
if ldd "$program" | grep "not found"; then exit 1; fi
gpus=$(nvidia-smi -L 2>/dev/null | wc -l) || true
if [ "$gpus" = 0 ]; then says "0 GPUs, on cpu" "$program"; else says "$gpus GPUs, on cuda:0" "$program"; fi
if [ -n "$pretended" ]; then
  SMP_CUDA_WHEELS=$wheels PRETENDED_CUDA=$pretended says "1 GPUs, on cuda:0" \
    "$source/tests/cuda/pretended/start" "$program"
fi
echo "adopt_cuda.sh: passed"
