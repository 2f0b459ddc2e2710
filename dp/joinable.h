// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "comm/communicator.h"
#include "smp/join.h"

namespace smp::dp {

/// A replica that may run out of data before the others: a `smp::Join` begins and ends it.
///
/// Under a join the replicas begin each round (a forward pass, a step) by telling each other who
/// has data. One without goes on taking part until none has, and then takes the model of those that
/// were last. Derived classes define the round and how to take part.
class Joinable {
 public:
  /// The replicas' messages of a round.
  struct Round {
    int active = 0;        ///< replicas that have data
    int first_active = 0;  ///< the first of them
    bool reduces = false;
    bool broadcasts = false;
    int64_t kind = 0;  ///< which of the rounds that the derived class tells apart
  };

  virtual ~Joinable() = default;
  Joinable(const Joinable&) = delete;
  Joinable& operator=(const Joinable&) = delete;

  /// Throws `UsageError` inside of another join.
  void begin_join(const JoinOptions& options);
  /// This replica has no data any more. Collective.
  virtual void end_join();
  /// Ends the join where an exception is on its way.
  virtual void leave_join();

 protected:
  /// `name` is its name in errors.
  explicit Joinable(std::string name) : name_(std::move(name)) {}

  bool is_joining() const { return is_joining_; }
  /// Begins a round, of a replica that has data. Collective under a join; otherwise all have data.
  Round begin_round(bool reduces, bool broadcasts, int64_t kind = 0) const;
  /// The number of replicas by which a round divides.
  int divisor(const Round& round) const;

  virtual comm::Communicator& replicas() const = 0;
  /// Takes part in a round of the others without data.
  virtual void take_part(const Round& round) = 0;
  /// Gives all replicas the model of one of them. Collective.
  virtual void take_model_of(int root) = 0;

 private:
  Round exchange(bool active, const Round& own) const;

  const std::string name_;
  bool is_joining_ = false;
  JoinOptions options_;
};

}  // namespace smp::dp
