// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/untrusted_json.h"

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace smp::checkpoint {
namespace {

using Json = nlohmann::json;

/// Looks at the events of a parser, without a tree: one that a callback watches while it is built
/// goes through all members of an object again for each object in it.
class Inspection final : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(int64_t) override { return true; }
  bool number_unsigned(uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(Json::binary_t&) override { return true; }
  bool start_object(std::size_t) override {
    keys_.emplace_back();
    return keys_.size() <= kMaxDepth;
  }
  /// The parser of a tree would keep the last of two values.
  bool key(std::string& name) override { return keys_.back().insert(name).second; }
  bool end_object() override {
    keys_.pop_back();
    return true;
  }
  bool start_array(std::size_t size) override { return start_object(size); }
  bool end_array() override { return end_object(); }
  bool parse_error(std::size_t, const std::string&, const Json::exception&) override {
    return false;
  }

 private:
  static constexpr std::size_t kMaxDepth = 256;

  std::vector<std::set<std::string>> keys_;  // those of the open objects; arrays have none
};

}  // namespace

nlohmann::json parse_untrusted(const std::string& text) {
  Inspection inspection;
  if (!Json::sax_parse(text, &inspection)) return Json(Json::value_t::discarded);
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

}  // namespace smp::checkpoint
