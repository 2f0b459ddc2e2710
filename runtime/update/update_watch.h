// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "graph/graph.h"
#include "runtime/parameters/foreign.h"
#include "runtime/update/gradient_probes.h"

namespace smp::runtime {

/// Watches for mistakes around a program's steps that no rank can find by itself: whether the ranks
/// that have one model together scale their gradients alike, whether steps train before the
/// optimizer steps, and whether the optimizer that steps is one that can update this rank's parts.
/// Belongs to the rank's thread. Internal.
///
/// Costs no message: notes between ranks travel with their messages at the beginning of a step. So
/// gradients that were scaled wrongly are found when the next step begins, or at the next save.
class UpdateWatch {
 public:
  /// `runtime` must outlive this.
  explicit UpdateWatch(const Runtime& runtime) : runtime_(runtime) {}

  /// A step begins. Returns a note for the other ranks of the model.
  std::string before_step();
  /// Compares the notes of all these ranks. Throws a `UsageError` on all of them where they cannot
  /// have scaled their gradients by one norm over all. `kind` is the ranks' name in errors: "pp
  /// rank".
  void compare(const std::vector<std::string>& notes, const std::string& kind);
  /// Both for calls that are no steps. Collective over the ranks of the model.
  void compare_now();
  /// A step function has run `graph`. The first that trains warns of parameters that it leaves
  /// out.
  void after_step(const std::string& step_name, const graph::Graph& graph);

  /// A `DistributedOptimizer` is about to step, and has.
  void before_update();
  void after_update() { look(); }

  /// While it lives, a `DistributedOptimizer` works: parameters that other ranks of the pipeline
  /// own have no `.grad`, so that it passes over them.
  class Updating {
   public:
    explicit Updating(UpdateWatch& watch);
    ~Updating();
    Updating(const Updating&) = delete;
    Updating& operator=(const Updating&) = delete;

   private:
    UpdateWatch& watch_;
  };
  /// A step has given such parameters gradients, which their owners have.
  void give(const ForeignGradients& gradients);

  /// How often these have happened.
  int64_t trainings() const { return trainings_; }
  int64_t evaluations() const { return evaluations_; }
  int64_t updates() const { return updates_; }
  /// Sets the count of another replica, whose model this one has taken.
  void set_updates(int64_t count) { updates_ = count; }
  /// The step function that was called last without `backward`.
  const std::string& last_evaluation() const { return last_evaluation_; }

  /// Marks the library's own changes of gradients until the end of the block: they are not the
  /// program's doing. Also without `init`.
  class OwnScaling {
   public:
    OwnScaling();
    ~OwnScaling();
    OwnScaling(const OwnScaling&) = delete;
    OwnScaling& operator=(const OwnScaling&) = delete;

   private:
    UpdateWatch* watch_;
  };

 private:
  static constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

  /// The factor by which a rank has multiplied its gradients since the last comparison, and their
  /// norm then.
  struct Scaling {
    double factor = kUnknown;
    double norm = kUnknown;
    double tolerance = 0;

    bool is_known() const { return factor == factor; }
    bool differs(const Scaling& other) const;
  };

  bool has_others() const;
  std::vector<at::Tensor> own_gradients() const;
  void look();
  void settle();
  void check_optimizer();
  void warn_of_unread(const std::string& step_name, const graph::Graph& graph) const;

  const Runtime& runtime_;
  GradientProbes probes_;
  Scaling scaling_;
  std::vector<Scaling> differed_;  // scalings of all ranks, when they last differed
  int64_t trainings_ = 0, evaluations_ = 0, updates_ = 0;
  std::string last_evaluation_;
  bool warned_of_optimizer_ = false;
  bool is_updating_ = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> aside_;  // foreign parameters and their gradients
};

}  // namespace smp::runtime
