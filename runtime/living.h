// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace smp::runtime {

/// Objects of the program, each for as long as it lives, in the order in which they came.
template <class T>
class Living {
 public:
  void add(const std::shared_ptr<T>& object) {
    const auto is_gone = [](const std::weak_ptr<T>& known) { return known.expired(); };
    objects_.erase(std::remove_if(objects_.begin(), objects_.end(), is_gone), objects_.end());
    objects_.push_back(object);
  }

  std::vector<std::shared_ptr<T>> all() const {
    std::vector<std::shared_ptr<T>> result;
    for (const auto& object : objects_) {
      if (auto alive = object.lock()) result.push_back(std::move(alive));
    }
    return result;
  }

 private:
  std::vector<std::weak_ptr<T>> objects_;
};

}  // namespace smp::runtime
