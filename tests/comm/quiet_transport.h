// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "comm/transport.h"

namespace smp::comm {

/// A transport of ranks of one host that moves nothing: all that is asked of it is whether some
/// rank has aborted.
class QuietTransport : public Transport {
 public:
  explicit QuietTransport(bool has_core_for_each_rank = true)
      : has_core_for_each_rank_(has_core_for_each_rank) {}

  void start(PendingMessage) override {}
  void poll() override {}
  bool wait_until(Clock::time_point, const std::function<bool()>& ready) override {
    return ready();
  }
  void notify() override {}
  int make_context(const GroupState&, int) override { return 0; }
  bool shares_memory(int, int) const override { return true; }
  bool has_core_for_each_rank() const override { return has_core_for_each_rank_; }
  void abort(int, const std::string& reason) noexcept override { set_abort_text(reason); }

 private:
  const bool has_core_for_each_rank_;
};

}  // namespace smp::comm
