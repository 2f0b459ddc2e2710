// SPDX-License-Identifier: Apache-2.0
// Draws a plan: a column for each stage with its boxes of operators, lines for the values that go
// between them, and the step as predicted. The wheel zooms the picture, dragging moves it.
// `data` is described in tools/plan_page.cc.

// All lengths are in pixels.
const margin = 28, titleHeight = 62, column = 216, gutter = 108, padding = 14;
const arcSpace = 16;  // left of the boxes, for lines that skip boxes of the stage
const header = 74, boxHeight = 42, boxGap = 14;
const laneHeight = 24;  // of a line that passes above or below other stages
const laneStep = 6, chartRow = 26, chartLabel = 84, leastChart = 620, legendHeight = 34;
const mostZoom = 50;  // times the whole
const tones = 8;

const { stages, boxes } = data;
const ranks = data.timeline.length;
const toneOf = rank => 'tone' + rank % tones;
const small = { class: 'mute', 'font-size': 11 };

const columnX = stage => margin + stage * (column + gutter);
const leftOf = box => columnX(boxes[box].stage) + padding + arcSpace;
const rightOf = box => columnX(boxes[box].stage) + column - padding;
const middleOf = box => boxes[box].y + boxHeight / 2;
const span = ({ from, to }) => [boxes[from].stage, boxes[to].stage].sort((a, b) => a - b);

// Gives each line around the columns a number, 0 for the nearest to them, such that short ones
// run next to the columns and none over another; returns how many there are.
function number(lines) {
  const taken = [];
  const length = edge => span(edge)[1] - span(edge)[0];
  for (const edge of [...lines].sort((a, b) => length(a) - length(b))) {
    const [first, last] = span(edge);
    let n = taken.findIndex(others => !others.some(([a, b]) => first < b && a < last));
    if (n < 0) n = taken.push([]) - 1;
    taken[n].push([first, last]);
    edge.lane = n;
  }
  return taken.length;
}

const isSkip = edge => boxes[edge.to].stage > boxes[edge.from].stage + 1;
const skips = data.between.filter(isSkip), neighbours = data.between.filter(edge => !isSkip(edge));
const panelY = margin + titleHeight + laneHeight * number(skips);
const inColumn = stages.map(() => 0);
for (const box of boxes) box.y = panelY + header + inColumn[box.stage]++ * (boxHeight + boxGap);
const panelHeight = header + Math.max(1, ...inColumn) * (boxHeight + boxGap) + padding - boxGap;
const chartY = panelY + panelHeight + 20 + laneHeight * number(data.ties);
const width = 2 * margin + Math.max(stages.length * (column + gutter) - gutter, leastChart);
const height = chartY + 34 + ranks * chartRow + 30 + legendHeight + margin / 2;
const largest = Math.max(1, ...data.between.map(({ bytes }) => bytes));
const largestShare = Math.max(...boxes.map(({ share }) => share));

// A bar for `share` of 1, its meaning before and its value behind.
function meter(x, y, meaning, value, share) {
  const before = 52, behind = 62, length = column - 2 * padding - before - behind;
  return text(x, y + 7, meaning, small) +
      element('rect', { x: x + before, y, width: length, height: 7, rx: 3.5, fill: '#fff' }) +
      rect(x + before, y, Math.max(2, length * share), 7, { rx: 3.5, class: 'bar' }) +
      text(x + column - 2 * padding, y + 7, value, { class: 'ink end', 'font-size': 11 });
}

function drawColumn(stage, index) {
  const x = columnX(index) + padding;
  const most = name => Math.max(...stages.map(other => other[name])) || 1;
  return element('g', { class: toneOf(stage.rank) },
      rect(x - padding, panelY, column, panelHeight, { rx: 10, class: 'ground' }),
      text(x, panelY + 22, 'Stage ' + index, { class: 'dark bold', 'font-size': 15 }),
      text(x + column - 2 * padding, panelY + 22, 'partition ' + stage.rank,
           { class: 'mute end', 'font-size': 12 }),
      meter(x, panelY + 35, 'time', formatTime(stage.time_us), stage.time_us / most('time_us')),
      meter(x, panelY + 51, 'memory', formatBytes(stage.memory), stage.memory / most('memory')));
}

function drawBox(box, index) {
  const x = leftOf(index), { y } = box, wide = rightOf(index) - x;
  const share = largestShare > 0 ? (wide - 18) * box.share / largestShare : 0;
  return element('g', { class: toneOf(stages[box.stage].rank) },
      element('title', {}, escapeXml(box.text)),
      rect(x, y, wide, boxHeight, { rx: 6, class: 'box' }),
      text(x + 9, y + 16, fitText(box.name, wide - 18, 12),
           { class: 'ink', 'font-size': 12, 'font-weight': 600 }),
      text(x + 9, y + 30, counted(box.operators, 'operator'), { ...small, 'font-size': 10.5 }),
      text(x + wide - 9, y + 30, percent(box.share), { class: 'mute end', 'font-size': 10.5 }),
      largestShare > 0 ? rect(x + 9, y + 35, Math.max(1, share), 3, { rx: 1.5, class: 'bar' }) : '');
}

