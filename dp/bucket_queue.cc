// SPDX-License-Identifier: Apache-2.0
#include "dp/bucket_queue.h"

#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <utility>

#include "dp/comm_errors.h"

namespace smp::dp {

BucketQueue::BucketQueue(std::vector<std::vector<size_t>> members, std::vector<std::string> names,
                         Policy policy)
    : members_(std::move(members)),
      names_(std::move(names)),
      policy_(std::move(policy)),
      bucket_of_(names_.size()) {
  for (size_t bucket = 0; bucket < size(); ++bucket) {
    for (size_t parameter : members_[bucket]) bucket_of_[parameter] = bucket;
  }
  reset();
}

void BucketQueue::reset() {
  ready_.assign(names_.size(), !policy_.awaits_all);
  awaited_.clear();
  for (const auto& members : members_) {
    awaited_.push_back(policy_.awaits_all ? members.size() : 0);
  }
  works_.assign(size(), nullptr);
  next_ = 0;
}

void BucketQueue::await(size_t parameter) {
  if (ready_[parameter]) ++awaited_[bucket_of_[parameter]];
  ready_[parameter] = false;
}

void BucketQueue::mark_ready(size_t parameter) {
  if (!ready_[parameter]) --awaited_[bucket_of_[parameter]];
  ready_[parameter] = true;
}

bool BucketQueue::start_ready() {
  while (!all_started() && awaited_[next_] == 0) start_next();
  return all_started();
}

void BucketQueue::start_all() {
  while (!all_started()) start_next();
}

void BucketQueue::start_next() {
  const size_t bucket = next_++;
  if (bucket >= policy_.most_under_way) wait_for(bucket - policy_.most_under_way);
  name_in_errors(bucket, [&] { works_[bucket] = policy_.start(bucket); });
}

void BucketQueue::wait_for(size_t bucket) {
  const WorkPtr work = std::exchange(works_[bucket], nullptr);
  if (work) name_in_errors(bucket, [&] { work->wait(); });
}

void BucketQueue::wait() {
  for (size_t bucket = 0; bucket < size(); ++bucket) wait_for(bucket);
}

/// Calls something that communicates for a bucket. Its errors say for which.
template <class Call>
void BucketQueue::name_in_errors(size_t bucket, const Call& call) const {
  const auto where = [&] {
    const auto& members = members_[bucket];
    return c10::str(" [while ", policy_.doing, " bucket ", bucket + 1, " of ", size(), ": ",
                    names_[members.front()],
                    members.size() > 1 ? " ... " + names_[members.back()] : "", policy_.advice,
                    "]");
  };
  with_where_in_errors(where, call);
}

at::Tensor used_by_any(const std::vector<std::vector<bool>>& used) {
  const at::Tensor result = at::zeros({static_cast<int64_t>(used.front().size())}, at::kByte);
  auto* any = result.mutable_data_ptr<uint8_t>();
  for (const auto& list : used) {
    for (size_t i = 0; i < list.size(); ++i) any[i] |= static_cast<uint8_t>(list[i]);
  }
  return result;
}

}  // namespace smp::dp
