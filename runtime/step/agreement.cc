// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/agreement.h"

#include <c10/util/StringUtil.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>
#include <utility>

#include "core/check.h"
#include "graph/content.h"
#include "runtime/first_difference.h"
#include "runtime/step/microbatches.h"

namespace smp::runtime {

uint64_t hash_inputs(const std::vector<at::Tensor>& tensors) {
  uint64_t hash = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) hash = graph::hash_content(tensor, hash);
  }
  return hash;
}

namespace {

/// The digest that a rank compares with the others'.
struct Digest {
  uint64_t name;  // hash of the step function's name
  uint64_t graph;
  uint64_t constants;
  uint64_t overrides;
  uint64_t places;  // on which side of the bus each input lies, where hashes are others
  uint64_t inputs;
  uint64_t microbatches;  // that lengths give, which hashes on a device may not

  std::string bytes() const { return {reinterpret_cast<const char*>(this), sizeof(*this)}; }
  static Digest of(const std::string& bytes) {
    Digest digest{};
    std::memcpy(&digest, bytes.data(), sizeof(digest));
    return digest;
  }
};

/// Hashes inputs where they lie.
void hash_in_place(const std::vector<at::Tensor>& tensors, Digest& digest) {
  std::vector<at::Tensor> defined;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    defined.push_back(tensor);
    digest.places = digest.places * 3 + (tensor.is_cpu() ? 1 : 2);
  }
  const auto hashes = graph::hashes_in_place(defined);
  digest.inputs = XXH64(hashes.data(), hashes.size() * sizeof(hashes[0]), 0);
}

/// The digests of all ranks, and their notes.
std::vector<Digest> exchange(comm::Communicator& group, const Digest& mine, const std::string& note,
                             std::vector<std::string>& notes) {
  std::vector<Digest> all;
  notes.clear();
  for (const std::string& bytes : comm::all_gather_bytes(group, mine.bytes() + note)) {
    all.push_back(Digest::of(bytes));
    notes.push_back(bytes.substr(sizeof(Digest)));
  }
  return all;
}

/// A graph as lines that errors can quote; each operator with its number and module.
std::string describe_graph(const graph::Graph& graph) {
  std::istringstream lines(graph.to_string());
  std::ostringstream out;
  size_t next = 0;
  for (std::string line; std::getline(lines, line);) {
    if (next < graph.operators.size() && line == graph.line(next)) {
      const auto& op = graph.operators[next];
      out << "operator " << next++ << " (" << op.name();
      if (!op.scope.empty()) out << ", in module \"" << op.scope << "\"";
      out << "): ";
    }
    out << line << "\n";
  }
  return out.str();
}

/// The first elements of a tensor and a hash of all.
std::string preview(const at::Tensor& tensor) {
  constexpr int64_t kShown = 4;
  const at::Tensor flat = tensor.detach().cpu().reshape({-1}).to(at::kDouble);
  std::ostringstream out;
  out << "[";
  for (int64_t i = 0; i < std::min(kShown, flat.numel()); ++i) {
    out << (i == 0 ? "" : ", ") << flat[i].item<double>();
  }
  out << (flat.numel() > kShown ? ", ...]" : "]") << " (hash " << graph::hash_content(tensor)
      << ")";
  return out.str();
}

/// The overrides of a run, one a line: equal where `describe_constants` is, and quick to make.
std::string describe_overrides(const std::vector<std::vector<graph::ConstantOverride>>& constants,
                               const std::vector<std::vector<graph::ContentOverride>>& contents) {
  std::ostringstream out;
  for (size_t m = 0; m < constants.size(); ++m) {
    for (const auto& change : constants[m]) {
      out << change.operator_index << " " << change.argument << " "
          << graph::constant_to_string(change.value) << "\n";
    }
    for (const auto& change : contents[m]) {
      out << change.value << " " << hash_inputs({change.content}) << "\n";
    }
  }
  return out.str();
}

/// All constants in effect in a microbatch, one a line, for error texts.
std::string describe_constants(const graph::Graph& graph,
                               const std::vector<graph::ConstantOverride>& constants,
                               const std::vector<graph::ContentOverride>& contents) {
  std::map<std::pair<int, int>, c10::IValue> changed;
  for (const auto& change : constants) {
    changed[{change.operator_index, change.argument}] = change.value;
  }
  std::map<graph::ValueId, at::Tensor> changed_contents;
  for (const auto& change : contents) changed_contents[change.value] = change.content;
  std::ostringstream out;
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const auto& op = graph.operators[i];
    const auto& schema = op.handle.schema();
    for (size_t a = 0; a < op.arguments.size(); ++a) {
      if (op.arguments[a].kind != graph::Argument::Kind::kConstant) continue;
      if (!graph::is_patchable(schema, a)) continue;
      const auto found = changed.find({static_cast<int>(i), static_cast<int>(a)});
      out << "argument \"" << schema.arguments()[a].name() << "\" of operator " << i << " ("
          << op.name() << ") is "
          << graph::constant_to_string(found == changed.end() ? op.arguments[a].constant
                                                              : found->second)
          << "\n";
    }
  }
  for (size_t id = 0; id < graph.values.size(); ++id) {
    const auto& value = graph.values[id];
    if (!value.content.defined()) continue;
    const auto found = changed_contents.find(static_cast<graph::ValueId>(id));
    const at::Tensor& content = found == changed_contents.end() ? value.content : found->second;
    out << graph::to_string(value.kind) << " tensor %" << id << " of " << value.meta.to_string()
        << " holds " << preview(content) << "\n";
  }
  return out.str();
}

}  // namespace

