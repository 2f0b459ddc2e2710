// SPDX-License-Identifier: Apache-2.0
#include "partitioner/cost_model.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>
#include <tuple>
#include <utility>

#include "core/check.h"
#include "core/json.h"
#include "core/json_reader.h"
#include "core/text.h"

namespace smp::partitioner {
namespace {

using core::JsonReader;
using nlohmann::json;

template <class T>
struct Field {
  const char* name;
  double T::*member;
};

constexpr std::array<Field<Link>, 3> kLinkFields = {{{"message_us", &Link::message_us},
                                                     {"tensor_us", &Link::tensor_us},
                                                     {"bytes_per_us", &Link::bytes_per_us}}};
constexpr std::array<Field<Compute>, 4> kComputeFields = {
    {{"call_us", &Compute::call_us},
     {"bytes_per_us", &Compute::bytes_per_us},
     {"flops_per_us", &Compute::flops_per_us},
     {"half_flops_per_us", &Compute::half_flops_per_us}}};

template <class T, size_t N>
bool equal(const T& a, const T& b, const std::array<Field<T>, N>& fields) {
  return std::all_of(fields.begin(), fields.end(),
                     [&](const Field<T>& field) { return a.*field.member == b.*field.member; });
}

template <class T, size_t N>
json write(const T& value, const std::array<Field<T>, N>& fields) {
  json object;
  for (const Field<T>& field : fields) object[field.name] = value.*field.member;
  return object;
}

template <class T, size_t N>
std::string names_of(const std::array<Field<T>, N>& fields) {
  std::string names;
  for (const Field<T>& field : fields) names += c10::str(names.empty() ? "" : ", ", field.name);
  return names;
}

bool is_faster(const Link& a, const Link& b) {
  constexpr int64_t kBytes = 1 << 20;
  return a.message_us + a.of_tensor(kBytes) < b.message_us + b.of_tensor(kBytes);
}

[[noreturn]] void fail_unknown(const JsonReader& object, const std::string& name,
                               const std::string& known) {
  object.fail(c10::str("there is no field \"", core::printable(name, 100), "\", but ", known));
}

/// Fields that are left out keep their defaults.
template <class T, size_t N>
T read(const JsonReader& object, const std::array<Field<T>, N>& fields) {
  T result;
  for (const auto& [name, value] : object.members()) {
    const auto field =
        std::find_if(fields.begin(), fields.end(),
                     [&name = name](const auto& known) { return name == known.name; });
    if (field == fields.end()) fail_unknown(object, name, names_of(fields));
    value.expect(value.value().is_number() && value.number() > 0, "a number above 0");
    result.*field->member = value.number();
  }
  return result;
}

/// The figures of a GPU in NVIDIA's data sheets.
struct Gpu {
  std::string_view name;
  double gigabytes;       ///< memory's gigabytes a second
  double teraflops;       ///< in float32
  double half_teraflops;  ///< teraflops of its tensor cores in types of two bytes, without sparsity
};

constexpr Gpu kGpus[] = {
    {"t4", 320, 8.1, 65},    {"v100", 900, 15.7, 125}, {"a10", 600, 31.2, 125},
    {"l4", 300, 30.3, 121},  {"l40s", 864, 91.6, 362}, {"a100", 2039, 19.5, 312},
    {"h100", 3350, 67, 989}, {"h200", 4800, 67, 989},  {"b200", 8000, 80, 2250},
};

/// How much of it an A100 achieves: 1.3 TB/s, 14 and 200 TFLOP/s.
constexpr double kOfBytes = 0.64;
constexpr double kOfFlops = 0.72;

CostModel costs_of(const Gpu& gpu) {
  const Compute compute = {5, kOfBytes * gpu.gigabytes * 1e3, kOfFlops * gpu.teraflops * 1e6,
                           kOfBytes * gpu.half_teraflops * 1e6};
  return {compute, {{30, 5, 2e4}}};
}

/// Floating point operations of a multiprocessor in a cycle, from a compute capability on: of
/// float32, and of its tensor cores in types of two bytes, with sums in float32.
struct Throughput {
  int capability;
  double flops;
  double half_flops;
};

constexpr Throughput kThroughput[] = {{70, 128, 1024}, {80, 128, 2048},  {86, 256, 1024},
                                      {90, 256, 4096}, {100, 256, 8192}, {120, 256, 1024}};

const Throughput& throughput_of(int capability) {
  const auto* const above = std::upper_bound(
      std::begin(kThroughput) + 1, std::end(kThroughput), capability,
      [](int value, const Throughput& throughput) { return value < throughput.capability; });
  return *std::prev(above);
}

}  // namespace

bool Link::operator==(const Link& other) const { return equal(*this, other, kLinkFields); }
bool Compute::operator==(const Compute& other) const { return equal(*this, other, kComputeFields); }
bool CostModel::operator==(const CostModel& other) const {
  return compute == other.compute && links == other.links;
}

const Link& CostModel::slowest() const {
  return *std::max_element(links.begin(), links.end(), is_faster);
}

const Link& CostModel::between(int rank, int other) const {
  if (links.size() == 1 || rank == other) return links.front();
  const auto [first, last] = std::minmax(rank, other);
  SMP_CHECK_WITH(
      ConfigError, last <= static_cast<int>(links.size()),
      "\"cost_model\": expected one link for all ranks of a pipeline, or one for each two "
      "neighbours, got ",
      links.size(), " links for ranks up to ", last);
  return *std::max_element(links.begin() + first, links.begin() + last, is_faster);
}

std::optional<CostModel> CostModel::of_gpu(const std::string& name) {
  for (const Gpu& gpu : kGpus) {
    if (gpu.name == name) return costs_of(gpu);
  }
  return std::nullopt;
}

std::optional<CostModel> CostModel::of_gpu(const graph::DeviceProperties& properties) {
  const Throughput& throughput = throughput_of(properties.capability);
  const double cycles =
      properties.multiprocessors * properties.clock_khz * 1e3;                // a second, of all
  const double bits = 2 * properties.memory_khz * 1e3 * properties.bus_bits;  // a second
  if (cycles <= 0 || bits <= 0) return std::nullopt;
  Gpu gpu = {"", bits / 8 / 1e9, cycles * throughput.flops / 1e12,
             cycles * throughput.half_flops / 1e12};
  if (properties.is_geforce) gpu.half_teraflops /= 2;  // sums in float32 take two cycles
  return costs_of(gpu);
}

CostModel CostModel::of_device(c10::Device device) {
  if (device.is_cpu()) return CostModel();
  const auto properties = graph::device_properties(device);
  const auto costs = properties ? of_gpu(*properties) : std::nullopt;
  return costs ? *costs : *of_gpu("a100");
}

std::vector<std::string> gpu_names() {
  std::vector<std::string> names;
  for (const Gpu& gpu : kGpus) names.emplace_back(gpu.name);
  return names;
}

std::string to_json(const CostModel& costs) {
  json object;
  object["compute"] = write(costs.compute, kComputeFields);
  object["links"] = json::array();
  for (const Link& link : costs.links) object["links"].push_back(write(link, kLinkFields));
  return object.dump();
}

CostModel cost_model_from_json(const std::string& text, const std::string& source_name) {
  const json document = core::parse_json(text, source_name);
  const JsonReader root(document, source_name);
  CostModel costs;
  for (const auto& [name, value] : root.members()) {
    if (name == "compute") {
      costs.compute = read(value, kComputeFields);
    } else if (name == "links") {
      value.expect(value.value().is_array() && !value.value().empty(), "a list of objects");
      costs.links.clear();
      for (const JsonReader& link : value.elements())
        costs.links.push_back(read(link, kLinkFields));
    } else {
      fail_unknown(root, name, "compute, links");
    }
  }
  return costs;
}

}  // namespace smp::partitioner
