// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace smp::core {

/// Text of an SVG picture, element by element. `attributes` are as in SVG: `fill="#fff"`.
class Svg {
 public:
  void rect(double x, double y, double width, double height, const std::string& attributes);
  void line(double x1, double y1, double x2, double y2, const std::string& attributes);
  void path(const std::string& data, const std::string& attributes);
  /// One line of text; what the browser shows when the pointer rests on it is for `begin_group`.
  void text(double x, double y, const std::string& text, const std::string& attributes);

  /// The elements up to `end_group` belong together; `tooltip` may be empty.
  void begin_group(const std::string& tooltip);
  void end_group();

  /// As it stands in the file: a script can find it, a browser shows it.
  void raw(const std::string& element) { body_ += element; }

  /// The whole picture; `background` are the attributes of the ground, none if empty.
  std::string finish(double width, double height, const std::string& title,
                     const std::string& background = "fill=\"#ffffff\"") const;

 private:
  std::string body_;
};

/// `text` with &, <, > and " replaced, and as escapes ("\x1b") what XML cannot hold.
std::string escape_xml(const std::string& text);

/// `text`, shortened with an ellipsis in the middle to fit `width` at font size `size`. Widths are
/// those of an average sans serif font.
std::string fit_text(const std::string& text, double width, double size);

/// About how wide a text is.
double text_width(const std::string& text, double size);

}  // namespace smp::core