// --- lines ---

// Between boxes of a stage: down to the next one, or around those between.
function drawInside({ from, to }) {
  const style = { class: 'flow inside arrow', 'marker-end': 'url(#flow)' };
  const x = leftOf(from);
  if (to === from + 1) {
    const middle = (x + rightOf(from)) / 2;
    return line(middle, boxes[from].y + boxHeight, middle, boxes[to].y - 1, style);
  }
  const out = x - Math.min(arcSpace + padding - 5, 7 + 2.5 * (to - from));
  const y1 = middleOf(from) + 8, y2 = middleOf(to) - 8;
  return path(['M', x, y1, 'C', out, y1, out, y2, x, y2], style);
}

function edgeStyle({ bytes, gradient_bytes: back }, kind) {
  return { class: `${kind} arrow${back > 0 ? '' : ' forward'}`,
           'stroke-width': 1.2 + 2.4 * Math.sqrt(bytes / largest),
           'marker-end': `url(#${kind})`, 'marker-start': back > 0 ? `url(#${kind})` : undefined };
}

const edgeLabel = ({ tensors, bytes }) =>
    formatBytes(bytes) + (tensors === 1 ? '' : ' in ' + tensors);

// Lies on lines, so on a ground of its own.
function label(x, y, content, kind) {
  const wide = textWidth(content, 11) + 8;
  return rect(x - wide / 2, y - 8, wide, 16, { rx: 4, class: 'under' }) +
      text(x, y + 4, content, { class: kind + ' middle', 'font-size': 11, 'font-weight': 600 });
}

// From each stage to the next; the labels of a gutter are kept apart.
function drawNeighbours() {
  const lines = neighbours.map(edge => {
    const x1 = rightOf(edge.from) + 3, y1 = middleOf(edge.from);
    const x2 = leftOf(edge.to) - 3, y2 = middleOf(edge.to);
    const bend = Math.max(24, Math.abs(x2 - x1) * 0.45);
    return path(['M', x1, y1, 'C', x1 + bend, y1, x2 - bend, y2, x2, y2], edgeStyle(edge, 'flow'));
  });
  const labels = stages.map((_, stage) => {
    const heights = neighbours.filter(edge => boxes[edge.from].stage === stage)
        .map(edge => [(middleOf(edge.from) + middleOf(edge.to)) / 2, edgeLabel(edge)])
        .sort(([a], [b]) => a - b);
    let free = 0;
    return heights.map(([y, content]) => {
      const at = Math.max(y, free);
      free = at + 18;
      return label(columnX(stage) + column + gutter / 2, at, content, 'ink');
    });
  });
  return [...lines, ...labels.flat()].join('');
}

// Right, up or down to `lane`, along it, back, and right again, with round corners.
function detour(x1, y1, out, lane, into, x2, y2) {
  const r = 7, leave = lane < y1 ? -r : r, come = lane < y2 ? r : -r;
  return ['M', x1, y1, 'H', out - r, 'q', r, 0, r, leave, 'V', lane - leave, 'q', 0, leave, r, leave,
          'H', into - r, 'q', r, 0, r, come, 'V', y2 - come, 'q', 0, come, r, come, 'H', x2];
}

// Lines around the columns between their ends, and their labels on them. A line back to an earlier
// stage goes the same way, told from its other end.
function drawLanes(edges, isAbove, styleOf, labelOf, kind) {
  const drawn = edges.map(edge => {
    const isBack = boxes[edge.from].stage > boxes[edge.to].stage;
    const [first, last] = isBack ? [edge.to, edge.from] : [edge.from, edge.to];
    const beside = 12 + laneStep * edge.lane;
    const y = isAbove ? panelY - 14 - laneHeight * edge.lane
                      : panelY + panelHeight + 16 + laneHeight * edge.lane;
    const out = columnX(boxes[first].stage) + column + beside;
    const into = columnX(boxes[last].stage) - beside;
    const shift = isAbove ? -9 : 9;  // apart from the lines to the neighbours
    return [path(detour(rightOf(first) + 3, middleOf(first) + shift, out, y, into,
                        leftOf(last) - 3, middleOf(last) + shift), styleOf(edge)),
            label((out + into) / 2, y, labelOf(edge), kind)];
  });
  return [...drawn.map(([lane]) => lane), ...drawn.map(([, name]) => name)].join('');
}

// --- the step ---

