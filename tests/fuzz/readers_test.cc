// SPDX-License-Identifier: Apache-2.0
// Names and sizes that no program gives, in every place where files have names: each reader takes
// them, or refuses them by a text that has an end and does nothing to a terminal.
#include "tests/fuzz/readers.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/reader.h"
#include "checkpoint/safetensors.h"
#include "core/check.h"
#include "core/text.h"
#include "exported/loaded_program.h"
#include "graph/hash_log.h"
#include "graph/serialize.h"
#include "pipeline/schedule_file.h"
#include "smp/config.h"
#include "smp/name_map.h"
#include "tests/temp_folder.h"

namespace smp::testing {
namespace {

/// Texts of a reader in which "@" stands for a name.
using Templates = std::map<std::string, std::vector<std::string>>;

const char* const kIndex = R"({"format": "smp-checkpoint", "format_version": 3,
  "checksum": "0000000000000000", "step": 1, "gradient_shards": 1,
  "random": {"seed": 0, "step_calls": {"@": 1}}, "user_content": {"@": "@"}, "extra": {"@": 1},
  "files": {"f": 8},
  "model": {"@": {"dtype": "F32", "shape": [1], "file": "f", "xxh64": "0000000000000000"}},
  "optimizer": {"param_groups": [{"type": "@", "options": {"@": "@"}, "params": ["@"]}],
    "state": {"@": {}},
    "tensors": {"@": {"dtype": "F32", "shape": [1], "file": "f", "xxh64": "0000000000000000"}}}})";

const char* const kPlan = R"({"format": "smp partition", "version": 1,
  "graph": {"operators": 1, "fingerprint": "@"}, "partitions": 1,
  "stages": [{"partition": 0, "first": 0, "last": 0, "from": "aten::relu in net",
              "to": "aten::relu in net", "modules": "@"}], "owners": {"@": 0}})";

const char* const kGraph = R"({"format": "smp graph", "version": 1, "fingerprint": "@",
  "alias_sets": 1, "inputs": [0], "outputs": [0], "roots": [], "schemas": ["@"],
  "values": [{"kind": "parameter", "name": "@", "dtype": "Float", "sizes": [1], "strides": [1],
    "device": "cpu", "requires_grad": true, "producer": -1, "alias_set": 0}], "operators": []})";

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

Templates json_templates() {
  return {
      {"config",
       {R"({"@": 1})", R"({"optimize": "@"})", R"({"partitions": {"@": "@"}})",
        R"({"@": 1, "@": 2})", R"({"smdistributed": {"@": {}}})",
        R"({"smdistributed": {"modelparallel": {"enabled": "@"}}})",
        R"({"smdistributed": {"modelparallel": {"enabled": true, "parameters": {"@": 1}}}})",
        R"({"smdistributed": {"modelparallel": {"enabled": true, "parameters": "@"}}})",
        R"({"mpi": {"enabled": true, "processes_per_host": "@"},
            "smdistributed": {"modelparallel": {"enabled": true}}})"}},
      {"index",
       {kIndex, replaced(kIndex, "\"f\": 8", "\"@\": 8"), replaced(kIndex, "\"F32\"", "\"@\""),
        replaced(kIndex, "\"file\": \"f\"", "\"file\": \"@\""),
        replaced(kIndex, "\"shape\": [1]", "\"shape\": \"@\""),
        replaced(kIndex, "[\"@\"]", "[\"@\", \"@\"]"), replaced(kIndex, "[\"@\"]", "[\"a\", 1]"),
        replaced(kIndex, "smp-checkpoint", "@"),
        replaced(kIndex, R"({"dtype": "F32",)", R"({"same_as": "@", "dtype": "F32",)"),
        replaced(kIndex, "\"step\": 1", "\"step\": \"@\"")}},
      {"weight map",
       {R"({"weight_map": {"@": "f"}})", R"({"weight_map": {"@": 3}})",
        R"({"weight_map": {"a": "/@"}})", R"({"weight_map": "@"})"}},
      {"name map",
       {R"({"format": "@"})", R"({"format": "smp-name-map", "optional_prefix": "@", "rules": []})",
        R"({"format": "smp-name-map", "rules": [{"theirs": "@", "ours": "@"}]})",
        R"({"format": "smp-name-map", "rules": [{"theirs": "@{a}", "ours": "@"}]})",
        R"({"format": "smp-name-map", "rules": [{"theirs": "{@}{@", "ours": "@"}]})",
        R"({"format": "smp-name-map", "rules": [{"theirs": "a", "ours": "b", "transform": "@"}]})"}},
      {"schedule",
       {R"({"format": "@"})",
        R"({"format": "smp schedule", "version": 1, "microbatches": 1, "backward": false,
            "rank_of_stage": [0], "actions": [["@"]]})",
        R"({"format": "smp schedule", "version": 1, "microbatches": 1, "backward": "@",
            "rank_of_stage": ["@"], "actions": [["0F0"]]})"}},
      {"plan",
       {kPlan, replaced(kPlan, "smp partition", "@"), replaced(kPlan, "aten::relu in net", "@"),
        replaced(kPlan, "\"first\": 0, \"last\": 0", "\"operators\": \"@\""),
        replaced(kPlan, "\"last\": 0", "\"last\": 7")}},
      {"graph",
       {kGraph, replaced(kGraph, "[\"@\"]", "[]"), replaced(kGraph, "smp graph", "@"),
        replaced(kGraph, "\"Float\"", "\"@\""), replaced(kGraph, "\"cpu\"", "\"@\""),
        replaced(kGraph, "\"parameter\"", "\"@\"")}},
      {"costs",
       {R"({"@": 1})", R"({"links": "@"})", R"({"compute": {"@": 1}})",
        R"({"compute": {"launch_us": "@"}})"}},
  };
}

