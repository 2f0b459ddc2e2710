// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "core/descriptor.h"

namespace smp::tools {

/// A private folder of `parent` that goes away with this object: "smprun-" and some letters. The
/// next launcher of this user removes the folders of killed ones: a file "launcher", which goes
/// last, says whose they are.
class JobFolder {
 public:
  /// Throws `smp::Error` that ends with `advice` when there can be none.
  JobFolder(const std::string& parent, const std::string& advice);
  ~JobFolder();

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  core::Descriptor lock_;  // held as long as the folder is in use
};

}  // namespace smp::tools