StepFingerprints::StepFingerprints(const graph::Graph& graph)
    : graph(graph.fingerprint()), constants(graph.constants_fingerprint()) {}

std::vector<std::string> check_agreement(comm::Communicator& group, const StepTrace& step,
                                         const AgreeingRanks& who) {
  if (group.size() == 1) return {step.note};
  const std::string overrides = describe_overrides(step.constants, step.contents);
  Digest mine = {hash_of(step.name),
                 step.fingerprints.graph,
                 step.fingerprints.constants,
                 hash_of(overrides),
                 0,
                 0,
                 static_cast<uint64_t>(step.microbatches)};
  hash_in_place(step.inputs, mine);
  std::vector<std::string> notes;
  std::vector<Digest> all = exchange(group, mine, step.note, notes);
  const bool same_places = std::all_of(
      all.begin(), all.end(), [&](const Digest& digest) { return digest.places == all[0].places; });
  if (!same_places) {
    mine.places = 0;
    mine.inputs = hash_inputs(step.inputs);
    all = exchange(group, mine, step.note, notes);
  }
  std::vector<std::string> digests;
  for (const Digest& digest : all) digests.push_back(digest.bytes());
  const size_t other = first_other(digests);
  if (other == 0) return notes;
  const Digest &first = all[0], &second = all[other];
  const bool same_function = first.name == second.name;
  std::string text;
  if (!same_function) {
    text = step.name;
  } else if (first.graph != second.graph) {
    text = describe_graph(step.graph);
  } else {
    for (size_t m = 0; m < step.constants.size(); ++m) {
      text += describe_constants(step.graph, step.constants[m], step.contents[m]);
    }
  }
  const auto texts = comm::all_gather_bytes(group, text);
  const auto [a, b] = first_difference(texts[0], texts[other]);
  SMP_CHECK_WITH(UsageError, same_function, who.name, " 0 calls step function \"", a, "\", ",
                 who.name, " ", other, " of the same pipeline step function \"", b,
                 "\". All ranks of a pipeline must call the same step functions in the same order; "
                 "those without a name (StepOptions().name) are numbered as a rank makes them");
  const auto ranks = c10::str(who.name, " 0 and ", who.name, " ", other, " of one pipeline");
  SMP_CHECK_WITH(UsageError, first.graph == second.graph, "step function \"", step.name,
                 "\" calls other operators on ", ranks, ". The first difference: ", who.name,
                 " 0 has \"", a, "\", ", who.name, " ", other, " has \"", b,
                 "\". All ranks of a pipeline must take the same way through the function: what it "
                 "branches on must not depend on the rank");
  SMP_CHECK_WITH(UsageError, first.microbatches == second.microbatches, "step function \"",
                 step.name, "\" runs other numbers of microbatches on ", ranks, ": ",
                 first.microbatches, " and ", second.microbatches,
                 ". All ranks of a pipeline must pass the same inputs and give the step function "
                 "the same StepOptions().microbatches");
  const bool same_constants =
      first.constants == second.constants && first.overrides == second.overrides;
  SMP_CHECK_WITH(UsageError, same_constants, "step function \"", step.name,
                 "\" has other constants on ", ranks, ". First difference: \"", a, "\" against \"",
                 b,
                 "\". Numbers such as a loss weight must be the same on all ranks of a pipeline");
  core::fail<UsageError>("step function \"", step.name, "\" was given different batches on ", ranks,
                         ". All ranks of a pipeline must pass the same inputs; shard data by ",
                         who.share, ", not by smp::rank()");
}

void check_same_operators(comm::Communicator& replicas, const StepTrace& step) {
  struct Run {
    uint64_t graph;
    int64_t microbatches;
  };
  const Run mine = {step.fingerprints.graph, step.microbatches};
  std::vector<std::string> graphs;
  std::vector<int64_t> counts;
  for (const std::string& bytes : comm::all_gather_bytes(
           replicas, std::string(reinterpret_cast<const char*>(&mine), sizeof(mine)))) {
    Run run{};
    std::memcpy(&run, bytes.data(), sizeof(run));
    graphs.push_back(std::to_string(run.graph));
    counts.push_back(run.microbatches);
  }
  const size_t other = first_other(graphs);
  if (other == 0) {
    return check_same_microbatches(counts, step.name,
                                   "With \"sharded_data_parallel_degree\" above 1 replicas gather "
                                   "parameters together in each microbatch");
  }
  const auto texts = comm::all_gather_bytes(replicas, describe_graph(step.graph));
  const auto [a, b] = first_difference(texts[0], texts[other]);
  core::fail<UsageError>(
      "step function \"", step.name, "\" calls other operators on replica 0 and replica ", other,
      ". The first difference: replica 0 has \"", a, "\", replica ", other, " has \"", b,
      "\". With \"sharded_data_parallel_degree\" above 1 replicas gather "
      "parameters together, so all take the same way through the function, "
      "on batches of the same shapes");
}

}  // namespace smp::runtime
