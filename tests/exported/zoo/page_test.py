#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The lines of docs/exported_zoo.md."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import page

ROW = {"name": "Net", "package": "timm", "operators": 12, "random": 3, "parameters": 456,
       "dynamic": True, "verdicts": {"1 sgd": ["equal", ""]}, "eager": None}


class PageTest(unittest.TestCase):
    def line_with(self, **more):
        text = page.page_of([{**ROW, **more}], {"timm": "1.0", "torchvision": "2.0"})
        self.assertIn("Models of timm 1.0 and torchvision 2.0", text)
        return text.splitlines()[-1]

    def test_back(self):
        start = "| Net | 12 | 3 | 456 | dynamic | equal | "
        self.assertEqual(self.line_with(back=None), start + "equal | equal |")
        self.assertEqual(self.line_with(back="a batch of 2 has another output 0"),
                         start + "a batch of 2 has another output 0 | equal |")
        self.assertEqual(self.line_with(), start + "not tried | equal |")

    def test_columns(self):
        columns = page.HEAD.splitlines()[0].count("|")
        self.assertEqual(self.line_with().count("|"), columns)
        self.assertEqual(self.line_with(error="a|b").replace("\\|", "").count("|"), columns)


if __name__ == "__main__":
    unittest.main()
