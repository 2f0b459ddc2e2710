// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <caffe2/serialize/inline_container.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/temp_folder.h"

/// The archives that make_fixtures.py has written, and changed ones.
namespace smp::testing {

inline std::string archive(const std::string& name) {
  return "tests/exported/archives/" + name + ".pt2";
}

using Records = std::map<std::string, std::string>;

inline Records records_of(const std::string& path) {
  caffe2::serialize::PyTorchStreamReader reader(path);
  Records records;
  for (const std::string& name : reader.getAllRecords()) {
    if (name.rfind(".data/", 0) == 0) continue;  // the writer writes its own
    const auto [data, size] = reader.getRecord(name);
    records[name] = std::string(static_cast<const char*>(data.get()), size);
  }
  return records;
}

/// The bytes of an archive.
inline std::string archive_of(const Records& records) {
  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  for (const auto& [name, content] : records) {
    writer.writeRecord(name, content.data(), content.size());
  }
  writer.writeEndOfFile();
  return bytes;
}

/// Writes the small archive with another program, and returns the file's path.
using Edit = std::function<void(nlohmann::json& program)>;
inline std::string edited(const TempFolder& folder, const Edit& edit,
                          const std::string& record = "models/model.json") {
  Records records = records_of(archive("small"));
  nlohmann::json json = nlohmann::json::parse(records.at(record));
  edit(json);
  records[record] = json.dump();
  return folder.write("edited.pt2", archive_of(records));
}

}  // namespace smp::testing
