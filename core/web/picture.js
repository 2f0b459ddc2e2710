// SPDX-License-Identifier: Apache-2.0
// Functions that the pages share: elements of pictures as text, texts of numbers, and "save".

const data = JSON.parse(document.getElementById('data').textContent);
const main = document.querySelector('main');

const escapeXml = text => String(text).replace(/[&<>"]/g, c => '&#' + c.charCodeAt(0) + ';');

// An element as text. Lengths are rounded to a tenth of a pixel; children are text of elements.
function element(name, attributes = {}, ...children) {
  const written = Object.entries(attributes)
      .filter(([, value]) => value !== undefined)
      .map(([key, value]) => ` ${key}="${
          typeof value === 'number' ? Math.round(value * 10) / 10 : escapeXml(value)}"`);
  return `<${name}${written.join('')}>${children.flat().join('')}</${name}>`;
}

const text = (x, y, content, attributes = {}) =>
    element('text', { x, y, ...attributes }, escapeXml(content));
const line = (x1, y1, x2, y2, attributes = {}) => element('line', { x1, y1, x2, y2, ...attributes });
const rect = (x, y, width, height, attributes = {}) =>
    element('rect', { x, y, width, height, ...attributes });

// A path of commands and coordinates.
const path = (parts, attributes = {}) => element('path', {
  d: parts.map(part => typeof part === 'number' ? Math.round(part * 10) / 10 : part).join(' '),
  ...attributes });

// The head of an arrow. SVG cannot take over the colour of a line, so there is one for each.
const arrowHead = (id, attributes) =>
    element('marker', { id, viewBox: '0 0 8 8', refX: 7, refY: 4, markerWidth: 7, markerHeight: 7,
                        markerUnits: 'userSpaceOnUse', orient: 'auto-start-reverse' },
            element('path', { d: 'M0,0.5 L8,4 L0,7.5 z', ...attributes }));

// A pattern of slanted lines.
const hatching = (id, size, thick, ground, lines) =>
    element('pattern', { id, width: size, height: size, patternUnits: 'userSpaceOnUse',
                         patternTransform: 'rotate(45)' },
            rect(0, 0, size, size, ground), rect(0, 0, thick, size, lines));

// About how wide a text is: letters of common sans serif fonts have this mean width.
const textWidth = (content, size) => 0.56 * size * content.length;

// The text, with an ellipsis in its middle where it is wider. The end of a path says the most.
function fitText(content, width, size) {
  const letters = Math.floor(width / textWidth('m', size));
  if (content.length <= letters || letters < 5) return content;
  const tail = Math.floor((letters - 1) * 2 / 3);
  return content.slice(0, letters - 1 - tail) + '…' + content.slice(content.length - tail);
}

// Three digits, without zeros at the end.
const digits = (number, count = 3) => String(Number(number.toPrecision(count)));

function formatTime(us) {
  const [size, unit] = us < 1e3 ? [1, 'us'] : us < 1e6 ? [1e3, 'ms'] : [1e6, 's'];
  return digits(us / size) + ' ' + unit;
}

function formatBytes(bytes) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  for (; bytes >= 999.5 && unit + 1 < units.length; unit += 1) bytes /= 1024;
  return bytes.toFixed(unit === 0 || bytes >= 99.95 ? 0 : 1) + ' ' + units[unit];
}

const percent = share => (100 * share).toFixed(1) + '%';
const counted = (number, noun, plural = noun + 's') => number + ' ' + (number === 1 ? noun : plural);

// 1, 2 or 5 times a power of ten, such that `length` has about `parts` of them.
function tick(length, parts) {
  const rough = length / parts, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find(factor => rough <= factor * power * 1.0001);
}

// The picture as a file of its own, in the style of the page.
function save(svg) {
  const copy = svg.cloneNode(true);
  copy.setAttribute('xmlns', 'http://www.w3.org/2000/svg');
  const style = document.createElementNS('http://www.w3.org/2000/svg', 'style');
  style.textContent = document.querySelector('style').textContent;
  copy.prepend(style);
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(copy)],
                                           { type: 'image/svg+xml' }));
  link.download = document.title.replace(/[^\w.-]+/g, '_') + '.svg';
  link.click();
  URL.revokeObjectURL(link.href);
}
