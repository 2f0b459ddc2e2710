// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace smp::tools {

/// A private folder of `parent` that goes away with this object: "smprun-" and some letters. The
/// next launcher of this user removes the folders of killed ones: a file "launcher", which goes
/// last, says whose they are.
class JobFolder {
 public:
  /// Throws `smp::Error` that ends with `advice` when there can be none.
  JobFolder(const std::string& parent, const std::string& advice);
  ~JobFolder();
  JobFolder(const JobFolder&) = delete;
  JobFolder& operator=(const JobFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int lock_ = -1;  // held as long as the folder is in use
};

}  // namespace smp::tools
