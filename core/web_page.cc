// SPDX-License-Identifier: Apache-2.0
#include "core/web_page.h"

#include <c10/util/StringUtil.h>

#include <cstring>

#include "core/check.h"
#include "core/text.h"
#include "core/web_files.h"

namespace smp::core {
namespace {

std::string web_file(const std::string& name) {
  const WebFile* file = kWebFiles;
  while (file->name != nullptr && name != file->name) ++file;
  SMP_INTERNAL_ASSERT(file->name != nullptr, "no file \"", name, "\" is built in");
  return file->text;
}

/// The text within HTML; a browser shows no other bytes than UTF-8.
std::string escaped(std::string text) {
  text = printable_lines(text);
  c10::ReplaceAll(text, "&", "&amp;");
  c10::ReplaceAll(text, "<", "&lt;");
  return text;
}

}  // namespace

std::string web_page(const std::string& name, const std::string& title, const std::string& data) {
  std::string json = data;
  c10::ReplaceAll(json, "<", "\\u003c");  // a tag in a string would end the script
  std::string page;
  const std::string frame = web_file("page.html");
  size_t end = 0;
  const auto fill = [&](const char* slot, const std::string& content) {
    const size_t at = frame.find(slot, end);
    page += frame.substr(end, at - end) + content;
    end = at + std::strlen(slot);
  };
  fill("@title@", escaped(title));
  fill("@style@", web_file(name + ".css"));
  fill("@data@", json);
  fill("@script@", web_file("picture.js") + web_file(name + ".js"));
  return page + frame.substr(end);
}

}  // namespace smp::core
