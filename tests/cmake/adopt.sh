#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Adopts the library as a CMake project does, from nothing: builds and installs it, then builds
# examples/cmake outside of the tree and compares its training with that of Bazel's hello.
#
#     tests/cmake/adopt.sh --libtorch DIR --hello PROGRAM [--quick --smprun PROGRAM]
#
# DIR holds libtorch's include and lib; the programs are Bazel's. With --quick, as a test of
# Bazel's, the commands that README.md, docs/installing.md and docs/tutorial.md print are typed as
# they stand (printed.sh), CMake links the objects that Bazel has compiled, and only the install tree
# is looked at, and refusals; otherwise CMake compiles, and symbols are looked at,
# FetchContent, pkg-config, GCC and clang with C++17 and C++20 and warnings as errors, a build without
# MPI, and a wheel, which needs the network. CMAKE_BUILD_PARALLEL_LEVEL says how many compilers run at
# once.
set -uo pipefail
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
quick=false
while [ $# -gt 0 ]; do
  case $1 in
    --libtorch) libtorch=$(realpath "$2") && libtorch=${libtorch%/share/cmake/*} && shift 2 ;;
    --hello) hello=$(realpath "$2") && shift 2 ;;
    --smprun) smprun=$(realpath "$2") && shift 2 ;;
    --quick) quick=true && shift ;;
    *) echo "adopt.sh: unknown argument $1" >&2 && exit 2 ;;
  esac
done
if $quick && [ -z "${TEST_SRCDIR:-}" ]; then # it would change the checkout
  echo "adopt.sh: --quick is a test of Bazel's" >&2
  exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Bazel shows a test links to the sources, which CMake would install as links.
if [ -n "${TEST_SRCDIR:-}" ]; then
  mkdir "$work/source"
  tar -C "$source" --exclude=_objs --exclude='*_unit_*.cc' -ch . | tar -C "$work/source" -x && source=$work/source
fi
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc --all)} OMP_NUM_THREADS=1
export CMAKE_GENERATOR=Ninja OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
passed=0
failed=0

# check WHAT COMMAND...: runs the command, and counts.
check() {
  local start=$SECONDS what=$1
  shift
  if "$@" >"$work/log" 2>&1; then
    passed=$((passed + 1))
    printf 'ok    %s (%d s)\n' "$what" $((SECONDS - start))
  else
    failed=$((failed + 1))
    printf 'FAIL  %s (%d s)\n' "$what" $((SECONDS - start))
    tail -40 "$work/log" | sed 's/^/      /'
  fi
}

source "$source/tests/cmake/printed.sh"
source "$source/tests/cmake/sources_of.sh"

# build SOURCE FOLDER OPTION...: configures and builds.
build() {
  cmake -S "$1" -B "$2" "${@:3}" && cmake --build "$2"
}

# link_objects FOLDER: links Bazel's objects by the command with which CMake would link its own in the
# build in FOLDER. Both must build the same sources.
link_objects() {
  local link ours theirs # the last two: object files
  ours=$(cd "$TEST_SRCDIR/$TEST_WORKSPACE" && find . -name '*.pic.o' | sed 's|^\./||') || return 1
  link=$(ninja -C "$1" -t commands smp | grep -e ' -shared ') || return 1
  theirs=$(grep -oE '[^ ]*smp_objects\.dir/[^ ]*\.cc\.o' <<<"$link")
  diff <(sources_of "$TEST_SRCDIR/$TEST_WORKSPACE" <<<"$ours") <(sources_of . <<<"$theirs") ||
    { echo "(<: compiled by Bazel only, >: by CMake only)" && return 1; }
  link=$(sed -E 's|[^ ]*smp_objects\.dir/[^ ]*\.o||g' <<<"$link")
  sed "s|^|$TEST_SRCDIR/$TEST_WORKSPACE/|" <<<"$ours" >"$work/objects"
  # CMake compiles xxHash into the library, Bazel links Debian's.
  (cd "$1" && bash -c "${link/ -o / @$work/objects -lxxhash -o }" &&
    bash -c "$(ninja -t commands smp | tail -1)") # which makes the links to it
}

# refuses TEXT COMMAND...: the command fails, and says TEXT. CMake wraps its lines.
refuses() {
  local text=$1
  shift
  ! "$@" >"$work/refused" 2>&1 && tr -s ' \n' ' ' <"$work/refused" | grep -F "$text" ||
    { cat "$work/refused" && return 1; }
}

# trains LAUNCH PARAMETERS PROGRAM: runs a copy of hello, and says the hashes of all that it has saved.
trains() {
  local folder
  folder=$(mktemp -d -p "$work")
  (cd "$folder" && SM_HP_MP_PARAMETERS=$2 timeout 300 $1 "$3") >"$folder/output" 2>&1 || {
    cat "$folder/output"
    return 1
  }
  python3 - "$folder/sine" <<'PYTHON'
import json, pathlib, sys
index = json.loads((pathlib.Path(sys.argv[1]) / "index.json").read_text())
def hashes(node):
    if isinstance(node, dict):
        for key in sorted(node):
            if key == "xxh64":
                yield node[key]
            else:
                yield from hashes(node[key])
    elif isinstance(node, list):
        for item in node:
            yield from hashes(item)
found = list(hashes(index))
assert found, index
print(*found)
PYTHON
}

# same_as_bazel PROGRAM: 1, 2 and 4 ranks of the program leave the weights that Bazel's leaves alone.
same_as_bazel() {
  local alone='{"microbatches": 8, "gradient_shards": 2}' expected got
  expected=$(trains "" "$alone" "$hello") || { echo "$expected" && return 1; }
  local mpirun="mpirun --oversubscribe --bind-to none -np"
  for run in "|$alone" "$mpirun 2|{\"partitions\": 2, \"microbatches\": 8, \"gradient_shards\": 2}" \
    "$mpirun 4|{\"partitions\": 2, \"microbatches\": 4, \"ddp\": true}"; do
    got=$(trains "${run%%|*}" "${run#*|}" "$1") || { echo "$got" && return 1; }
    [ "$got" = "$expected" ] || { printf '%s: %s\nexpected %s\n' "$run" "$got" "$expected" && return 1; }
  done
}

# same_files FILE...: all have the contents of the first.
same_files() {
  local file
  for file in "${@:2}"; do cmp "$1" "$file" || return 1; done
}

# exports_only_smp LIBRARY: nothing but smp's own names can be linked against, and none of the names
# of its parts.
exports_only_smp() {
  local names
  names=$(nm -DC --defined-only "$1" | cut -d' ' -f3-) || return 1
  printf 'exported: %d\n' "$(wc -l <<<"$names")"
  ! grep -vE '^(((typeinfo|typeinfo name|vtable) for )?smp::|smp_[a-z_]+$)' <<<"$names" | grep -v ' std::forward<' &&
    ! grep -E '^(.* for )?smp::(core|comm|graph|partitioner|pipeline|dp|checkpoint|runtime|tools)::' <<<"$names" &&
    ! grep -E 'nlohmann|fmt::|XXH' <<<"$names" && grep -q '^smp::init(' <<<"$names"
}

# another_libtorch FOLDER VERSION: headers that look like libtorch of another version.
another_libtorch() {
  mkdir -p "$1/share/cmake/Torch"
  touch "$1/share/cmake/Torch/TorchConfig.cmake"
  echo "set(PACKAGE_VERSION \"$2\")" >"$1/share/cmake/Torch/TorchConfigVersion.cmake"
}

# small_project FOLDER: a project like examples/cmake, whose program needs little of libtorch, so that it
# compiles quickly. It succeeds if it knows the type of the library's exceptions.
small_project() {
  cp -r "$source/examples/cmake" "$1"
  cat >"$1/train.cc" <<'CC'
#include <smp/error.h>
#include <smp/init.h>
int main() {
  try {
    smp::device();
  } catch (const smp::UsageError&) {  // smp::init was not called
    return 0;
  }
  return 1;
}
CC
}

# by_pkg_config FOLDER: builds its program as docs/installing.md says, by clang.
by_pkg_config() {
  PKG_CONFIG_PATH=$prefix/lib/pkgconfig bash -c \
    "clang++ $1/train.cc -o $1/train \$(pkg-config --cflags --libs smp)"
}

# calls_from_c: a program in C is compiled and linked with the library alone.
calls_from_c() {
  cat >"$work/call.c" <<'C'
#include <smp/c.h>
int main(void) { return smp_c_version() != SMP_C_VERSION; }
C
  clang -std=c99 -Wall -Wextra -Wpedantic -Werror "$work/call.c" -o "$work/call" -I "$prefix/include" \
    -L "$prefix/lib" -lsmp -Wl,-rpath,"$prefix/lib" && "$work/call"
}

# headers_with MINOR...: the installed headers compile with headers that look like libtorch 2.MINOR.
headers_with() {
  local minor folder
  for minor in "$@"; do
    folder=$work/libtorch_2.$minor
    mkdir -p "$folder/torch"
    printf '#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR %d\n' "$minor" \
      >"$folder/torch/version.h"
    clang++ -fsyntax-only -I "$folder" -I "$prefix/include" -x c++ - <<<'#include <smp/version.h>' ||
      return 1
  done
}

prefix=$work/home/smp
cp -r "$source/examples/cmake" "$work/project" # like a user
cp -r "$source/examples/tutorial" "$work/tutorial"
small_project "$work/small"
if $quick; then
  be_a_stranger
  check "README.md's commands" type_commands "$source/README.md" "$source" "$source" "$source" \
    "$source" "$source"
  check "docs/installing.md's" type_commands "$source/docs/installing.md" "$source" "$work/small" \
    "$work/small" "$source"
  check "docs/tutorial.md's" type_commands "$source/docs/tutorial.md" "$work/tutorial" "$work/tutorial"
  check "1, 2 and 4 ranks have the tutorial's losses" same_files \
    "$work"/tutorial/{alone,two,four}/loss.csv
  check "and no other line is left out" left_out_are_printed
  sed 's/^/      /' "$work/log"
else
  # The prefix is that of torch's wheel, as for find_package(Torch).
  check "configure" cmake -S "$source" -B "$work/build" -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_C_COMPILER=clang -DSMP_WERROR=ON \
    -DCMAKE_PREFIX_PATH="$libtorch/share/cmake" -DCMAKE_INSTALL_PREFIX="$prefix" \
    -DCMAKE_INSTALL_LIBDIR=lib
  check "build the library" cmake --build "$work/build"
  check "install it" cmake --install "$work/build"
fi
size_of() { du -sh "$1" | cut -f1; } # one du for both would count the headers once
printf '      install tree %s, headers %s\n' "$(size_of "$prefix")" "$(size_of "$prefix/include")"
if ! $quick; then
  check "only smp's own names are exported" exports_only_smp "$prefix/lib/libsmp.so"
  sed 's/^/      /' "$work/log"
fi
if ! $quick; then
  check "build a program by pkg-config and clang" by_pkg_config "$work/small"
fi
check "what it throws is caught outside of it" "$work/small/train"
check "a program in C calls it" calls_from_c
check "name maps are installed" cmp "$source/examples/huggingface/gpt2.json" \
  "$prefix/share/smp/huggingface/gpt2.json"

check "its program is the README's" cmp "$source/examples/cmake/train.cc" "$source/examples/hello/hello.cc"
if $quick; then
  check "its CMakeLists.txt is the README's" shows_project "$source/README.md"
  check "and that of docs/installing.md" shows_project "$source/docs/installing.md"
  check "1, 2 and 4 ranks have the weights of Bazel's program" same_as_bazel "$source/app/train"
else
  check "build examples/cmake on the install tree" build "$work/project" "$work/on_install" \
    -DCMAKE_PREFIX_PATH="$prefix"
  check "1, 2 and 4 ranks have the weights of Bazel's program" \
    same_as_bazel "$work/on_install/train"
  check "smprun runs 2 stages x 2 replicas" env -C "$work" "$prefix/bin/smprun" --np 4 \
    --config "$work/project/2x2.json" "$work/on_install/train"
fi

another_libtorch "$work/old" 2.10.0
check "another libtorch is refused" refuses "smp: this smp was built with libtorch" \
  cmake -S "$work/project" -B "$work/refused_build" -DCMAKE_PREFIX_PATH="$prefix;$work/old" \
  -DTorch_DIR="$work/old/share/cmake/Torch"
another_libtorch "$work/cpu" 0
cp "$libtorch/share/cmake/Torch/TorchConfigVersion.cmake" "$work/cpu/share/cmake/Torch"
check "SMP_CUDA=ON refuses a libtorch for the CPU" refuses \
  "smp: SMP_CUDA=ON needs a libtorch for CUDA, and" \
  cmake -S "$source" -B "$work/cuda" -DSMP_CUDA=ON -DCMAKE_PREFIX_PATH="$work/cpu"
cp -r "$prefix" "$work/for_cuda"
sed -i 's/^set(smp_CUDA .*/set(smp_CUDA ON)/' "$work/for_cuda/lib/cmake/smp/smp-config.cmake"
check "and so does find_package of an smp for CUDA" refuses \
  "smp: this smp, which was built for CUDA, needs a libtorch for CUDA, and" \
  cmake -S "$work/project" -B "$work/refused_cuda" -DCMAKE_PREFIX_PATH="$work/for_cuda;$work/cpu"
check "headers take a libtorch that was tested" headers_with 11 14 15
check "and refuse another" refuses "smp 0.2 was tested with libtorch 2.11, 2.14 and 2.15" headers_with 13
check "no libtorch is refused" refuses "smp: libtorch was not found" \
  env -u CMAKE_PREFIX_PATH cmake -S "$source" -B "$work/none"

if ! $quick; then
  cat >"$work/fetch.cmake" <<CMAKE
include(FetchContent)
FetchContent_Declare(smp SOURCE_DIR $source OVERRIDE_FIND_PACKAGE)
CMAKE
  check "build examples/cmake by FetchContent" build "$work/project" "$work/fetched" \
    -DCMAKE_CXX_COMPILER=g++ -DCMAKE_C_COMPILER=gcc -DCMAKE_CXX_STANDARD=17 -DSMP_WERROR=ON \
    -DCMAKE_PROJECT_TOP_LEVEL_INCLUDES="$work/fetch.cmake" -DCMAKE_PREFIX_PATH="$libtorch"
  check "which has the same weights" same_as_bazel "$work/fetched/train"
  check "build it by pkg-config" env PKG_CONFIG_PATH="$prefix/lib/pkgconfig" bash -c \
    "g++ $work/project/train.cc -o $work/by_pkg_config \$(pkg-config --cflags --libs smp)"
  check "which has the same weights" same_as_bazel "$work/by_pkg_config"
  # C++17 is that of the builds above: clang's of the install tree, GCC's by FetchContent.
  for compiler in gcc clang; do
    cxx=${compiler/gcc/g++}
    check "$compiler, C++20, all examples" build "$source" "$work/$compiler" \
      -DCMAKE_BUILD_TYPE=None -DCMAKE_C_COMPILER=$compiler \
      -DCMAKE_CXX_COMPILER="${cxx/clang/clang++}" -DCMAKE_CXX_STANDARD=20 -DSMP_WERROR=ON \
      -DSMP_EXAMPLES=ON -DCMAKE_PREFIX_PATH="$libtorch"
    check "whose hello has the same weights" same_as_bazel "$work/$compiler/examples/hello"
    rm -rf "${work:?}/$compiler"
  done
  check "build without MPI" build "$source" "$work/no_mpi" -DCMAKE_BUILD_TYPE=None \
    -DSMP_MPI=OFF -DSMP_TOOLS=OFF -DSMP_EXAMPLES=ON -DCMAKE_PREFIX_PATH="$libtorch"
  check "mpirun is refused there" refuses "smp was built without MPI" \
    mpirun --oversubscribe -np 2 "$work/no_mpi/examples/hello"
fi

# A wheel in an environment of its own, with torch from the package index (3 GB).
if ! $quick; then
  check "make a wheel" env CMAKE_PREFIX_PATH="$libtorch" "$source/tools/wheel" "$work/wheels"
  du -h "$work"/wheels/*.whl | sed 's/^/      /'
  check "make an environment" python3 -m venv "$work/venv"
  check "install the wheel and torch" "$work/venv/bin/pip" install --quiet numpy "$work"/wheels/smp_libtorch-*.whl
  found=$(env -C "$work" venv/bin/python -c 'import smp_libtorch; print(smp_libtorch.cmake_prefix_path)')
  check "build examples/cmake on the wheel" build "$work/project" "$work/on_wheel" \
    -DCMAKE_PREFIX_PATH="$found"
  check "which has the same weights" same_as_bazel "$work/on_wheel/train"
  check "its smprun runs 2 stages x 2 replicas" env -C "$work" venv/bin/smprun --np 4 \
    --config "$work/project/2x2.json" "$work/on_wheel/train"
  check "torchrun runs its backend smddp" env -C "$work" venv/bin/torchrun --nproc-per-node 2 \
    "$source/tests/python/smddp_test.py"
fi

printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
