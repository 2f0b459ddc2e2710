// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/file.h"
#include "checkpoint/safetensors.h"

namespace smp::checkpoint {

/// The version of the folder format that this build writes, and the newest it reads.
constexpr int64_t kFormatVersion = 3;

/// The index's name inside a checkpoint folder.
constexpr const char* kIndexFile = "index.json";

/// A stored tensor: its type and shape, the file of the folder that holds it, and its bytes' XXH64.
struct TensorEntry {
  TensorSpec spec;
  std::string file;
  uint64_t hash = 0;
};

/// State of the random streams: with these two a restarted run draws the numbers that the
/// uninterrupted one would have drawn.
struct RandomState {
  uint64_t seed = 0;
  std::map<std::string, uint64_t> step_calls;  ///< Calls so far of each step function, by name.
};

/// The state of the run in a checkpoint, besides tensors.
struct RunState {
  int64_t step = 0;             ///< Optimizer steps done.
  int64_t gradient_shards = 1;  ///< Fixes the order of gradient sums, see docs on numerics.
  RandomState random;
  nlohmann::json user_content = nlohmann::json::object();
  /// State of schedulers, loss scalers and the like, by name.
  nlohmann::json extra = nlohmann::json::object();
};

/// The table of contents of a checkpoint folder, `index.json` in memory.
///
/// The optimizer is described by JSON that this folder does not interpret but for merging the
/// parts of several ranks: "state" (an object by parameter name), "param_groups" (an array of
/// {"type", "options", "params"}, whose "params" are sorted where they are written) and any other
/// keys but "tensors". Its tensors are named
/// "parameter/field".
struct Index {
  std::map<std::string, uint64_t> files;       ///< Size in bytes of every shard file.
  std::map<std::string, TensorEntry> model;    ///< The model's tensors by stored name.
  std::map<std::string, std::string> aliases;  ///< Other name of a tied tensor -> stored one.
  nlohmann::json optimizer = nlohmann::json::object();
  std::map<std::string, TensorEntry> optimizer_tensors;
  RunState run;

  /// The entry of a model tensor by any of its names, or null.
  const TensorEntry* find_model(const std::string& name) const;

  /// The checksum of the text that was parsed; empty for an index that was made otherwise.
  std::string checksum;

  /// The text of `index.json`: indented, one tensor a line, with its own checksum. Throws
  /// CheckpointError if it has more than `most` bytes, as no index that is read.
  std::string to_text(uint64_t most = kMostText) const;

  /// Parses and checks the text of an `index.json`. `path` is for messages only. Throws
  /// CheckpointError with the file and the JSON path of the error, also if the checksum is not the
  /// text's.
  static Index from_text(const std::string& text, const std::string& path);

  /// Adds the tensors, files and optimizer of another rank's part; `run` stays. Throws
  /// CheckpointError if both hold the same name, or differ about a parameter group.
  void merge(const Index& part);
};

/// Whether the text of an index, which may be damaged, says that a version of this library wrote
/// it.
bool names_format(const std::string& text);

/// Gives the text of an index its checksum: the XXH64 of the text with zeros in its place.
std::string with_checksum(std::string text);

}  // namespace smp::checkpoint
