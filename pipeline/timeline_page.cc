// SPDX-License-Identifier: Apache-2.0
#include "pipeline/timeline_page.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "core/check.h"
#include "core/svg.h"
#include "pipeline/timeline_picture.h"
#include "pipeline/timeline_script.h"
#include "pipeline/trace.h"

namespace smp::pipeline {
namespace {

constexpr const char* kStyle = R"(
:root{color-scheme:light dark}
body{margin:0;font:14px/1.45 Helvetica,Arial,sans-serif;color:#1f2933;background:#fff}
nav{display:flex;gap:20px;justify-content:flex-end;align-items:center;padding:12px 28px 0;
color:#616e7c;font-size:12.5px}
nav select{font:inherit;padding:2px 6px}
.scroll{overflow-x:auto}
.scroll svg{display:block;touch-action:pan-y;cursor:grab;user-select:none}
table{border-collapse:collapse;margin:8px auto 24px;font-size:13px}
th,td{padding:4px clamp(4px,.8vw,14px);text-align:right;border-bottom:1px solid #dde2e7;
font-variant-numeric:tabular-nums}
th{color:#616e7c;font-weight:normal}
[data-m]{transition:opacity .1s}
.focus [data-m]{opacity:.15}
.focus [data-m].on{opacity:1}
@media (prefers-color-scheme:dark){
body{color:#e6eaee;background:#10171f}th,td{border-color:#2c3844}th,nav{color:#98a4b1}}
)";

std::string cells(const std::vector<std::string>& row, const char* tag) {
  std::string html = "<tr>";
  for (const std::string& cell : row) {
    html += fmt::format("<{0}>{1}</{0}>", tag, core::escape_xml(cell));
  }
  return html + "</tr>\n";
}

std::string html_table(const std::vector<std::vector<std::string>>& rows) {
  std::string html = "<table>\n" + cells(rows.front(), "th");
  for (size_t row = 1; row < rows.size(); ++row) html += cells(rows[row], "td");
  return html + "</table>\n";
}

/// What stands above the pictures: how to move them, and the choice of a step.
std::string navigation(const Timeline& timeline, const std::vector<StepTimeline>& steps) {
  std::string html = "<nav><span>wheel: zoom; drag: move; double click: all</span>\n";
  if (!timeline.measured.empty() && timeline.predicted) {
    html +=
        "<label><input type=\"checkbox\" id=\"own\"/> prediction on a scale of its own</label>\n";
  }
  if (steps.size() > 1) {
    html += "<select aria-label=\"step\">\n";
    for (const StepTimeline& step : steps) {
      html += fmt::format("<option>{}</option>\n", core::escape_xml(step.name));
    }
    html += "</select>";
  }
  return html + "</nav>\n";
}

void write(const std::string& text, const std::string& path) {
  std::ofstream out(path, std::ios::binary);
  out << text << std::flush;
  SMP_CHECK_WITH(ConfigError, out.good(), path, ": the timeline cannot be written: ",
                 std::strerror(errno), ". Give a path in a folder that can be written.");
}

}  // namespace

std::string to_html(const Timeline& timeline) {
  const std::vector<StepTimeline> steps = shown_steps(timeline);
  std::string html = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\">\n<head>\n"
      "<meta charset=\"utf-8\"/>\n<meta name=\"viewport\" "
      "content=\"width=device-width\"/>\n<title>{}</title>\n<style>{}{}</style>\n</"
      "head>\n<body>\n{}",
      core::escape_xml(timeline.title), kStyle, picture_style(), navigation(timeline, steps));
  for (size_t i = 0; i < steps.size(); ++i) {
    html += "<section>\n<div class=\"scroll\">\n" + to_svg(timeline, i, /*with_style=*/false) +
            "</div>\n<div class=\"scroll\">\n" + html_table(table_of(steps[i], timeline)) +
            "</div>\n</section>\n";
  }
  // A page is XML too if its script stays clear of markup.
  return html +
         fmt::format("<script>//<![CDATA[{}//]]></script>\n</body>\n</html>\n", kTimelineScript);
}

TimelineFiles timeline_files(const std::string& path) {
  std::string name = path;
  const std::string ending = std::filesystem::path(path).extension();
  if (ending == ".html" || ending == ".json") name.erase(name.size() - ending.size());
  return {name + ".html", name + ".json"};
}

TimelineFiles write_timeline(const Timeline& timeline, const std::string& path) {
  TimelineFiles files = timeline_files(path);
  write(to_html(timeline), files.page);
  write(to_trace(timeline), files.trace);
  return files;
}

}  // namespace smp::pipeline
