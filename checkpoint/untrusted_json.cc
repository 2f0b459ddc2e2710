// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/untrusted_json.h"

#include "core/json.h"

namespace smp::checkpoint {

nlohmann::json parse_untrusted(const std::string& text) {
  using Json = nlohmann::json;
  const core::JsonOutline outline = core::outline_of(text);
  if (outline.is_malformed || outline.is_too_deep || !outline.repeated.empty()) {
    return Json(Json::value_t::discarded);
  }
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

}  // namespace smp::checkpoint
