# SPDX-License-Identifier: Apache-2.0
# The commands that pages print, typed as they stand by a stranger with a clone, an empty home and
# libtorch. Sourced by adopt.sh, whose variables it uses.

# Those that a test cannot run: they need the network, root, or a long time.
left_out=(
  'tools/quickstart'
  'tools/test'
  'bazel build //examples/hello //tools:smprun_bin'
  'python3 -m venv venv'
  'venv/bin/pip install torch==2.11.0'
  'cmake --build build -j$(nproc)'
  'tools/wheel dist'
  'pip install dist/smp_libtorch-*.whl'
  "cmake -B build -DCMAKE_PREFIX_PATH=\$(python3 -c 'import smp_libtorch; print(smp_libtorch.cmake_prefix_path)')"
  'smprun --np 4 --config 2x2.json build/train' # that of the wheel
)

# be_a_stranger: a home with libtorch, a Python that knows of torch where its CMake files are, and
# compilers that are those of the test. Tools are not built: they are not among Bazel's linked
# objects.
be_a_stranger() {
  mkdir -p "$work/home/python"
  ln -s "$libtorch" "$work/home/libtorch"
  printf 'class utils:\n    cmake_prefix_path = "%s/share/cmake"\n' "$libtorch" \
    >"$work/home/python/torch.py"
  cat >"$work/toolchain.cmake" <<'CMAKE'
set(CMAKE_C_COMPILER clang)
set(CMAKE_CXX_COMPILER clang++)
set(SMP_WERROR ON CACHE BOOL "")
set(SMP_TOOLS OFF CACHE BOOL "")
CMAKE
}

# stand_in COMMAND: the stand-in for a command that is left out, in the folder where it would run.
stand_in() {
  printf 'left out: %s\n' "$1"
  case $1 in
    bazel\ *)
      mkdir -p bazel-bin/examples/hello bazel-bin/tools
      ln -s "$hello" bazel-bin/examples/hello/hello && ln -s "$smprun" bazel-bin/tools/smprun_bin
      ;;
    venv/bin/pip\ *)
      mkdir -p venv/bin
      ln -sf "$(command -v python3)" venv/bin/python
      ;;
    'cmake --build '*)
      link_objects "$PWD/build" && mkdir -p "$HOME/smp/bin" &&
        ln -sf "$smprun" "$HOME/smp/bin/smprun"
      ;;
  esac
}

# commands_of PAGE: its commands, a number of the block before each: lines of blocks of sh, and
# lines behind "$ " in others.
commands_of() {
  awk '/^```/ { inside = !inside; is_sh = $0 == "```sh"; found = 0; next }
       inside && (is_sh || /^\$ /) {
         if (!found) { block++; found = 1 }
         sub(/^\$ /, "")
         print block "\t" $0
       }' "$1"
}

# type_commands PAGE FOLDER...: types the page's commands, the n-th block in the n-th folder, each
# block in a shell of its own.
type_commands() {
  local page=$1 folders=("${@:2}") block command script count=0
  rm -rf "$work"/typed.* "${folders[@]/%//build}"
  while IFS=$'\t' read -r block command; do
    count=$block script=$work/typed.$block
    if printf '%s\n' "${left_out[@]}" | grep -Fxq -- "$command"; then
      printf 'stand_in %q || exit\n' "$command" >>"$script"
      printf '%s\n' "$command" >>"$work/left_out"
    else
      printf '%s || exit\n' "$command" >>"$script"
    fi
  done < <(commands_of "$page")
  [ "$count" -eq ${#folders[@]} ] ||
    { echo "$page has $count blocks of commands, and ${#folders[@]} folders are given" && return 1; }
  for ((block = 1; block <= count; block++)); do
    echo "--- $page, block $block"
    cat "$work/typed.$block"
    (
      cd "${folders[block - 1]}" && export HOME=$work/home PYTHONPATH=$work/home/python || exit
      export CMAKE_TOOLCHAIN_FILE=$work/toolchain.cmake
      source "$work/typed.$block"
    ) || return 1
  done
}

# shows_project PAGE: its first block of CMake is the file of examples/cmake, but for comments.
shows_project() {
  diff <(awk '/^```cmake$/ { inside = 1; next } /^```/ && inside { exit } inside' "$1") \
    <(grep -v '^#' "$work/project/CMakeLists.txt")
}

# left_out_are_printed: says which commands were left out, and that pages print all that are named.
left_out_are_printed() {
  sort -u "$work/left_out"
  diff <(sort -u "$work/left_out") <(printf '%s\n' "${left_out[@]}" | sort -u)
}
