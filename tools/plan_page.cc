// SPDX-License-Identifier: Apache-2.0
#include "tools/plan_page.h"

#include <fmt/format.h>

#include "core/svg.h"

namespace smp::tools {
namespace {

constexpr const char* kStyle =
    "body{margin:0;overflow:hidden;background:#fff}"
    "svg{display:block;width:100vw;height:100vh;cursor:grab;user-select:none;touch-action:none}";

constexpr const char* kScript = R"js(
const svg = document.querySelector('svg');
const kMost = 50;  // times the whole
const whole = (({ x, y, width, height }) => ({ x, y, width, height }))(svg.viewBox.baseVal);
let view = whole, held = null;

function show(next) {
  view = next;
  svg.setAttribute('viewBox', [view.x, view.y, view.width, view.height].join(' '));
}

// Where in the picture the pointer is.
function at(event) {
  return new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
}

svg.addEventListener('wheel', event => {
  event.preventDefault();
  const { x, y } = at(event), least = whole.width / kMost;
  const width = Math.max(least, Math.min(whole.width, view.width * 1.002 ** event.deltaY));
  const factor = width / view.width;
  show(width === whole.width ? whole : {
    x: x - (x - view.x) * factor, y: y - (y - view.y) * factor,
    width, height: view.height * factor });
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
)js";

}  // namespace

std::string to_html(const std::string& svg, const std::string& title) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\">\n<head>\n"
      "<meta charset=\"utf-8\"/>\n<meta name=\"viewport\" content=\"width=device-width\"/>\n"
      "<title>{}</title>\n<style>{}</style>\n</head>\n<body>\n{}"
      "<script>//<![CDATA[{}//]]></script>\n</body>\n</html>\n",
      core::escape_xml(title), kStyle, svg, kScript);
}

}  // namespace smp::tools
