#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the picture of a page of smp_plan or of a timeline as SVG, as its "save picture" does; the
pictures of docs/ are made by it.

usage: save_picture.py PAGE.html PICTURE.svg [WIDTH]
"""

import re
import sys

import browser


def main(page, picture, width="1054"):
    text = browser.document(page, width=int(width))
    style = re.search(r"<style>.*?</style>", text, re.DOTALL)[0]
    svg = re.search(r"<svg.*?</svg>", text, re.DOTALL)[0]
    end = svg.index(">") + 1
    with open(picture, "w") as out:
        out.write(svg[:end] + style + svg[end:] + "\n")


main(*sys.argv[1:])
