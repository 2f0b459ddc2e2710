#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: with_torch.sh LIBTORCH PACKAGES SMDDP FOLDER COMMAND [ARGUMENT...]
# Runs the command with a Python that imports the torch that the build has fetched as libtorch
# (LIBTORCH is a file of it), the packages that it needs (PACKAGES is a file beside them) and
# smdistributed (SMDDP is a file in the folder that holds it, below smdistributed; empty: without).
#
# That torch is linked against libraries of CUDA, gigabytes that nothing here calls. For those that
# are missing, FOLDER gets stand-ins. They hold only the symbols looked up when a library is loaded,
# which are functions whose address is taken; others are looked up when they are called first. A
# FOLDER that has them is used as it is.
set -u
torch=$(realpath "$1") && torch=${torch%/torch/*}
packages=$(dirname "$(realpath "$2")")
smddp=${3:+$(realpath "$3")} && smddp=${smddp%/smdistributed/*}
folder=$(realpath -m "$4")
shift 4

missing_libraries() {
  ldd "$torch"/torch/lib/libtorch*.so | sed -n 's/^\s*\(lib.*\) => not found$/\1/p' | sort -u
}

export LD_LIBRARY_PATH=$folder/libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
mkdir -p "$folder/libraries"

# stand_ins NAME...: libraries for those missing, with functions of these names.
stand_ins() {
  local library
  for library in $missing; do
    { [ $# -eq 0 ] || printf 'void %s(void) {}\n' "$@"; } |
      clang -shared -x c - -Wl,-soname,"$library" -o "$folder/libraries/$library" || exit 1
  done
}

looked_up_early() {
  ldd -d "$torch/torch/lib/libtorch.so" 2>&1 | sed -n 's/^undefined symbol: \(\w*\).*/\1/p' | sort -u
}

if [ ! -e "$folder/sitecustomize.py" ]; then
  missing=$(missing_libraries)
  stand_ins
  stand_ins $(looked_up_early)
  printf 'import os\nimport sys\n\nsys.setdlopenflags(os.RTLD_LAZY)\n' >"$folder/sitecustomize.py"
fi

export PYTHONPATH=$folder:$torch:$packages${smddp:+:$smddp} PYTHONPYCACHEPREFIX=$folder/compiled
exec "$@"