Templates text_templates() {
  const std::string hashes = "smp hashes 1: rank 0 of 1\n";
  const std::string graph = hashes + "graph 00000000000077ab: 1 rows\n";
  return {{"csv", {"@", "0F0,@", "(0F0;@)OVERLAP_F_B"}},
          {"actions",
           {"@", "schedule ranks=@", "schedule ranks=1 microbatches=1 backward=@ rank_of_stage=0",
            "schedule ranks=1 microbatches=1 backward=no rank_of_stage=0\nrank 0: @"}},
          {"hashes",
           {"@", hashes + "@", hashes + "graph @: 1 rows\n", graph + "@\n",
            graph + "a\nstep 0 of graph 00000000000077ab: @\nmicrobatch 0\n0 0\nend\n",
            graph + "a\nstep 0 of graph 00000000000077ab: f\nmicrobatch @\n0 @\nend\n"}}};
}

struct Name {
  const char* what;
  std::string text;
};

std::vector<Name> names() {
  constexpr size_t kMuch = 100000;
  return {{"escapes", "\x1b[2J\x1b]0;x\x07\r\x7f"},
          {"a line", "x\n[smp] forged"},
          {"controls of two bytes",
           "\xc2\x9b"
           "31m\xc2\x85"},
          {"another direction", "\xe2\x80\xae \xe2\x80\xa8"},
          {"zero", std::string("a\0b", 3)},
          {"no UTF-8", "\xff\xfe"},
          {"nothing", ""},
          {"letters", std::string(size_t{1} << 20, 'x')},
          {"dots", std::string(kMuch, '.')},
          {"digits", std::string(kMuch, '7')},
          {"brackets", std::string(kMuch, '(')},
          {"placeholders", std::string(kMuch, '{')},
          {"a number", "2147483647F2147483647"},
          {"a path", "../../etc/passwd"}};
}

/// That a reader's words have an end, and no line that it has not made.
void expect_shown(const std::function<void()>& read) {
  std::string error;
  try {
    read();
  } catch (const Error& refused) {
    error = refused.what();
  } catch (const std::exception& other) {
    ADD_FAILURE() << other.what();
  }
  EXPECT_LE(error.size(), 40000u);
  EXPECT_EQ(core::printable_lines(error), error);
  EXPECT_EQ(error.find("\n[smp] forged"), std::string::npos) << error;
}

void expect_shown(const Reader& reader, const std::string& text) {
  expect_shown([&] { reader.read(text); });
}

const Reader& reader_called(const std::string& name) {
  static const std::vector<Reader> readers = all_readers();
  for (const Reader& reader : readers) {
    if (reader.name == name) return reader;
  }
  throw std::out_of_range(name);
}

/// The name as a string of JSON.
std::string in_json(const std::string& name) {
  try {
    const std::string quoted = nlohmann::json(name).dump();
    return quoted.substr(1, quoted.size() - 2);
  } catch (const nlohmann::json::exception&) {
    return name;  // no UTF-8
  }
}

