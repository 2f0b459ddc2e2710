// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace smp::pipeline {

/// The script of the page of a timeline: fits its pictures to the window, zooms and pans them, and
/// shows a microbatch without the others. It moves what timeline_picture.cc has drawn within groups
/// of class "lanes", whose data say where the chart is and how long it lasts.
constexpr const char* kTimelineScript = R"js(
// Fits the pictures to the window; the wheel zooms and dragging pans them.
const steps = [...document.querySelectorAll('section')];
const choice = document.querySelector('select');
const own = document.querySelector('#own');
const kLeast = 1054;  // pixels; a narrower window gets a smaller picture
const kHair = 0.7;
const kSmallest = 0.02;  // part of a step that fills the window: positions are rounded to 0.1 pixel
const svgElement = name =>
    document.createElementNS(document.querySelector('svg').namespaceURI, name);
const number = (element, name) => Number(element.getAttribute(name));

// A path's data with every x replaced by f(x); commands are M, L, C, H, V and z.
function mapPath(data, f) {
  let command = '', place = 0;
  return data.match(/[A-Za-z]|-?[\d.]+/g).map(token => {
    if (/[A-Za-z]/.test(token)) { command = token; place = 0; return token; }
    const isX = command === 'H' || (command !== 'V' && place % 2 === 0);
    place += 1;
    return isX ? f(Number(token)).toFixed(1) : token;
  }).join(' ');
}

// Times of ticks between two times, and how to write them.
function ticks(from, to, count, unit) {
  const rough = (to - from) / count, power = 10 ** Math.floor(Math.log10(rough));
  const apart = power * [1, 2, 5, 10].find(factor => rough <= factor * power * 1.0001);
  const [size, name] = unit === 'slots' ? [1, ''] :
      [[1e6, ' s'], [1e3, ' ms'], [1, ' us']].find(([size]) => to >= size) || [1, ' us'];
  const digits = Math.max(0, -Math.floor(Math.log10(apart / size) + 1e-9));
  const times = [];
  for (let i = Math.ceil(from / apart); i * apart <= to; i += 1) times.push(i * apart);
  return times.map(time => [time, time === 0 ? '0' : (time / size).toFixed(digits) + name]);
}

// Lanes with their axis, as drawn; `place` draws them anew.
class Lanes {
  constructor(group, clip) {
    this.left = number(group, 'data-left');
    this.right = number(group, 'data-right');
    this.length = number(group, 'data-length');
    this.end = number(group, 'data-end');
    this.unit = group.dataset.unit;
    const axis = group.querySelector('.grid');
    this.top = axis ? number(axis, 'y1') : 0;
    this.bottom = axis ? number(axis, 'y2') : 0;
    group.querySelectorAll('.grid,[text-anchor=middle]').forEach(old => old.remove());
    this.axis = svgElement('g');
    this.chart = svgElement('g');
    this.chart.setAttribute('clip-path', clip);
    this.figures = [...group.querySelectorAll('[text-anchor=end]')].map(text =>
        [text, number(text, 'x')]);
    [...group.children].filter(child => child.tagName !== 'text').forEach(child =>
        this.chart.append(child));
    group.prepend(this.axis, this.chart);
    this.lines = [...this.chart.querySelectorAll('line')].map(line => [line, number(line, 'x1')]);
    this.paths = [...this.chart.querySelectorAll('path')].map(path =>
        [path, path.getAttribute('d')]);
    this.bars = [...this.chart.querySelectorAll('rect')].map(bar => this.read(bar));
  }

  // A bar, and the text in it if it is of an action that has one.
  read(bar) {
    const action = bar.closest('[data-m]');
    let text = action && action.querySelector('text');
    if (action && !text && /^[fbiw]\d$/.test(bar.getAttribute('class'))) {
      text = svgElement('text');
      text.setAttribute('class', 'num');
      text.setAttribute('y', (number(bar, 'y') + number(bar, 'height') / 2 + 3.8).toFixed(1));
      text.textContent = action.dataset.m;
      action.append(text);
    }
    // An action's bar is a hair shorter than its time, to keep neighbours apart.
    const hair = action && number(bar, 'width') > 3.3 ? kHair : 0;
    return { bar, text, hair, x: number(bar, 'x'), width: number(bar, 'width') + hair };
  }

  // Shows the part of the step from `from` to `to`, in parts of its length.
  place(from, to, right, isOwn) {
    const whole = (isOwn && this.end) || this.length || 1;
    const chart = right - this.left, drawn = this.right - this.left;
    const scale = (this.length || 1) / whole / (to - from) * chart / drawn;
    const offset = from / (to - from) * chart;
    const x = old => this.left + (old - this.left) * scale - offset;
    this.bars.forEach(({ bar, text, hair, x: begin, width }) => {
      bar.setAttribute('x', x(begin).toFixed(1));
      bar.setAttribute('width', Math.max(0.8, width * scale - hair).toFixed(1));
      if (!text) return;
      text.setAttribute('x', (x(begin) + width * scale / 2).toFixed(1));
      text.style.display = width * scale < 6 * text.textContent.length + 3 ? 'none' : '';
    });
    this.paths.forEach(([path, data]) => path.setAttribute('d', mapPath(data, x)));
    this.lines.forEach(([line, old]) => {
      line.setAttribute('x1', x(old).toFixed(1));
      line.setAttribute('x2', x(old).toFixed(1));
    });
    this.figures.forEach(([text, old]) => text.setAttribute('x', old + right - this.right));
    this.drawAxis(from * whole, to * whole, right);
  }

