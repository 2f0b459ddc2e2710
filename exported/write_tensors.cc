// SPDX-License-Identifier: Apache-2.0
#include "exported/write_tensors.h"

#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>

#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "exported/write_values.h"

namespace smp::exported {

at::Tensor storage_bytes(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  const auto size = static_cast<int64_t>(storage.nbytes());
  const auto options = at::TensorOptions(at::kByte).device(storage.device());
  return at::empty({0}, options).set_(storage, 0, {size}, {1}).cpu();
}

void write_tensors(ArchiveWriter& archive, const std::string& kind,
                   const std::vector<ExportRequest::Tensor>& tensors) {
  const std::string folder = "data/" + kind + "/";
  std::map<const c10::StorageImpl*, std::string> records;
  auto config = nlohmann::json::object();
  for (const auto& [name, is_parameter, tensor] : tensors) {
    auto [record, is_new] = records.try_emplace(tensor.storage().unsafeGetStorageImpl());
    if (is_new) {
      record->second =
          (kind == "weights" ? "weight_" : "tensor_") + std::to_string(records.size() - 1);
      const at::Tensor bytes = storage_bytes(tensor);
      archive.add(folder + record->second, bytes.const_data_ptr(), bytes.nbytes());
    }
    config[name] = {{"path_name", record->second},
                    {"is_param", is_parameter},
                    {"use_pickle", false},
                    {"tensor_meta", write_meta(tensor)}};
  }
  archive.add(folder + "model_" + kind + "_config.json",
              nlohmann::json{{"config", std::move(config)}}.dump());
}

}  // namespace smp::exported
