// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/hash_recording.h"

#include <utility>

namespace smp::runtime {

HashRecording::HashRecording(Runtime& runtime, std::shared_ptr<const RecordedRows> rows)
    : rows_(std::move(rows)) {
  auto& log = runtime.execution.hash_log;
  if (log == nullptr) {
    log = std::make_shared<graph::HashLogWriter>(*runtime.config().record_hashes(), runtime.rank(),
                                                 runtime.topology().size());
  }
  log_ = log;
}

void HashRecording::write(const std::string& step_function, uint64_t call,
                          const pipeline::StepRecords& records,
                          const std::function<uint64_t(int microbatch)>& global) {
  const uint64_t graph = rows_->fingerprint();
  if (!log_->knows(graph)) log_->add_graph(graph, rows_->rows());
  log_->begin_step({step_function, call, graph});
  for (const auto& [of, record] : records) {
    log_->begin_microbatch(global(of.second));
    for (const pipeline::TensorHash& hash : record.hashes) {
      const auto row = rows_->row_of(hash);
      if (row) log_->add(*row, static_cast<size_t>(hash.number), hash.hash);
    }
  }
  log_->end_step();
}

}  // namespace smp::runtime
