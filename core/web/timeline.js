// SPDX-License-Identifier: Apache-2.0
// Draws the steps of a timeline: a lane for each rank, arrows for transfers, a curve for memory.
// The wheel zooms the time, dragging moves it; a microbatch under the pointer is shown alone.
// `data` is described in pipeline/timeline_page.cc.

// All lengths are in pixels.
const margin = 28, labels = 82, figures = 96, titleHeight = 52, legendHeight = 34;
const headingHeight = 30, axisHeight = 24, memoryHeight = 24, memoryGap = 5;
const leastWidth = 1054;  // a narrower window gets a smaller picture
const leastBar = 0.8;     // of an action that takes any time
const hair = 0.7;         // keeps neighbours apart
const mostZoom = 500;
const numberSize = 10.5;
const left = margin + labels;
const kindNames = { forward: 'forward', backward: 'backward', inputs: 'input gradients',
                    weights: 'weight gradients', send: 'send', reduce: 'reduce' };

const inSlots = data.unit === 'slots';
const formatDuration = time =>
    inSlots ? digits(time, 4) + (time === 1 ? ' slot' : ' slots') : formatTime(time);
const formatMemory = kept => inSlots ? digits(kept, 4) : formatBytes(kept);
const takesTime = action => action.end > action.start;
const isCompute = action => action.kind in kindNames && !['send', 'reduce'].includes(action.kind);
const stagesOf = lane => // others give it their outputs
    [...new Set(lane.actions.filter(isCompute).map(action => action.stage))].sort((a, b) => a - b);
const peakOf = lane => Math.max(0, ...lane.actions.map(action => action.keeps));

// Text that the browser shows when the pointer rests on an action.
function tooltip(name, { start, end, bytes, keeps }) {
  return [name,
          `${formatDuration(end - start)}, from ${formatDuration(start)} to ${formatDuration(end)}`,
          bytes > 0 && formatMemory(bytes),
          keeps > 0 && `the rank keeps ${formatMemory(keeps)} after it`].filter(Boolean).join('\n');
}

// The picture of one step. Its chart shows the time from `from` to `to`, in parts of the step.
class Picture {
  constructor(section, step, index) {
    this.step = step;
    this.index = index;
    this.below = data.measured ? data.predicted : null;
    this.peak = Math.max(...step.lanes.map(peakOf));
    this.hasReplicas = step.lanes.some(lane => lane.replica > 0);
    this.from = 0;
    this.to = 1;
    this.svg = section.querySelector('svg');
    this.svg.addEventListener('wheel', event => this.zoom(event), { passive: false });
    this.svg.addEventListener('pointerdown', event => this.startPan(event));
    this.svg.addEventListener('pointermove', event => this.pan(event));
    this.svg.addEventListener('pointerup', () => { this.held = null; });
    this.svg.addEventListener('dblclick', () => this.show(0, 1));
    this.svg.addEventListener('mouseover', event => this.focus(event.target.closest('[data-m]')));
    this.svg.addEventListener('mouseleave', () => this.focus(null));
  }

  // --- the part of the step that is shown ---

  // Where in the chart the pointer is, from 0 to 1.
  at(event) {
    const shrunk = this.width / this.svg.clientWidth;
    const x = (event.clientX - this.svg.getBoundingClientRect().left) * shrunk;
    return (x - left) / this.chart;
  }

