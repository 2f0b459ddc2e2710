// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/readers.h"

#include <ATen/ops/ones.h>

#include <cstdint>
#include <cstring>

#include "checkpoint/index.h"
#include "checkpoint/pretrained.h"
#include "checkpoint/safetensors.h"
#include "graph/hash_log.h"
#include "graph/serialize.h"
#include "partitioner/cost_model.h"
#include "partitioner/plan_file.h"
#include "pipeline/schedule_file.h"
#include "pipeline/verifier.h"
#include "smp/config.h"
#include "smp/name_map.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/partitioner/graph_builder.h"
#include "tests/temp_folder.h"

namespace smp::testing {
namespace {

const graph::Graph& example_graph() {
  static const graph::Graph example = [] {
    partitioner::testing::GraphBuilder builder;
    builder.scope = "net";
    const auto weight = builder.parameter("net.weight", at::ones({2, 2}));
    builder.output(builder.op("aten::relu", {weight}));
    return builder.graph();
  }();
  return example;
}

void verify(const pipeline::Schedule& schedule) {
  pipeline::verify(schedule, pipeline::chain_edges(schedule.stages()));
}

void read_config(const std::string& text) { Config::from_json(text, "text").validate(); }

/// Reads an index with its checksum put right, which no input would guess.
void read_index(const std::string& text) {
  const size_t key = text.find("\"checksum\": \"");
  const bool has_digits = key != std::string::npos && key + 13 + 16 <= text.size();
  checkpoint::Index::from_text(has_digits ? checkpoint::with_checksum(text) : text, "text")
      .to_text();
}

void read_safetensors(const std::string& text) {
  const MemoryFile file(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  checkpoint::SafetensorsReader(file.path());
}

void read_weight_map(const std::string& text) { checkpoint::parse_weight_map(text, "text"); }

void read_name_map(const std::string& text) {
  const MemoryFile file(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  const NameMap map = NameMap::from_file(file.path());
  for (const std::string name : {"net.0.weight", "net.weight", ""}) {
    map.of_theirs(name);
    map.of_ours(name);
  }
}

void read_csv(const std::string& text) { verify(pipeline::schedule_from_csv(text, "text")); }
void read_schedule(const std::string& text) { verify(pipeline::schedule_from_json(text, "text")); }
void read_actions(const std::string& text) { verify(pipeline::parse_schedule(text)); }
void read_plan(const std::string& text) {
  partitioner::plan_from_json(example_graph(), text, 1, "text");
}
void read_costs(const std::string& text) { partitioner::cost_model_from_json(text, "text"); }
void read_graph(const std::string& text) { graph::saved_graph_from_json(text, "text"); }

void read_hashes(const std::string& text) {
  const TempFolder folder;
  folder.write("rank_0.hashes", text);
  graph::HashLogReader log(folder.path());
  for (const auto& step : log.steps()) log.read(step);
}

}  // namespace

const std::vector<Reader>& small_readers() {
  static const std::vector<Reader> readers = {
      {"name map", read_name_map}, {"csv", read_csv},      {"schedule", read_schedule},
      {"actions", read_actions},   {"plan", read_plan},    {"costs", read_costs},
      {"graph", read_graph},       {"hashes", read_hashes}};
  return readers;
}

std::vector<Reader> all_readers() {
  std::vector<Reader> readers = {{"config", read_config},
                                 {"index", read_index},
                                 {"safetensors", read_safetensors},
                                 {"weight map", read_weight_map}};
  readers.insert(readers.end(), small_readers().begin(), small_readers().end());
  return readers;
}

std::string safetensors_file(const std::string& header) {
  const uint64_t size = header.size();
  std::string bytes(sizeof(size), '\0');
  std::memcpy(bytes.data(), &size, sizeof(size));
  return bytes + header + "data";
}

}  // namespace smp::testing