  drawAxis(from, to, right) {
    this.axis.replaceChildren();
    if (!(to > from)) return;
    const count = Math.max(4, (right - this.left) / 140);
    ticks(from, to, count, this.unit).forEach(([time, name]) => {
      const at = this.left + (time - from) / (to - from) * (right - this.left);
      const line = svgElement('line'), text = svgElement('text');
      Object.entries({ x1: at, x2: at, y1: this.top, y2: this.bottom, class: 'grid' })
          .forEach(([key, value]) => line.setAttribute(key, value));
      Object.entries({ x: at, y: this.bottom + 13, class: 'mute', 'font-size': 10.5,
                       'text-anchor': 'middle' })
          .forEach(([key, value]) => text.setAttribute(key, value));
      text.textContent = name;
      this.axis.append(line, text);
    });
  }
}

// The picture of a step.
class Picture {
  constructor(svg, index) {
    this.svg = svg;
    this.width = number(svg, 'width');
    this.height = number(svg, 'height');
    const clip = svgElement('clipPath');
    clip.id = 'clip' + index;
    this.window = svgElement('rect');
    this.window.setAttribute('height', this.height);
    clip.append(this.window);
    svg.querySelector('defs').append(clip);
    this.lanes = [...svg.querySelectorAll('.lanes')].map(group =>
        new Lanes(group, 'url(#' + clip.id + ')'));
    this.from = 0;
    this.to = 1;
    svg.addEventListener('wheel', event => this.zoom(event), { passive: false });
    svg.addEventListener('pointerdown', event => this.startPan(event));
    svg.addEventListener('pointermove', event => this.pan(event));
    svg.addEventListener('pointerup', () => { this.held = null; });
    svg.addEventListener('dblclick', () => this.show(0, 1));
  }

  // Pixels of the picture's own for one of the window's.
  get shrunk() { return this.svg.viewBox.baseVal.width / this.svg.clientWidth; }

  // Where in the chart the pointer is, from 0 to 1.
  at(event) {
    const x = (event.clientX - this.svg.getBoundingClientRect().left) * this.shrunk;
    return (x - this.lanes[0].left) / (this.right - this.lanes[0].left);
  }

  zoom(event) {
    const at = this.at(event);
    if (at < 0 || at > 1) return;
    event.preventDefault();
    const fixed = this.from + at * (this.to - this.from);
    const size = Math.max(kSmallest,
                          Math.min(1, (this.to - this.from) * 1.002 ** event.deltaY));
    this.show(fixed - at * size, fixed + (1 - at) * size);
  }

  startPan(event) {
    this.held = { at: this.at(event), from: this.from };
    this.svg.setPointerCapture(event.pointerId);
  }

  pan(event) {
    if (!this.held) return;
    const size = this.to - this.from;
    const from = this.held.from - (this.at(event) - this.held.at) * size;
    this.show(from, from + size);
  }

  show(from, to) {
    const size = Math.max(kSmallest, Math.min(1, to - from));
    this.from = Math.max(0, Math.min(1 - size, from));
    this.to = this.from + size;
    if (!this.waiting) requestAnimationFrame(() => { this.waiting = false; this.draw(); });
    this.waiting = true;
  }

  draw() {
    const width = Math.max(kLeast, document.body.clientWidth);
    this.svg.setAttribute('width', document.body.clientWidth);
    this.svg.setAttribute('height', this.height * document.body.clientWidth / width);
    this.svg.setAttribute('viewBox', '0 0 ' + width + ' ' + this.height);
    this.right = this.lanes[0].right + width - this.width;
    this.window.setAttribute('x', this.lanes[0].left);
    this.window.setAttribute('width', this.right - this.lanes[0].left);
    this.lanes.forEach((lanes, i) =>
        lanes.place(this.from, this.to, this.right, i > 0 && own.checked));
  }
}

const pictures = [...document.querySelectorAll('svg')].map((svg, i) => new Picture(svg, i));
const drawAll = () => pictures.forEach(picture => picture.draw());
if (own) {
  const [measured, predicted] = pictures[0].lanes;
  own.checked = predicted.end < measured.end / 2;
  own.addEventListener('change', drawAll);
}
addEventListener('resize', drawAll);
drawAll();

function show() { steps.forEach((step, i) => { step.hidden = i !== choice.selectedIndex; }); }
if (choice) { choice.addEventListener('change', show); show(); }
document.querySelectorAll('svg').forEach(svg => {
  svg.addEventListener('mouseover', event => {
    const under = event.target.closest('[data-m]');
    const m = under ? under.dataset.m : '-1';
    svg.classList.toggle('focus', m !== '-1');
    svg.querySelectorAll('[data-m]').forEach(one => {
      one.classList.toggle('on', one.dataset.m === m);
    });
  });
  svg.addEventListener('mouseleave', () => svg.classList.remove('focus'));
});
)js";

}  // namespace smp::pipeline
