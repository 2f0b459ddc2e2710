// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/group_store.h"

#include <algorithm>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "comm/store/socket.h"
#include "core/env.h"
#include "core/host.h"

namespace smp::comm {

c10::intrusive_ptr<c10d::Store> make_group_store(Communicator& host) {
  const std::vector<std::string> hosts = all_gather_bytes(host, core::host_identity());
  const bool is_one_host = std::all_of(
      hosts.begin(), hosts.end(), [&](const std::string& other) { return other == hosts.front(); });
  const bool serves = host.rank() == 0;
  std::string address = "127.0.0.1";
  if (!is_one_host) {
    const std::string own = serves
                                ? address_of_this_host(core::env("SMP_SOCKET_IFNAME").value_or(""),
                                                       core::env("MASTER_ADDR").value_or(""))
                                : "";
    address = broadcast_bytes(host, own, /*root=*/0);
  }
  c10d::TCPStoreOptions options;
  options.port = 0;  // any that is free
  options.isServer = serves;
  options.waitWorkers = false;
  options.timeout = host.timeout();
  c10::intrusive_ptr<c10d::TCPStore> store;
  if (serves) {
    store = c10::make_intrusive<c10d::TCPStore>(address, options);
  }
  const std::string port =
      broadcast_bytes(host, serves ? std::to_string(store->getPort()) : "", /*root=*/0);
  if (!serves) {
    options.port = static_cast<uint16_t>(std::stoi(port));
    store = c10::make_intrusive<c10d::TCPStore>(address, options);
  }
  return store;
}

}  // namespace smp::comm
