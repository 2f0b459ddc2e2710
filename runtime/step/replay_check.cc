// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/replay_check.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "graph/content.h"
#include "pipeline/message.h"
#include "runtime/first_difference.h"
#include "runtime/parameters/parameter_shards.h"

namespace smp::runtime {

using pipeline::StageRecord;
using pipeline::TensorHash;

namespace {

/// Above those of the channels and of copies (pipeline/copies.cc).
constexpr comm::Tag kReplayTag = (1 << 19) + (1 << 18);

/// The first hash in which two records of a microbatch differ; null if none does. One that `again`
/// alone has is of a gradient that the other had added up elsewhere.
const TensorHash* find_difference(const std::vector<TensorHash>& run,
                                  const std::vector<TensorHash>& again, const RecordedRows& rows) {
  const auto key = [&](const TensorHash& hash) {
    return std::make_tuple(rows.place_of(hash), hash.id, hash.number);
  };
  const auto sorted = [&](const std::vector<TensorHash>& hashes) {
    std::map<decltype(key(hashes.front())), const TensorHash*> result;
    for (const TensorHash& hash : hashes) result.emplace(key(hash), &hash);
    return result;
  };
  const auto others = sorted(again);
  for (const auto& [place, hash] : sorted(run)) {
    const auto other = others.find(place);
    if (other == others.end() || other->second->hash != hash->hash) return hash;
  }
  return nullptr;
}

std::string bytes_of(const std::vector<uint64_t>& hashes) {
  return {reinterpret_cast<const char*>(hashes.data()), hashes.size() * sizeof(uint64_t)};
}

uint64_t hash_at(const std::string& bytes, size_t index) {
  uint64_t hash = 0;
  std::memcpy(&hash, bytes.data() + index * sizeof(hash), sizeof(hash));
  return hash;
}

/// The first of the parameters, or of their shards, of which ranks of the group hold other bits, as
/// a clause without a full stop. Collective over the group.
std::optional<std::string> differing_weight(const Runtime& runtime, comm::Communicator& group,
                                            const std::vector<const ParameterTable::Entry*>& of) {
  if (group.size() == 1) return std::nullopt;
  std::vector<at::Tensor> weights;
  for (const auto* entry : of) weights.push_back(entry->shard() ? entry->updated() : entry->tensor);
  const std::string mine = bytes_of(graph::hashes_in_place(weights));
  const auto digests = comm::all_gather_bytes(group, std::to_string(hash_of(mine)));
  if (first_other(digests) == 0) return std::nullopt;
  const auto all = comm::all_gather_bytes(group, mine);
  const auto ranks = comm::all_gather_bytes(group, std::to_string(runtime.rank()));
  const size_t other = first_other(all);
  size_t index = 0;
  while (hash_at(all[0], index) == hash_at(all[other], index)) ++index;
  const graph::TensorMeta meta = graph::TensorMeta::of(weights[index]);
  const std::string name =
      of[index]->shard() ? of[index]->name_on(runtime.rank()) : of[index]->name;
  return c10::str("parameter \"", name, "\", ", meta.to_string(), ", has other bits on world rank ",
                  ranks[other], " (hash ", hash_at(all[other], index),
                  ") than on its replica, world rank ", ranks[0], " (hash ", hash_at(all[0], index),
                  ")");
}

/// The same of all parameters that this rank owns: whole ones are on all replicas, shards on those
/// of a replication group. Collective over the replicas.
std::optional<std::string> differing_weight(const Runtime& runtime) {
  std::vector<const ParameterTable::Entry*> whole, shards;
  for (const auto& entry : runtime.table().entries()) {
    if (!entry.is_parameter() || !runtime.owns(entry)) continue;
    if (!entry.shard()) {
      whole.push_back(&entry);
    } else if (entry.updated().defined()) {
      shards.push_back(&entry);
    }
  }
  const auto found = differing_weight(runtime, *runtime.replicas(), whole);
  if (runtime.parameter_shards() == nullptr) return found;
  comm::Communicator& group = *runtime.parameter_shards()->replication_group();
  const auto in_shards = differing_weight(runtime, group, shards);
  return found ? found : in_shards;
}

/// The numbers of a case that are sent to the rank that runs it again, in the order of the message.
template <class Case, class Use>
void for_each_number(Case& run, const Use& use) {
  use(run.graph);
  use(run.stage);
  use(run.microbatch);
  use(run.key.seed);
  use(run.key.step_function);
  use(run.key.call);
  use(run.key.global_microbatch);
}

/// Those of each of its hashes, which follow.
template <class Hash, class Use>
void for_each_number_of_hash(Hash& hash, const Use& use) {
  use(hash.kind);
  use(hash.id);
  use(hash.number);
  use(hash.hash);
}

}  // namespace

ReplayCheck::ReplayCheck(Runtime& runtime, const pipeline::PartitionedGraph& partitioned,
                         int microbatches, std::shared_ptr<const RecordedRows> rows)
    : runtime_(runtime),
      partitioned_(partitioned),
      microbatches_(microbatches),
      rows_(std::move(rows)) {}

/// Replicas without a pipeline look after each other in a ring.
ReplayCheck::Peers ReplayCheck::peers_for(int stage) const {
  const int ranks = runtime_.topology().pp_size();
  if (ranks == 1) {
    const int count = runtime_.topology().rdp_size();
    const int me = runtime_.rank_in(CommGroup::kRdp);
    return {CommGroup::kRdp, (me + count - 1) % count, (me + 1) % count};
  }
  const int runs = partitioned_.plan.rank_of_stage[stage];
  const int again = runs == ranks - 1 ? ranks - 2 : ranks - 1;
  const int me = runtime_.rank_in(CommGroup::kPp);
  return {CommGroup::kPp, me == again ? runs : -1, me == runs ? again : -1};
}

void ReplayCheck::begin_step(Step step) {
  const int64_t number = runtime_.progress.training_steps + 1;
  const int64_t period = runtime_.config().replay_check();
  is_due_ = number % period == 0 && step.has_all_replicas;
  case_.reset();
  peers_ = {};
  if (!is_due_) return;
  step_ = std::move(step);
  if (runtime_.parameter_shards() != nullptr) return;
  const int64_t turn = number / period;
  const auto count = static_cast<int64_t>(partitioned_.plan.rank_of_stage.size());
  const auto index = static_cast<int>(turn % count);
  peers_ = peers_for(index);
  if (peers_.to == -1) return;
  const core::Refusal refusal = stage(index).program().why_not_again();
  if (!refusal) {
    case_.emplace();
    case_->graph = rows_->fingerprint();
    case_->stage = index;
    case_->microbatch = static_cast<int32_t>(turn / count % microbatches_);
    return;
  }
  if (peers_.to != me()) send({at::zeros({2}, at::kLong)});
  if (!refused_.insert(index).second) return;
  core::log_warning(c10::str("replay_check does not run stage ", index, " of step function \"",
                             step_.function, "\" again: ", *refusal));
}

bool ReplayCheck::watches(int stage, int microbatch) const {
  return is_due_ && case_ && case_->stage == stage && case_->microbatch == microbatch;
}

void ReplayCheck::watch(StageRecord& record) {
  record.keeps_given = true;
  record_ = &record;
}

void ReplayCheck::on_end(size_t /*index*/, const pipeline::Action& action) {
  if (!watches(action.stage, action.microbatch)) return;
  const bool has_backward = stage(action.stage).program().has_backward;
  if (has_backward ? action.makes_weight_gradients() : action.is_compute()) take();
}

/// A stage that holds no parameters until it is given some.
pipeline::Stage& ReplayCheck::stage(int index) {
  auto& stage = stages_[index];
  if (stage == nullptr) {
    stage = std::make_unique<pipeline::Stage>(partitioned_, index, /*microbatches=*/1,
                                              runtime_.table().tensors());
  }
  return *stage;
}

std::vector<graph::TensorMeta> ReplayCheck::metas(int stage) {
  std::vector<graph::TensorMeta> metas;
  const pipeline::StageProgram& program = this->stage(stage).program();
  for (graph::ValueId id : program.given()) metas.push_back(program.graph.values[id].meta);
  return metas;
}

/// The microbatch is done: it is sent at once, so that it is there when the other rank has time.
void ReplayCheck::take() {
  ReplayCase& run = *case_;
  const auto m = static_cast<size_t>(run.microbatch);
  run.key = step_.keys[m];
  run.constants = step_.constants[step_.constants.size() == 1 ? 0 : m];
  run.hashes = record_->hashes;
  run.given = std::exchange(record_->given, {});
  if (peers_.to == me()) return;
  send(run);
  run.given.clear();
}

void ReplayCheck::send(const ReplayCase& run) {
  std::vector<int64_t> numbers;
  const auto write = [&](auto number) { numbers.push_back(static_cast<int64_t>(number)); };
  for_each_number(run, write);
  for (const TensorHash& hash : run.hashes) for_each_number_of_hash(hash, write);
  std::vector<c10::IValue> constants;
  for (const auto& constant : run.constants) {
    if (constant.value.isCapsule()) continue;  // a leaf's call, elsewhere
    constants.insert(constants.end(), {constant.operator_index, constant.argument, constant.value});
  }
  auto header = torch::jit::pickle(
      c10::ivalue::Tuple::create({numbers, c10::ivalue::Tuple::create(std::move(constants))}));
  const pipeline::MessageLayout layout(metas(run.stage));
  const at::Tensor sizes = at::tensor({static_cast<int64_t>(header.size()), layout.nbytes()});
  const at::Tensor bytes = at::empty({static_cast<int64_t>(header.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), header.data(), header.size());
  send({sizes, bytes, layout.pack(run.given)});
}

void ReplayCheck::send(const std::vector<at::Tensor>& parts) {
  for (const at::Tensor& part : parts) {
    sent_.push_back(part);
    sends_.push_back(runtime_.group(peers_.group)->isend(part, peers_.to, kReplayTag));
  }
}

/// The case that another rank has run; nothing if that cannot run again, or is of another graph
/// than this rank's, as replicas may run in a step.
std::optional<ReplayCase> ReplayCheck::receive() {
  const auto take = [&](const at::Tensor& tensor) {
    runtime_.group(peers_.group)->recv(tensor, peers_.from, kReplayTag);
    return tensor;
  };
  const at::Tensor sizes = take(at::empty({2}, at::kLong));
  const auto* bytes = sizes.const_data_ptr<int64_t>();
  if (bytes[0] == 0) return std::nullopt;
  const at::Tensor pickled = take(at::empty({bytes[0]}, at::kByte));
  const at::Tensor message = take(at::empty({bytes[1]}, at::kByte));
  const auto header =
      torch::jit::unpickle(static_cast<const char*>(pickled.const_data_ptr()), bytes[0]).toTuple();
  const std::vector<int64_t> numbers = header->elements()[0].toIntVector();
  const auto constants = header->elements()[1].toTuple();
  auto next = numbers.begin();
  const auto read = [&](auto& number) {
    number = static_cast<std::decay_t<decltype(number)>>(*next++);
  };
  ReplayCase run;
  for_each_number(run, read);
  if (run.graph != rows_->fingerprint()) return std::nullopt;
  while (next != numbers.end()) for_each_number_of_hash(run.hashes.emplace_back(), read);
  for (size_t i = 0; i < constants->elements().size(); i += 3) {
    const auto* constant = &constants->elements()[i];
    run.constants.push_back({static_cast<int>(constant[0].toInt()),
                             static_cast<int>(constant[1].toInt()), constant[2]});
  }
  run.given = pipeline::MessageLayout(metas(run.stage)).unpack(message);
  return run;
}

/// The difference, as a clause without a full stop. Nothing: there is none, or it is not this
/// rank's to run again.
std::optional<std::string> ReplayCheck::replay() {
  if (peers_.from == -1) return std::nullopt;
  const auto run = peers_.from == me() ? std::exchange(case_, std::nullopt) : receive();
  return run ? compare(*run) : std::nullopt;
}

std::optional<std::string> ReplayCheck::compare(const ReplayCase& run) {
  pipeline::Stage& stage = this->stage(run.stage);
  stage.apply(run.constants, {});
  StageRecord again;
  stage.run_again(run.given, run.key, again);
  const TensorHash* found = find_difference(run.hashes, again.hashes, *rows_);
  if (found == nullptr) return std::nullopt;
  StageRecord third;
  stage.run_again(run.given, run.key, third);
  const auto hash_in = [&](const StageRecord& record) {
    for (const TensorHash& hash : record.hashes) {
      if (hash.is_of(*found)) return hash.hash;
    }
    return uint64_t{0};
  };
  const auto members = runtime_.topology().members(peers_.group, runtime_.rank());
  const int runs = members[peers_.from], runs_again = members[me()];
  const uint64_t first = found->hash, second = hash_in(again), last = hash_in(third);
  return c10::str(
      rows_->name_of(*found), " has other bits where microbatch ", run.key.global_microbatch,
      " of stage ", run.stage, " ran, world rank ", runs, " (hash ", first,
      "), than where it ran again on the same numbers, world rank ", runs_again, " (hash ", second,
      "); all before it on the stage is equal. A third run, on world rank ", runs_again, ", gave ",
      last == second ? "what the second gave: the first is the one to doubt"
      : last == first
          ? "what the first gave: the second is the one to doubt"
          : c10::str("neither (hash ", last, "): do not trust world rank ", runs_again));
}

void ReplayCheck::finish() {
  if (!is_due_) return;
  std::optional<std::string> found = replay();
  for (const WorkPtr& sending : sends_) sending->wait();
  sends_.clear();
  sent_.clear();
  case_.reset();
  is_due_ = false;
  const auto weight = differing_weight(runtime_);
  if (!found) found = weight;
  for (const std::string& text : comm::all_gather_bytes(*runtime_.world(), found.value_or(""))) {
    SMP_CHECK_WITH(CorruptionError, text.empty(), "replay_check, in training step ",
                   runtime_.progress.training_steps + 1, ", step function \"", step_.function,
                   "\": ", text,
                   ". No gradient of this step has been handed out. A processor or memory that "
                   "fails looks like this: go on from a checkpoint without the hosts of these "
                   "ranks. So does an operator that gives other bits each time, or ranks with "
                   "other processors or numbers of threads: see docs/recovery.md");
  }
}

}  // namespace smp::runtime