TEST(Readers, TheTemplatesAreOfAll) {
  Templates all = json_templates();
  all.merge(text_templates());
  all["safetensors"];
  for (const Reader& reader : all_readers()) EXPECT_EQ(all.count(reader.name), 1u) << reader.name;
}

TEST(Readers, TakeOrRefuseNamesInJson) {
  for (const auto& [reader, templates] : json_templates()) {
    for (const auto& text : templates) {
      for (const Name& name : names()) {
        SCOPED_TRACE(std::string(reader) + ": " + name.what + " in " + text);
        expect_shown(reader_called(reader), replaced(text, "@", in_json(name.text)));
      }
    }
  }
}

TEST(Readers, TakeOrRefuseNamesInText) {
  for (const auto& [reader, templates] : text_templates()) {
    for (const auto& text : templates) {
      for (const Name& name : names()) {
        SCOPED_TRACE(std::string(reader) + ": " + name.what + " in " + text);
        expect_shown(reader_called(reader), replaced(text, "@", name.text));
      }
    }
  }
}

TEST(Readers, TakeOrRefuseNamesInHeaders) {
  for (const std::string header :
       {R"({"@":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", R"({"@":5})",
        R"({"@":{"dtype":"@","shape":[4],"data_offsets":[0,4]}})",
        R"({"@":{"dtype":"U8","shape":["@"],"data_offsets":[0,4]}})",
        R"({"@":{"dtype":"U8","shape":[4],"data_offsets":"@"}})",
        R"({"@":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}})"}) {
    for (const Name& name : names()) {
      SCOPED_TRACE(std::string(name.what) + " in " + header);
      expect_shown(reader_called("safetensors"),
                   safetensors_file(replaced(header, "@", in_json(name.text))));
    }
  }
}

/// The file is of another kind, or is not there.
TEST(Readers, ShowNamesOfFilesOnOneLine) {
  const std::map<std::string, std::function<void(const std::string&)>> openers = {
      {"config", Config::from_file},
      {"checkpoint", [](const std::string& path) { checkpoint::Reader reader(path); }},
      {"safetensors", [](const std::string& path) { checkpoint::SafetensorsReader reader(path); }},
      {"name map", NameMap::from_file},
      {"schedule", pipeline::load_schedule},
      {"graph", graph::load_graph},
      {"hashes", [](const std::string& path) { graph::HashLogReader reader(path); }},
      {"program", [](const std::string& path) { exported::LoadedProgram program(path); }}};
  const TempFolder folder;
  for (const std::string name : {"x\n[smp] forged", "\x1b[2J\r",
                                 "\xc2\x9b"
                                 "31m",
                                 "\xe2\x80\xae", "\xff"}) {
    const std::string file = folder.write(name, "@");
    for (const auto& [reader, open] : openers) {
      SCOPED_TRACE(reader + ": " + core::printable(name));
      expect_shown([&, open = open] { open(file); });
      expect_shown([&, open = open] { open(file + "/none"); });
      expect_shown([&, open = open] { open(folder.file("none" + name + ".json")); });
    }
  }
}

TEST(Readers, TakeOrRefuseAnyDepthAndLength) {
  constexpr size_t kDeep = 100000;
  std::string keys = "{", numbers = "[0";
  for (size_t i = 0; i < kDeep; ++i) {
    keys += (i == 0 ? "\"k" : ", \"k") + std::to_string(i) + "\": 1";
    numbers += ",0";
  }
  std::string objects;
  for (size_t i = 0; i < kDeep; ++i) objects += "{\"a\":";
  for (const Reader& reader : all_readers()) {
    for (const std::string& text :
         {std::string(), std::string(1, '\0'), std::string(kDeep, '['),
          std::string(kDeep, '[') + std::string(kDeep, ']'), objects, keys + "}", numbers + "]",
          std::string(kDeep, '\n'), std::string(kDeep, ','),
          "\"" + std::string(kDeep, 'x') + "\""}) {
      SCOPED_TRACE(std::string(reader.name) + ": " + core::printable(text, 40));
      expect_shown(reader, text);
      expect_shown(reader, safetensors_file(text));
    }
  }
}

}  // namespace
}  // namespace smp::testing
