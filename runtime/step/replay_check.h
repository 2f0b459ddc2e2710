// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "graph/graph.h"
#include "graph/graph_map.h"
#include "graph/random.h"
#include "pipeline/observer.h"
#include "pipeline/stage.h"
#include "runtime/runtime.h"
#include "runtime/step/recorded_rows.h"

namespace smp::runtime {

/// A microbatch that a stage has run, and all that it takes to run it again.
struct ReplayCase {
  uint64_t graph = 0;  ///< fingerprint of the captured one
  int32_t stage = 0;
  int32_t microbatch = 0;  ///< microbatch of the rank
  graph::RandomKey key;
  std::vector<graph::ConstantOverride> constants;
  std::vector<pipeline::TensorHash> hashes;
  std::vector<at::Tensor> given;  ///< tensors given, see `StageRecord`
};

/// The configuration's `replay_check` for the steps of one program: every so many steps one
/// microbatch of one stage runs again, on another rank of the pipeline, else on the next replica,
/// else on the same rank; and replicas compare their weights. Internal.
///
/// Which stage and microbatch follows from the step's number alone, so nothing is negotiated. The
/// rank that runs it again is the pipeline's last, which is the first that has nothing left to do,
/// or the one before where the stage is the last rank's. It is sent all that the stage was given,
/// parameters and buffers as they were included, when that has done its backward, and runs it when
/// its own part of the schedule is over, while gradients are being reduced.
class ReplayCheck final : public pipeline::Observer {
 public:
  /// `partitioned` outlives it.
  ReplayCheck(Runtime& runtime, const pipeline::PartitionedGraph& partitioned, int microbatches,
              std::shared_ptr<const RecordedRows> rows);

  struct Step {
    std::string function;                                         ///< the step function's name
    std::vector<graph::RandomKey> keys;                           ///< keys by microbatch
    std::vector<std::vector<graph::ConstantOverride>> constants;  ///< one a microbatch, or one
    bool has_all_replicas = true;  ///< false: some run out of batches, and nothing is checked
  };

  /// A step of training begins.
  void begin_step(Step step);
  /// Whether this rank runs the microbatch of the stage that is to run again.
  bool watches(int stage, int microbatch) const;
  /// Has that microbatch recorded.
  void watch(pipeline::StageRecord& record);
  /// Takes the record when the microbatch is done, for the rank that runs it again.
  void on_end(size_t index, const pipeline::Action& action) override;

  /// The schedule has run: runs this rank's cases again. Throws a `CorruptionError`, the same on
  /// all ranks, where bits differ. Collective over the world, in steps where a check is due.
  void finish();

 private:
  /// Ranks of `group`, which may be this one; -1: none.
  struct Peers {
    CommGroup group = CommGroup::kPp;
    int from = -1;  // the rank whose work runs again here
    int to = -1;    // the rank that runs this one's work again
  };

  Peers peers_for(int stage) const;
  int me() const { return runtime_.rank_in(peers_.group); }
  pipeline::Stage& stage(int index);
  std::vector<graph::TensorMeta> metas(int stage);
  void take();
  void send(const ReplayCase& run);
  void send(const std::vector<at::Tensor>& parts);
  std::optional<ReplayCase> receive();
  std::optional<std::string> replay();
  std::optional<std::string> compare(const ReplayCase& run);

  Runtime& runtime_;
  const pipeline::PartitionedGraph& partitioned_;
  const int microbatches_;
  const std::shared_ptr<const RecordedRows> rows_;
  std::map<int, std::unique_ptr<pipeline::Stage>> stages_;  // stages to run again
  std::set<int> refused_;                                   // those that cannot
  Step step_;
  // In a step where a check is due:
  bool is_due_ = false;
  std::optional<ReplayCase> case_;           // the case to run again; null: none can
  pipeline::StageRecord* record_ = nullptr;  // record of that
  Peers peers_;
  // Tensors that are sent, until they have been taken.
  std::vector<at::Tensor> sent_;
  std::vector<WorkPtr> sends_;
};

}  // namespace smp::runtime
