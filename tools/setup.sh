# SPDX-License-Identifier: Apache-2.0
# The common part of tools/test, tools/sanitize and tools/quickstart; source it, do not run it. Its
# set-up installs missing packages and nothing else: where all are there, it neither asks for root
# nor touches the network.

# The packages of Debian that a build needs.
SMP_PACKAGES=(bazel-bootstrap libopenmpi-dev openmpi-bin nlohmann-json3-dev libgtest-dev
  libgmock-dev libcli11-dev libfmt-dev libxxhash-dev zlib1g-dev clang clang-format cmake gfortran
  ninja-build pkg-config python3 python3-dev python3-pip)

# step N OF TEXT: tells the current work, and the time.
step() { printf '[%s/%s] %(%H:%M:%S)T %s\n' "$1" "$2" -1 "$3"; }

# stop TEXT ...: says why the work cannot go on, one argument a line, and ends the script.
stop() {
  printf '%s: %s\n' "${0##*/}" "$1" >&2
  [ $# -lt 2 ] || printf '  %s\n' "${@:2}" >&2
  exit 1
}

missing_packages() {
  local package
  for package in "${SMP_PACKAGES[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
      printf '%s\n' "$package"
  done
}

# Installs the Debian packages that are missing, as root or through a sudo that asks nothing.
install_packages() {
  local missing root=()
  command -v dpkg-query >/dev/null && command -v apt-get >/dev/null ||
    stop "this system has no apt; install what these Debian packages hold and run Bazel 4.2 yourself:" \
      "${SMP_PACKAGES[*]}"
  mapfile -t missing < <(missing_packages)
  if [ "${#missing[@]}" -eq 0 ]; then
    echo "      all ${#SMP_PACKAGES[@]} packages are installed"
    return
  fi
  if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null ||
      stop "packages are missing and can only be installed as root; run this, then try again:" \
        "sudo apt-get install ${missing[*]}"
    root=(sudo -n)
  fi
  echo "      installing ${missing[*]}"
  "${root[@]}" apt-get update -qq &&
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
    stop "apt-get failed (see above); these packages are needed:" "${missing[*]}"
}

# Fetches libtorch (530 MB, once) into Bazel's output base. Its progress goes to the terminal.
fetch_libtorch() {
  python3 -m pip --version >/dev/null 2>&1 ||
    stop "libtorch is fetched with pip, which is missing; install the package:" python3-pip
  bazel build "${SMP_BAZEL_OUTPUT[@]}" "$@" @libtorch//:libtorch ||
    stop "Bazel could not fetch libtorch (see above). It needs, once, a pip index that offers:" \
      "torch==2.11.0 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85"
}

# Sets `events`, the folder of the results of test runs: that of a caller (.ci/run) who counts the
# runs of several scripts together, or one that goes when the script ends.
make_events() {
  events=${SMP_TEST_EVENTS:-}
  [ -z "$events" ] || return 0
  events=$(mktemp -d) || stop "cannot make a temporary folder"
  trap 'rm -rf "$events"' EXIT
}

# run_tests NAME BAZEL_ARGUMENT...: runs tests, and keeps their results for count_tests.
run_tests() {
  [ -n "${events:-}" ] || make_events
  bazel test "${SMP_BAZEL_OUTPUT[@]}" --keep_going --build_event_json_file="$events/$1.json" "${@:2}"
}

# count_tests: prints the counts of all runs, or leaves that to the caller.
count_tests() {
  if [ -n "${SMP_TEST_EVENTS:-}" ]; then
    echo "      that is done at the end"
  else
    python3 tools/summarize_tests.py "$events"/*.json
  fi
}

# A log keeps no line that was rewritten in place; only a person at a terminal wants that.
if [ "${CI:-}" = true ] || [ ! -t 1 ]; then
  SMP_BAZEL_OUTPUT=(--curses=no --color=no)
else
  SMP_BAZEL_OUTPUT=()
fi