  zoom(event) {
    const at = this.at(event);
    if (at < 0 || at > 1) return;
    event.preventDefault();
    const fixed = this.from + at * (this.to - this.from);
    const size = (this.to - this.from) * 1.002 ** event.deltaY;
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
    const size = Math.max(1 / mostZoom, Math.min(1, to - from));
    this.from = Math.max(0, Math.min(1 - size, from));
    this.to = this.from + size;
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  focus(action) {
    const m = action ? action.dataset.m : '-1';
    this.svg.classList.toggle('focus', m !== '-1');
    this.svg.querySelectorAll('[data-m]').forEach(one =>
        one.classList.toggle('on', one.dataset.m === m));
  }

  // --- drawing ---

  draw() {
    this.width = Math.max(leastWidth, document.body.clientWidth);
    this.chart = this.width - left - figures - margin;
    const legend = this.legend(margin + titleHeight);
    const lanes = [this.lanes(this.step, data.measured ? 'Measured' : 'Predicted', false,
                              legend.bottom)];
    if (this.below) lanes.push(this.lanes(this.below, 'Predicted', true, lanes[0].bottom));
    const height = lanes[lanes.length - 1].bottom + margin / 2;
    this.svg.setAttribute('viewBox', `0 0 ${this.width} ${height}`);
    this.svg.setAttribute('width', document.body.clientWidth);
    this.svg.setAttribute('height', height * document.body.clientWidth / this.width);
    this.svg.innerHTML = [
      element('title', {}, escapeXml(data.title)), this.definitions(height),
      rect(0, 0, this.width, height, { class: 'bg' }),
      text(margin, margin + 14, data.title,
           { class: 'ink', 'font-size': 20, 'font-weight': 'bold' }),
      text(margin, margin + 36, this.step.headline, { class: 'mute', 'font-size': 13 }),
      legend.drawn, ...lanes.map(({ drawn }) => drawn)].join('\n');
  }

  // Names differ between the pictures of a page.
  definitions(height) {
    return element('defs', {},
                   hatching('hatch' + this.index, 6, 1.4, { class: 'wait' }, { class: 'hatch' }),
                   arrowHead('values' + this.index, { class: 'forward' }),
                   arrowHead('grads' + this.index, { class: 'backward' }),
                   element('clipPath', { id: 'clip' + this.index },
                           rect(left, 0, this.chart, height)));
  }

  get hatched() { return { fill: `url(#hatch${this.index})` }; }

  arrow(kind, parts, attributes = {}) {
    return path(parts, { class: kind + ' arrow', 'marker-end': `url(#${kind}${this.index})`,
                         ...attributes });
  }

  // The meaning of the colours, in as many rows as it takes, and where it ends.
  legend(y) {
    const all = [this.step, this.below].filter(Boolean).flatMap(step => step.lanes);
    const kinds = new Set(all.flatMap(lane => lane.actions).filter(takesTime).map(({ kind }) => kind));
    if (all.some(lane => lane.reductions.length > 0)) kinds.add('reduce');
    const sent = new Set(this.step.transfers.map(({ kind }) => kind));
    const drawn = [];
    let x = margin;
    const entry = (content, symbolWidth, symbol) => {
      const width = symbolWidth + textWidth(content, 11.5);
      if (x + width > this.width - margin) [x, y] = [margin, y + 20];
      drawn.push(symbol ? symbol() : '',
                 text(x + symbolWidth, y + 10, content, { class: 'mute', 'font-size': 11.5 }));
      x += width + 16;
    };
    const chip = (fill, content) => entry(content, 22, () => rect(x, y, 16, 12, { rx: 2, ...fill }));
    for (const [kind, name] of Object.entries(kindNames)) {
      if (kinds.has(kind)) chip({ class: kind }, name);
    }
    if (kinds.has('wait')) chip(this.hatched, 'waits for a message');
    chip({ class: 'ground' }, 'idle');
    if (this.peak > 0) chip({ class: 'area' }, 'activations kept');
    for (const [kind, name] of [['values', 'values'], ['grads', 'gradients']]) {
      if (sent.has(kind)) entry(name, 24, () => this.arrow(kind, ['M', x, y + 6, 'h', 18]));
    }
    if (this.step.lanes.some(lane => stagesOf(lane).length > 1)) {
      entry("darker: a rank's next stages", 0);
    }
    return { drawn: drawn.join(''), bottom: y + legendHeight };
  }

  // The heading, the lanes of ranks and their axis, and where they end.
  lanes(step, heading, isSmall, y) {
    const bar = isSmall ? 18 : 26;
    const pitch = bar + (isSmall ? 6 : 16 + (this.peak > 0 ? memoryGap + memoryHeight : 0));
    const top = y + headingHeight, bottom = top + pitch * step.lanes.length;
    const isOwn = isSmall && own && own.checked;
    const length = isOwn ? step.makespan :
        Math.max(this.step.makespan, this.below ? this.below.makespan : 0);
    const shown = { from: this.from * length, to: this.to * length };
    const x = time =>
        left + (length > 0 ? (time - shown.from) / (shown.to - shown.from) * this.chart : 0);
    const yOf = lane => top + pitch * lane;
    const isShown = ({ start, end }) => end >= shown.from && start <= shown.to;
    const chart = [
      ...step.lanes.map((lane, l) => this.ground(step, lane, x, yOf(l), bar, isSmall)),
      ...(isSmall ? [] : step.transfers.map(sent => this.transfer(step, sent, x, yOf, bar))),
      ...step.lanes.flatMap((lane, l) => {
        const stages = stagesOf(lane);
        return [...lane.actions.filter(takesTime).filter(isShown).map(action =>
                    this.action(action, stages.indexOf(action.stage), x, yOf(l), bar)),
                ...lane.reductions.filter(isShown).map(reduction =>
                    this.reduction(reduction, x, yOf(l) + bar))];
      }),
      line(x(step.makespan), top - 6, x(step.makespan), bottom, { class: 'end' })];
    const drawn = [
      text(margin, y + 14, heading, { class: 'ink', 'font-size': 13, 'font-weight': 'bold' }),
      text(this.width - margin, y + 14, 'idle',
           { class: 'mute', 'font-size': 11.5, 'text-anchor': 'end' }),
      this.axis(shown, x, top - 6, bottom),
      element('g', { 'clip-path': `url(#clip${this.index})` }, chart),
      ...step.lanes.map((lane, l) => this.labels(lane, yOf(l), bar, isSmall))];
    return { drawn: element('g', { class: 'lanes' }, drawn), bottom: bottom + axisHeight };
  }

  axis({ from, to }, x, top, bottom) {
    if (!(to > from)) return '';
    const apart = tick(to - from, Math.max(4, this.chart / 140));
    const first = Math.ceil(from / apart);
    const times = Array.from({ length: Math.floor(to / apart) - first + 1 },
                             (_, i) => (first + i) * apart);
    return times.map(time => line(x(time), top, x(time), bottom, { class: 'grid' }) +
        text(x(time), bottom + 13, this.tickLabel(time, apart, to),
             { class: 'mute', 'font-size': 10.5, 'text-anchor': 'middle' })).join('');
  }

  tickLabel(time, apart, to) {
    if (time === 0) return '0';
    const [size, unit] = inSlots ? [1, ''] :
        to >= 1e6 ? [1e6, ' s'] : to >= 1e3 ? [1e3, ' ms'] : [1, ' us'];
    const places = Math.max(0, -Math.floor(Math.log10(apart / size) + 1e-9));
    return (time / size).toFixed(places) + unit;
  }

  // The ground of a lane, and the memory below it.
  ground(step, lane, x, y, bar, isSmall) {
    const ground = rect(x(0), y, x(step.makespan) - x(0), bar, { class: 'ground', rx: 2 });
    if (isSmall || this.peak === 0) return ground;
    const bottom = y + bar + memoryGap + memoryHeight;
    const curve = ['M', x(0), bottom];
    let before = 0;
    for (const { end, keeps } of lane.actions) {
      if (keeps === before) continue;
      before = keeps;
      curve.push('H', x(end), 'V', bottom - keeps / this.peak * (memoryHeight - 2));
    }
    curve.push('H', x(step.makespan));
    return ground + path([...curve, 'V', bottom, 'z'], { class: 'area' }) +
        path(curve, { class: 'curve' });
  }

  // The names on the left of a lane and the figures on its right.
  labels(lane, y, bar, isSmall) {
    const middle = y + bar / 2 + 4, right = this.width - margin;
    const drawn = [
      text(margin, isSmall ? middle : y + 12, 'rank ' + lane.rank, { class: 'ink', 'font-size': 12 }),
      text(right, middle, percent(lane.idle),
           { class: 'bad', 'font-size': isSmall ? 11.5 : 13, 'text-anchor': 'end' })];
    if (!isSmall) {
      const stages = stagesOf(lane);
      const below = this.hasReplicas ? 'replica ' + lane.replica :
          (stages.length > 1 ? 'stages ' : 'stage ') + stages.join(', ');
      drawn.push(text(margin, y + 25, fitText(below, labels - 8, 10.5),
                      { class: 'mute', 'font-size': 10.5 }));
    }
    if (!isSmall && this.peak > 0) {
      drawn.push(text(right, y + bar + memoryGap + memoryHeight - 6,
                      'keeps ' + formatMemory(peakOf(lane)),
                      { class: 'mute', 'font-size': 10.5, 'text-anchor': 'end' }));
    }
    return drawn.join('');
  }

  transfer(step, { kind, from, send, to, receive }, x, yOf, bar) {
    const sent = step.lanes[from].actions[send], received = step.lanes[to].actions[receive];
    const isDown = to > from;
    const y1 = yOf(from) + (isDown ? bar : 0), y2 = yOf(to) + (isDown ? 0 : bar);
    const x1 = x(sent.end), x2 = x(received.end), bend = (y2 - y1) * 0.4;
    return this.arrow(kind, ['M', x1, y1, 'C', x1, y1 + bend, x2, y2 - bend, x2, y2],
                      { 'data-m': sent.m });
  }

  action(action, stage, x, y, bar) {
    const begin = x(action.start), time = x(action.end) - begin;
    const width = Math.max(leastBar, time > 4 ? time - hair : time);
    const shade = isCompute(action) && stage > 0 ? ' shade' + Math.min(stage, 3) : '';
    const fill = action.kind === 'wait' ? this.hatched : { class: action.kind + shade };
    const number = String(action.m);
    return element('g', { 'data-m': number }, element('title', {}, escapeXml(
        tooltip(`${action.name}: ${action.text}`, action))),
                   rect(begin, y, width, bar, { rx: 1.5, ...fill }),
                   isCompute(action) && time >= textWidth(number, numberSize) + 2 ?
                       text(begin + time / 2, y + bar / 2 + 3.8, number, { class: 'num' }) : '');
  }

  // A thin bar between a lane and the memory below it.
  reduction(reduction, x, y) {
    const begin = x(reduction.start);
    return element('g', { 'data-m': '-1' },
                   element('title', {}, escapeXml(tooltip(reduction.text, reduction))),
                   rect(begin, y + 0.5, Math.max(leastBar, x(reduction.end) - begin - leastBar), 3.5,
                        { class: 'reduce' }));
  }
}

// --- the page ---

const cells = (row, tag) => element('tr', {}, row.map(cell => element(tag, {}, escapeXml(cell))));
const navigation = [
  '<span>wheel: zoom; drag: move; double click: all</span>',
  data.measured && data.predicted ?
      '<label><input type="checkbox" id="own"> prediction on a scale of its own</label>' : '',
  data.steps.length > 1 ? element('select', { 'aria-label': 'step' }, data.steps.map(
      step => element('option', {}, escapeXml(step.name)))) : '',
  '<button>save picture</button>'].join('\n');
main.innerHTML = element('nav', {}, navigation) + data.steps.map(step => element('section', {},
    '<svg xmlns="http://www.w3.org/2000/svg"></svg>',
    element('div', { class: 'table' }, element('table', {}, step.table.map(
        (row, i) => cells(row, i === 0 ? 'th' : 'td')))))).join('');

const own = main.querySelector('#own'), choice = main.querySelector('select');
const sections = [...main.querySelectorAll('section')];
const pictures = sections.map((section, i) => new Picture(section, data.steps[i], i));
const drawAll = () => pictures.forEach(picture => picture.draw());
const chosen = () => choice ? choice.selectedIndex : 0;
const show = () => sections.forEach((section, i) => { section.hidden = i !== chosen(); });
if (own) {
  own.checked = data.predicted.makespan < data.steps[0].makespan / 2;
  own.addEventListener('change', drawAll);
}
if (choice) choice.addEventListener('change', show);
main.querySelector('button').addEventListener('click', () => save(pictures[chosen()].svg));
addEventListener('resize', drawAll);
drawAll();
show();
