// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <utility>

namespace smp::comm {

class AtWorldEnd;
class Communicator;

/// Knows those of a world that have objects of devices, on one of its ranks. A split has its
/// parent's. May be used from any thread.
class WorldEnd {
 public:
  /// The world ends, and nothing is sent any more. The last made let go first; throws their errors,
  /// with the others left.
  void let_go();

 private:
  friend class AtWorldEnd;

  std::mutex mutex_;
  // Guarded by mutex_, in the order in which they were made.
  std::list<std::pair<const AtWorldEnd*, std::function<void()>>> holders_;
};

/// Has `let_go` called once by the `WorldEnd` of a group's world, unless this has ended. For
/// classes with objects of a device that may belong to a static object: this ends after libtorch's
/// for the device.
class AtWorldEnd {
 public:
  AtWorldEnd(const Communicator& group, std::function<void()> let_go);
  ~AtWorldEnd();
  AtWorldEnd(const AtWorldEnd&) = delete;
  AtWorldEnd& operator=(const AtWorldEnd&) = delete;

 private:
  const std::shared_ptr<WorldEnd> world_;
};

}  // namespace smp::comm
