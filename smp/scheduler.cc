// SPDX-License-Identifier: Apache-2.0
#include "smp/scheduler.h"

#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <variant>

#include "core/check.h"
#include "runtime/runtime.h"
#include "runtime/save/background_save.h"

namespace smp {
namespace {

using torch::optim::LRScheduler;
using torch::optim::ReduceLROnPlateauScheduler;

/// A derived class may name the protected count of its base.
struct CountOf : LRScheduler {
  static constexpr unsigned LRScheduler::*kField = &CountOf::step_count_;
};

// An explicit instantiation may name private members. ReduceLROnPlateauScheduler has no access to
// its state, and a run that goes on without it reduces the rate too late.
float& best_of(ReduceLROnPlateauScheduler& scheduler);
int& cooldown_of(ReduceLROnPlateauScheduler& scheduler);
int& last_epoch_of(ReduceLROnPlateauScheduler& scheduler);
int& bad_epochs_of(ReduceLROnPlateauScheduler& scheduler);

template <auto kBest, auto kCooldown, auto kLastEpoch, auto kBadEpochs>
struct PlateauFields {
  friend float& best_of(ReduceLROnPlateauScheduler& scheduler) { return scheduler.*kBest; }
  friend int& cooldown_of(ReduceLROnPlateauScheduler& scheduler) { return scheduler.*kCooldown; }
  friend int& last_epoch_of(ReduceLROnPlateauScheduler& scheduler) { return scheduler.*kLastEpoch; }
  friend int& bad_epochs_of(ReduceLROnPlateauScheduler& scheduler) { return scheduler.*kBadEpochs; }
};
template struct PlateauFields<
    &ReduceLROnPlateauScheduler::best, &ReduceLROnPlateauScheduler::cooldown_counter,
    &ReduceLROnPlateauScheduler::last_epoch, &ReduceLROnPlateauScheduler::num_bad_epochs>;

/// JSON has no infinity, with which `best` begins.
nlohmann::json number(float value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}
template <class Integer>
nlohmann::json number(Integer value) {
  return value;
}

void take(const nlohmann::json& stored, float& value) {
  value = stored.is_string() ? std::stof(stored.get<std::string>()) : stored.get<float>();
}
template <class Integer>
void take(const nlohmann::json& stored, Integer& value) {
  value = stored.get<Integer>();
}

bool is_number(const nlohmann::json& stored) {
  return stored.is_number() || stored == "inf" || stored == "-inf" || stored == "nan";
}

/// The state on which a scheduler's next learning rates depend, beside the current ones of the
/// optimizer.
struct Scheduler {
  std::string name;
  std::map<std::string, std::variant<unsigned*, int*, float*>> fields;
  SchedulerState own;

  static constexpr const char* kOwn = "own";

  std::string save() const {
    nlohmann::json state;
    for (const auto& [field, place] : fields) {
      state[field] = std::visit([](const auto* value) { return number(*value); }, place);
    }
    if (own.save) state[kOwn] = nlohmann::json::parse(own.save());
    return state.dump();
  }

  void check(const std::string& text) const {
    const auto state = nlohmann::json::parse(text);
    bool fits = state.is_object() && state.size() == fields.size() + (own.save ? 1 : 0);
    for (const auto& [field, place] : fields) {
      fits = fits && state.contains(field) && is_number(state.at(field));
    }
    SMP_CHECK_WITH(CheckpointError, fits && state.contains(kOwn) == (own.save != nullptr),
                   "scheduler \"", name,
                   "\" is not of the kind that was saved under its name: ", text,
                   ". Make the scheduler that the saved run had, or register this one under "
                   "another name and load with strict = false");
  }

  void load(const std::string& text) const {
    const auto state = nlohmann::json::parse(text);
    for (const auto& [field, place] : fields) {
      std::visit([&, &stored = state.at(field)](auto* value) { take(stored, *value); }, place);
    }
    if (own.load) own.load(state.at(kOwn).dump());
  }
};

RemovableHandle register_checked(Scheduler scheduler) {
  const auto shared = std::make_shared<const Scheduler>(std::move(scheduler));
  runtime::CheckpointContext::Extra extra;
  extra.save = [shared] { return shared->save(); };
  extra.load = [shared](const std::string& state) { shared->load(state); };
  extra.check = [shared](const std::string& state) { shared->check(state); };
  return runtime::register_extra(runtime::Runtime::get().checkpoint_context, "register_scheduler",
                                 shared->name, std::move(extra));
}

}  // namespace

RemovableHandle register_scheduler(const std::string& name, LRScheduler& scheduler,
                                   SchedulerState own) {
  SMP_CHECK_WITH(UsageError, (own.save == nullptr) == (own.load == nullptr),
                 "register_scheduler of \"", name,
                 "\": a SchedulerState needs both save and load, got one of them");
  return register_checked({name, {{"step_count", &(scheduler.*CountOf::kField)}}, std::move(own)});
}

RemovableHandle register_scheduler(const std::string& name, ReduceLROnPlateauScheduler& scheduler) {
  return register_checked({name,
                           {{"best", &best_of(scheduler)},
                            {"cooldown", &cooldown_of(scheduler)},
                            {"last_epoch", &last_epoch_of(scheduler)},
                            {"bad_epochs", &bad_epochs_of(scheduler)}},
                           {}});
}

}  // namespace smp
