// SPDX-License-Identifier: Apache-2.0
#include "core/svg.h"

#include <fmt/format.h>

#include "core/text.h"

namespace smp::core {
namespace {

/// The mean width of a letter of common sans serif fonts, in font sizes.
constexpr double kLetter = 0.56;
constexpr const char* kEllipsis = "\u2026";

bool continues(char byte) { return (byte & 0xC0) == 0x80; }

}  // namespace

std::string escape_xml(const std::string& text) {
  std::string result;
  // XML has no control characters, and a browser shows no other bytes than UTF-8.
  for (const char c : printable_lines(text)) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

double text_width(const std::string& text, double size) {
  return kLetter * size * static_cast<double>(text.size());
}

std::string fit_text(const std::string& text, double width, double size) {
  const auto letters = static_cast<size_t>(width / (kLetter * size));
  if (text.size() <= letters || letters < 5) return text;
  const size_t tail = (letters - 1) * 2 / 3;  // the end of a path says more than its beginning
  size_t end = letters - 1 - tail, begin = text.size() - tail;
  while (end > 0 && continues(text[end])) --end;  // characters of UTF-8 stay whole
  while (begin < text.size() && continues(text[begin])) ++begin;
  return text.substr(0, end) + kEllipsis + text.substr(begin);
}

void Svg::rect(double x, double y, double width, double height, const std::string& attributes) {
  body_ += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" {}/>\n",
                       x, y, width, height, attributes);
}

void Svg::line(double x1, double y1, double x2, double y2, const std::string& attributes) {
  body_ += fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n", x1,
                       y1, x2, y2, attributes);
}

void Svg::path(const std::string& data, const std::string& attributes) {
  body_ += fmt::format("<path d=\"{}\" {}/>\n", data, attributes);
}

void Svg::text(double x, double y, const std::string& text, const std::string& attributes) {
  body_ += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, attributes,
                       escape_xml(text));
}

void Svg::begin_group(const std::string& tooltip) {
  body_ += "<g>\n";
  if (!tooltip.empty()) body_ += "<title>" + escape_xml(tooltip) + "</title>\n";
}

void Svg::end_group() { body_ += "</g>\n"; }

std::string Svg::finish(double width, double height, const std::string& title,
                        const std::string& background) const {
  const std::string ground =
      background.empty() ? "" : "<rect width=\"100%\" height=\"100%\" " + background + "/>\n";
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
             "viewBox=\"0 0 {0:.0f} {1:.0f}\" font-family=\"Helvetica, Arial, sans-serif\">\n"
             "<title>{2}</title>\n",
             width, height, escape_xml(title)) +
         ground + body_ + "</svg>\n";
}

}  // namespace smp::core
