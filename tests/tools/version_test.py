#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every program says which version it is.

usage: version_test.py SMP_VERSION_H LIBTORCH_VERSION_CMAKE PROGRAM...
"""
import re
import subprocess
import sys
import unittest

SMP, LIBTORCH, *PROGRAMS = sys.argv[1:]


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


class VersionTest(unittest.TestCase):
    def test_programs_say_the_versions_of_smp_and_libtorch(self):
        numbers = re.findall(r"^#define SMP_VERSION_\w+ (\d+)$", read(SMP), re.MULTILINE)
        libtorch = re.search(r'PACKAGE_VERSION "([\d.]+)', read(LIBTORCH)).group(1)
        self.assertEqual(len(numbers), 3)
        self.assertEqual(len(PROGRAMS), 5)
        for program in PROGRAMS:
            done = subprocess.run([program, "--version"], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stdout, done.stderr),
                             (0, "smp %s, libtorch %s\n" % (".".join(numbers), libtorch), ""),
                             program)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
