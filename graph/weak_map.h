// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/flat_hash_map.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace smp::graph {

/// The facts known of objects, by identity. It does not keep them alive, but their addresses from
/// being used again; that memory is let go in two ways, since most objects live shortly: where an
/// object is gone soon after it was added, while the processor still has its memory in its caches;
/// and for the others when the map has doubled.
template <class Object, class Info>
class WeakMap {
 public:
  Info* find(const Object* object) {
    const auto it = entries_.find(object);
    return it == entries_.end() ? nullptr : &it->second.info;
  }
  const Info* find(const Object* object) const { return const_cast<WeakMap*>(this)->find(object); }

  /// The entry of the object, which is added if it is new: `weak()` refers to it.
  template <class Weak>
  Info& add(const Object* object, const Weak& weak) {
    if (Info* known = find(object)) return *known;
    if (added_.size() >= kYoung) forget_young();
    if (entries_.size() >= forget_at_) forget_old();
    added_.push_back(object);
    return entries_.emplace(object, Entry{Info{}, weak()}).first->second.info;
  }

  /// `visit(object, info)`, `object` being an owner, for those that are alive, until it returns
  /// false. It may add none.
  template <class Visit>
  void for_each_alive(const Visit& visit) const {
    for (const auto& [object, entry] : entries_) {
      const auto owner = entry.weak.lock();
      if (owner && !visit(owner, entry.info)) return;
    }
  }

 private:
  struct Entry {
    Info info;
    c10::weak_intrusive_ptr<Object> weak;
  };
  static constexpr size_t kYoung = 32;
  static constexpr size_t kOld = 1024;

  void forget_young() {
    for (const Object* object : added_) {
      const auto it = entries_.find(object);
      if (it->second.weak.expired()) entries_.erase(it);
    }
    added_.clear();
  }

  void forget_old() {
    for (auto it = entries_.begin(); it != entries_.end();) {
      it = it->second.weak.expired() ? entries_.erase(it) : std::next(it);
    }
    added_.clear();
    forget_at_ = std::max(kOld, 2 * entries_.size());
  }

  ska::flat_hash_map<const Object*, Entry> entries_;
  std::vector<const Object*> added_;  // since the young ones were looked at
  size_t forget_at_ = kOld;
};

}  // namespace smp::graph
