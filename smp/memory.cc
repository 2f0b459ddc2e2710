// SPDX-License-Identifier: Apache-2.0
#include "smp/memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/StringUtil.h>

#include <tuple>
#include <vector>

#include "comm/device/ipc.h"
#include "core/status.h"
#include "core/table.h"
#include "partitioner/format.h"
#include "smp/init.h"
#include "smp/objects.h"

namespace smp {
namespace {

using core::Table;
using partitioner::format_bytes;

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

/// The form in which ranks tell each other.
using Row = std::tuple<std::string, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

Row row_of(const std::optional<DeviceMemory>& memory) {
  if (!memory) return {};
  return {memory->device.str(), memory->allocated, memory->peak, memory->held,
          memory->shared,       memory->free,      memory->total};
}

std::string text_of(const std::vector<Row>& rows) {
  Table table;
  table.column("rank", Table::Align::kRight);
  table.column("device", Table::Align::kLeft);
  for (const char* heading : {"allocated", "peak", "held", "shared", "free", "of"}) {
    table.column(heading, Table::Align::kRight);
  }
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    const auto& [device, allocated, peak, held, shared, free, total] = rows[rank];
    table.row({std::to_string(rank), device, format_bytes(allocated), format_bytes(peak),
               format_bytes(held), format_bytes(shared), format_bytes(free), format_bytes(total)});
  }
  return table.to_string();
}

}  // namespace

std::optional<DeviceMemory> device_memory() {
  const c10::Device where = device();
  if (where.is_cpu()) return std::nullopt;
  c10::DeviceAllocator* allocator = c10::getDeviceAllocator(where.type());
  const auto stats = allocator->getDeviceStats(where.index());
  const auto [free, total] = allocator->getMemoryInfo(where.index());
  const auto& allocated = stats.allocated_bytes[kAll];
  return DeviceMemory{where,
                      allocated.current,
                      allocated.peak,
                      stats.reserved_bytes[kAll].current,
                      comm::shared_bytes(where),
                      static_cast<int64_t>(free),
                      static_cast<int64_t>(total)};
}

void reset_peak_memory() {
  const c10::Device where = device();
  if (where.is_cpu()) return;
  c10::getDeviceAllocator(where.type())->resetPeakStats(where.index());
}

std::string memory_report() {
  const core::CallScope here("smp::memory_report");
  const auto memory = device_memory();
  const auto rows = allgather(row_of(memory), CommGroup::kWorld);
  return memory ? text_of(rows) : "";
}

}  // namespace smp