function drawChart() {
  const x = margin + chartLabel, wide = width - 2 * margin - chartLabel;
  const top = chartY + 34, bottom = top + ranks * chartRow, step = data.step_us;
  const meaning = data.trains ? 'full colour: forward, hatched: backward, with the microbatch'
                              : 'with the microbatch';
  const heading = text(margin, chartY + 18, 'The step, as predicted',
                       { class: 'ink bold', 'font-size': 14 }) +
      text(margin + 200, chartY + 18, meaning, small);
  if (!(step > 0)) return heading;
  const scale = wide / step, apart = tick(step, 5);
  const times = Array.from({ length: Math.floor(step * 1.0001 / apart) + 1 }, (_, i) => i * apart);
  return heading + times.map(time =>
      line(x + time * scale, top - 2, x + time * scale, bottom + 4, { class: 'grid' }) +
      text(x + time * scale, bottom + 17, time === 0 ? '0' : formatTime(time),
           { class: 'mute middle', 'font-size': 10.5 })).join('') +
      data.timeline.map((computes, rank) =>
          drawTimeline(computes, rank, x, top + rank * chartRow, scale)).join('');
}

function drawTimeline(computes, rank, x, y, scale) {
  const drawn = computes.map(({ start, end, m, back }) => {
    const wide = (end - start) * scale;
    const fill = back ? { fill: `url(#back${rank % tones})`, class: 'compute' }
                      : { class: 'compute bar' };
    return rect(x + start * scale, y + 2, Math.max(0.5, wide), chartRow - 6, fill) +
        (wide < textWidth(String(m), 10) + 3 ? '' :
            text(x + (start + end) / 2 * scale, y + 15.5, m,
                 { class: back ? 'dark bold middle' : 'bold middle', 'font-size': 10,
                   fill: back ? undefined : '#fff' }));
  });
  return element('g', { class: toneOf(rank) },
                 text(margin, y + 15, 'partition ' + rank, { class: 'dark', 'font-size': 12 }), drawn);
}

function drawLegend() {
  const y = height - margin / 2 - 12, drawn = [];
  let x = margin;
  const entry = (style, meaning) => {
    drawn.push(line(x, y, x + 34, y, style), text(x + 42, y + 4, meaning, small));
    x += 42 + textWidth(meaning, 11) + 18;
  };
  const both = { bytes: largest, gradient_bytes: 1 }, forward = { bytes: largest, gradient_bytes: 0 };
  const any = (edges, back) => edges.some(edge => (edge.gradient_bytes > 0) === back);
  if (any(neighbours, true)) entry(edgeStyle(both, 'flow'), 'sent per microbatch, gradient back');
  if (any(neighbours, false)) entry(edgeStyle(forward, 'flow'), 'forward only');
  if (any(skips, true)) entry(edgeStyle(both, 'skip'), 'skips a stage');
  if (any(skips, false)) entry(edgeStyle(forward, 'skip'), 'skips a stage, forward only');
  if (data.ties.length > 0) {
    entry({ class: 'tied' }, 'tied: one parameter, read by several stages');
  }
  return drawn.join('');
}

// --- the page ---

const definitions = element('defs', {},
    ['flow', 'skip', 'tied'].map(kind => arrowHead(kind, { class: kind + 'Text' })),
    data.timeline.slice(0, tones).map((_, rank) => element('g', { class: toneOf(rank) },
        hatching('back' + rank, 5, 1.6, { class: 'fill' }, { class: 'bar' }))));

main.innerHTML = element('svg', { xmlns: 'http://www.w3.org/2000/svg',
                                  viewBox: `0 0 ${width} ${height}`, width, height },
    element('title', {}, escapeXml(data.title)), definitions,
    rect(0, 0, width, height, { class: 'bg' }),
    text(margin, margin + 16, data.title, { class: 'ink bold', 'font-size': 20 }),
    text(margin, margin + 38, data.headline, { class: 'mute', 'font-size': 13 }),
    stages.map(drawColumn), data.inside.map(drawInside), boxes.map(drawBox), drawNeighbours(),
    drawLanes(skips, true, edge => edgeStyle(edge, 'skip'), edgeLabel, 'skipText'),
    drawLanes(data.ties, false, () => ({ class: 'tied arrow' }), tie => tie.label, 'tiedText'),
    drawChart(), drawLegend()) + '<button>save picture</button>';

const svg = main.querySelector('svg');
const whole = { x: 0, y: 0, width, height };
let view = whole, held = null;

function show(next) {
  view = next;
  svg.setAttribute('viewBox', [view.x, view.y, view.width, view.height].join(' '));
}

// Where in the picture the pointer is.
const at = event =>
    new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());

svg.addEventListener('wheel', event => {
  event.preventDefault();
  const { x, y } = at(event);
  const wide = Math.max(width / mostZoom, Math.min(width, view.width * 1.002 ** event.deltaY));
  const factor = wide / view.width;
  show(wide === width ? whole : { x: x - (x - view.x) * factor, y: y - (y - view.y) * factor,
                                  width: wide, height: view.height * factor });
}, { passive: false });
svg.addEventListener('pointerdown', event => {
  held = at(event);
  svg.setPointerCapture(event.pointerId);
});
svg.addEventListener('pointermove', event => {
  if (!held) return;
  const { x, y } = at(event);
  show({ ...view, x: view.x + held.x - x, y: view.y + held.y - y });
});
svg.addEventListener('pointerup', () => { held = null; });
svg.addEventListener('dblclick', () => show(whole));
main.querySelector('button').addEventListener('click', () => save(svg));
