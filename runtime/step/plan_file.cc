// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/plan_file.h"

#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "comm/communicator.h"
#include "core/check.h"
#include "core/json.h"
#include "core/log.h"
#include "partitioner/best_order.h"
#include "partitioner/plan_file.h"

namespace smp::runtime {
namespace {

/// The content of the file on world rank 0; empty if there is none.
std::string read_for_all(const Job& job, const std::string& path) {
  std::string text;
  if (job.rank() == 0) {
    std::ifstream in(path, std::ios::binary);
    if (in) text.assign(std::istreambuf_iterator<char>(in), {});
  }
  return comm::broadcast_bytes(*job.world(), text, 0);
}

/// The file's plan as the one to keep, if it is for this graph and these partitions.
std::shared_ptr<const partitioner::Plan> previous_plan(const graph::Graph& graph,
                                                       const std::string& text, int partitions,
                                                       const std::string& path) {
  if (text.empty()) return nullptr;
  try {
    return std::make_shared<const partitioner::Plan>(
        partitioner::plan_from_json(graph, text, partitions, path));
  } catch (const Error& error) {
    core::log_info(c10::str("The partition is made anew. ", core::text_without_prefix(error)));
    return nullptr;
  }
}

}  // namespace

partitioner::Plan plan_by_file(const Job& job, const graph::Graph& graph,
                               partitioner::PartitionOptions options) {
  const auto path = job.config().partition_file();
  if (!path) return partitioner::partition_in_best_order(graph, options);
  const std::string text = read_for_all(job, *path);
  const int partitions = options.partitions();
  if (job.config().load_partition()) {
    SMP_CHECK_WITH(ConfigError, !text.empty(), *path,
                   ": cannot load the partition: there is no such file on world rank 0, or it is "
                   "empty. Run once without \"load_partition\" to save one.");
    return partitioner::plan_from_json(graph, text, partitions, *path);
  }
  options.previous(previous_plan(graph, text, partitions, *path));
  auto plan = partitioner::partition_in_best_order(graph, options);
  if (job.rank() == 0) {
    core::write_file(*path, partitioner::plan_to_json(graph, plan), "cannot write the partition",
                     "Give \"partition_file\" a path that can be written");
  }
  return plan;
}

}  // namespace smp::runtime
