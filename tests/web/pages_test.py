#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The pages of smp_plan and of timelines in a browser, in wide and narrow windows: everything that
their data have is drawn inside the picture, and wheel, pointer and choices do as the pages say.

usage: pages_test.py [--pictures FOLDER] PAGE.html...     (needs chromium; docs/development.md)

A test is JavaScript at the end of a page. It notes what differs; the page's last element has it.
"""

import argparse
import json
import os
import re
import sys
import tempfile

import browser

WINDOWS = ((1400, 900), (400, 800))

TEST = r"""
const problems = [];
const equal = (name, got, expected) => {
  if (JSON.stringify(got) !== JSON.stringify(expected)) {
    problems.push(`${name}: expected ${JSON.stringify(expected)}, got ${JSON.stringify(got)}`);
  }
};
const isTrue = (name, value) => equal(name, Boolean(value), true);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
window.requestAnimationFrame = draw => draw();
const wheel = (svg, at, deltaY) => {
  const box = svg.getBoundingClientRect();
  svg.dispatchEvent(new WheelEvent('wheel', {
    bubbles: true, cancelable: true, deltaY,
    clientX: box.left + box.width * at, clientY: box.top + box.height / 2 }));
};
const numbers = svg => all('[x],[y],[width],[height],[d],[x1],[x2],[viewBox]', svg)
    .flatMap(one => [...one.attributes].map(({ value }) => value)).join(' ');

// Every text and bar lies within the picture.
function isInside(name, svg) {
  const [, , width, height] = svg.getAttribute('viewBox').split(' ').map(Number);
  for (const one of all('text,rect', svg)) {
    if (one.closest('defs') || one.closest('[clip-path]')) continue;
    const { x, y, width: w, height: h } = one.getBBox();
    if (x < -1 || y < -1 || x + w > width + 1 || y + h > height + 1) {
      problems.push(`${name}: "${one.textContent}" lies outside, at ${x}, ${y}, ${w} x ${h}`);
    }
  }
  isTrue(name + ': all lengths are numbers', !/NaN|undefined|Infinity/.test(numbers(svg)));
}

function timeline() {
  const steps = data.steps, count = lanes =>
      lanes.flatMap(lane => [...lane.actions, ...lane.reductions])
          .filter(({ start, end }) => end > start).length;
  isTrue('the page is not wider than the window', document.body.scrollWidth <= innerWidth);
  for (const [i, svg] of all('section > svg').entries()) {
    if (svg.closest('section').hidden) { all('section')[i].hidden = false; drawAll(); }
    const step = steps[i], below = data.measured && data.predicted ? [data.predicted] : [];
    isInside(step.name, svg);
    equal(step.name + ': actions and reductions', all('g[data-m] > title', svg).length,
          [step, ...below].reduce((sum, one) => sum + count(one.lanes), 0));
    equal(step.name + ': arrows', all('path.arrow[data-m]', svg).length, step.transfers.length);
    equal(step.name + ': rows', all('tr', svg.closest('section')).length, step.table.length);
    const first = svg.querySelector('[data-m="0"] rect');
    first.dispatchEvent(new MouseEvent('mouseover', { bubbles: true }));
    isTrue(step.name + ': microbatch 0 is shown alone', svg.classList.contains('focus') &&
        all('.on', svg).every(one => one.dataset.m === '0') && all('.on', svg).length > 0);
    svg.dispatchEvent(new MouseEvent('mouseleave'));
    isTrue(step.name + ': all are shown again', !svg.classList.contains('focus'));
    drawAll();
    const before = Number(first.getAttribute('width')), drawn = svg.innerHTML;
    wheel(svg, 0.5, -300);
    const wider = all('g[data-m] rect', svg).some(bar => Number(bar.getAttribute('width')) > before);
    isTrue(step.name + ': the wheel zooms', wider && svg.innerHTML !== drawn);
    svg.dispatchEvent(new MouseEvent('dblclick'));
    isTrue(step.name + ': a double click shows all', svg.innerHTML === drawn);
  }
  show();
  equal('sections shown', all('section:not([hidden])').length, 1);
  if (steps.length > 1) {
    choice.selectedIndex = 1;
    choice.dispatchEvent(new Event('change'));
    equal('the chosen step', all('section:not([hidden]) text.mute')[0].textContent,
          steps[1].headline);
    choice.selectedIndex = 0;
    choice.dispatchEvent(new Event('change'));
  }
  if (own) {
    const drawn = pictures[0].svg.innerHTML;
    own.click();
    isTrue('the prediction has a scale of its own', pictures[0].svg.innerHTML !== drawn);
    own.click();
  }
}

function plan() {
  isInside('plan', svg);
  const texts = all('text', svg).map(one => one.textContent);
  data.stages.forEach((_, s) => isTrue('stage ' + s, texts.includes('Stage ' + s)));
  equal('boxes', all('.box', svg).length, data.boxes.length);
  equal('inside', all('.inside', svg).length, data.inside.length);
  equal('ties', all('path.tied', svg).length, data.ties.length);
  equal('between', all('path.flow:not(.inside), path.skip', svg).length, data.between.length);
  equal('computes', all('.compute', svg).length, data.timeline.flat().length);
  wheel(svg, 0.5, -500);
  isTrue('the wheel zooms', Number(svg.getAttribute('viewBox').split(' ')[2]) < width);
  svg.dispatchEvent(new MouseEvent('dblclick'));
  equal('a double click shows all', svg.getAttribute('viewBox'), `0 0 ${width} ${height}`);
}

function note() {
  const result = document.createElement('pre');
  result.id = 'problems';
  result.hidden = true;
  result.textContent = JSON.stringify(problems);
  document.body.append(result);
}
addEventListener('error', event => problems.push(event.message));
try {
  data.boxes ? plan() : timeline();
} catch (error) {
  problems.push(error.stack);
}
note();
"""


def problems_of(page, width, height):
    with open(page) as source, tempfile.TemporaryDirectory() as folder:
        tested = os.path.join(folder, "page.html")
        with open(tested, "w") as out:
            out.write(source.read().replace("</body>", f"<script>{TEST}</script>\n</body>"))
        text = browser.document(tested, width=width, height=height)
    found = re.search(r'<pre id="problems" hidden="">(.*?)</pre>', text, re.DOTALL)
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace(
        "&amp;", "&")) if found else ["the page's script did not end"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pictures", help="a folder for a picture of each page and window")
    parser.add_argument("pages", nargs="+")
    arguments = parser.parse_args()
    failed = 0
    for page in arguments.pages:
        for width, height in WINDOWS:
            name = f"{os.path.basename(page)} at {width} x {height}"
            problems = problems_of(page, width, height)
            failed += bool(problems)
            print(f"{'FAIL' if problems else 'ok'}: {name}", *problems, sep="\n    ")
            if arguments.pictures:
                picture = os.path.basename(page).replace(".html", f"_{width}.png")
                browser.screenshot(page, os.path.join(arguments.pictures, picture), width=width,
                                   height=height)
    print(f"{2 * len(arguments.pages) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


main()
