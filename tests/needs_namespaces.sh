# SPDX-License-Identifier: Apache-2.0
# source needs_namespaces.sh SUITE: ends the test, as skipped, where network namespaces cannot be
# made, which needs root.
probe=smp-probe$$
if ! ip netns add "$probe" 2>/dev/null; then
  echo "skipped: network namespaces cannot be made here (they need root)"
  [ -z "${XML_OUTPUT_FILE:-}" ] || cat >"$XML_OUTPUT_FILE" <<XML
<testsuites tests="1" timestamp="1970-01-01T00:00:00"><testsuite name="$1" tests="1">
<testcase name="CannotBeMadeHere" classname="$1"><skipped message="needs root"/></testcase>
</testsuite></testsuites>
XML
  exit 0
fi
ip netns del "$probe"
